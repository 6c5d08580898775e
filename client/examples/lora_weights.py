"""An adapter of the client's own: its first request brings the weights, later ones only its number. Here they are the
weights of the default model's adapter "pirate", laid out as TensorRT-LLM wants them. With nothing but NVIDIA's
tritonclient.

python client/examples/lora_weights.py [localhost:8001] [ADAPTER]
"""

from __future__ import annotations

import json
import queue
import sys
from pathlib import Path
from typing import Any

import numpy as np
import tritonclient.grpc as grpcclient
from safetensors.numpy import load_file
from tritonclient.utils import np_to_triton_dtype

DEFAULT = Path(__file__).parents[2] / "model_repository" / "llm" / "1" / "adapters" / "pirate"
MODULES = {"q_proj": 1, "k_proj": 2, "v_proj": 3, "o_proj": 4, "gate_proj": 5, "down_proj": 6, "up_proj": 7}
"""TensorRT-LLM's numbers of the layers."""
TASK = np.array([2026], np.uint64)


def read_adapter(folder: Path) -> tuple[Any, Any]:
    """(lora_weights, lora_config): a row for each layer, A and behind it B times the scale, and what the row is of."""
    config = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    scale = config["lora_alpha"] / config["r"]
    tensors = load_file(folder / "adapter_model.safetensors")
    rows, places = [], []
    for name in sorted(tensors):
        if not name.endswith(".lora_A.weight"):
            continue
        a, b = tensors[name], tensors[name.replace(".lora_A.", ".lora_B.")] * scale
        parts = name.split(".")  # base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight
        places.append((MODULES[parts[-3]], int(parts[parts.index("layers") + 1]), config["r"]))
        rows.append(np.concatenate([a.ravel(), b.ravel()]))
    weights = np.zeros((len(rows), max(map(len, rows))), np.float16)
    for target, row in zip(weights, rows, strict=True):
        target[: len(row)] = row
    return weights, np.array(places, np.int32)


def tensor(name: str, values: Any) -> grpcclient.InferInput:
    made = grpcclient.InferInput(name, list(values.shape), np_to_triton_dtype(values.dtype))
    made.set_data_from_numpy(values)
    return made


def ask(client: grpcclient.InferenceServerClient, **inputs: Any) -> str:
    """The text of a whole answer."""
    client.async_stream_infer("llm", [tensor(*item) for item in inputs.items()])
    result, error = answers.get(timeout=60)
    if error is not None:
        raise SystemExit(str(error))
    return str(result.as_numpy("text_output")[0].decode())


weights, places = read_adapter(Path(sys.argv[2]) if len(sys.argv) > 2 else DEFAULT)
prompt = {
    "text_input": np.array([b"Once upon a time"], np.object_),
    "max_tokens": np.array([24], np.int32),
    "temperature": np.zeros(1, np.float32),
    "exclude_input_in_output": np.ones(1, np.bool_),
}
answers: queue.Queue[tuple[Any, Any]] = queue.Queue()
with grpcclient.InferenceServerClient(sys.argv[1] if len(sys.argv) > 1 else "localhost:8001") as client:
    client.start_stream(lambda result, error: answers.put((result, error)))
    print(f"weights: {ask(client, **prompt, lora_task_id=TASK, lora_weights=weights, lora_config=places)!r}")
    print(f"number:  {ask(client, **prompt, lora_task_id=TASK)!r}")
    print(f"neither: {ask(client, **prompt)!r}")
    ask(client, lora_order=np.array([b"unload"], np.object_), lora_task_id=TASK)
    client.stop_stream()
