"""A prompt that many requests begin with stays cached longer than others: its KV blocks are among the last to be given
up, for ten minutes after their last use. With nothing but NVIDIA's tritonclient.

python client/examples/retention.py [localhost:8001]
"""

from __future__ import annotations

import queue
import sys
from typing import Any

import numpy as np
import tritonclient.grpc as grpcclient
from tritonclient.utils import np_to_triton_dtype

PREFIX = "Once upon a time there was a little dog who liked to play in the garden with his friend, a small cat. "
KEEP = {
    "retention_token_range_starts": np.array([0], np.int32),
    "retention_token_range_ends": np.array([-1], np.int32),  # to the prompt's end
    "retention_token_range_priorities": np.array([90], np.int32),
    "retention_token_range_durations_ms": np.array([600_000], np.int32),
    "retention_decode_priority": np.array([0], np.int32),  # the answer's own blocks go first
}


def tensor(name: str, values: Any) -> grpcclient.InferInput:
    made = grpcclient.InferInput(name, list(values.shape), np_to_triton_dtype(values.dtype))
    made.set_data_from_numpy(values)
    return made


def ask(client: grpcclient.InferenceServerClient, text: str, **inputs: Any) -> Any:
    """A whole answer."""
    prompt = {"text_input": np.array([text.encode()], np.object_), "max_tokens": np.array([16], np.int32)}
    counts = {"return_perf_metrics": np.ones(1, np.bool_)}
    client.async_stream_infer("llm", [tensor(*item) for item in {**prompt, **counts, **inputs}.items()])
    result, error = answers.get(timeout=60)
    if error is not None:
        raise SystemExit(str(error))
    return result


answers: queue.Queue[tuple[Any, Any]] = queue.Queue()
with grpcclient.InferenceServerClient(sys.argv[1] if len(sys.argv) > 1 else "localhost:8001") as client:
    client.start_stream(lambda result, error: answers.put((result, error)))
    ask(client, PREFIX, **KEEP)
    for ending in ("One day", "But"):
        answer = ask(client, PREFIX + ending)
        reused, total = (answer.as_numpy(f"kv_cache_{name}_blocks")[0] for name in ("reused", "alloc_total"))
        print(f"{ending}: {reused} of {total} blocks were cached")
    client.stop_stream()
