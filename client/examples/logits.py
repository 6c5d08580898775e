"""Logits behind each prompt token and each generated one, with nothing but NVIDIA's tritonclient.

python client/examples/logits.py [localhost:8001]
"""

from __future__ import annotations

import queue
import sys
from typing import Any

import numpy as np
import tritonclient.grpc as grpcclient


def tensor(name: str, values: list[Any], dtype: str, numpy_dtype: Any) -> grpcclient.InferInput:
    made = grpcclient.InferInput(name, [len(values)], dtype)
    made.set_data_from_numpy(np.array(values, numpy_dtype))
    return made


inputs = [
    tensor("text_input", [b"Once upon a time"], "BYTES", np.object_),
    tensor("max_tokens", [8], "INT32", np.int32),
    tensor("temperature", [0.0], "FP32", np.float32),
    tensor("return_context_logits", [True], "BOOL", np.bool_),
    tensor("return_generation_logits", [True], "BOOL", np.bool_),
]
url = sys.argv[1] if len(sys.argv) > 1 else "localhost:8001"
answers: queue.Queue[tuple[Any, Any]] = queue.Queue()
with grpcclient.InferenceServerClient(url) as client:
    client.start_stream(lambda result, error: answers.put((result, error)))
    client.async_stream_infer("llm", inputs)
    result, error = answers.get(timeout=60)
    client.stop_stream()
if error is not None:
    raise SystemExit(str(error))
generated = result.as_numpy("generation_logits")[0]
print(f"context_logits {result.as_numpy('context_logits').shape}, generation_logits {generated.shape}")
print(f"the likeliest tokens: {generated.argmax(axis=1).tolist()}")
print(f"the chosen ones:      {result.as_numpy('output_ids')[0][-len(generated) :].tolist()}")
