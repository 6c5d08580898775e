"""Drafts of another model, with the logits that they were sampled from: some are accepted, and the text is distributed
as if there were none. The other model is an adapter of the default one here; any with the same tokens will do.

python client/examples/speculative_sampling.py [localhost:8001]
"""

from __future__ import annotations

import queue
import sys
from typing import Any

import numpy as np
import tritonclient.grpc as grpcclient

from inflight_client import Client

PROMPT, TEMPERATURE, NUM_DRAFTS = "Once upon a time", 0.8, 8


def draft(url: str) -> tuple[list[int], Any]:
    """Tokens of the other model, and the logits (tokens, vocabulary) that each was sampled from."""
    values = {
        "text_input": ("BYTES", np.array([PROMPT.encode()], np.object_)),
        "max_tokens": ("INT32", np.array([NUM_DRAFTS], np.int32)),
        "temperature": ("FP32", np.array([TEMPERATURE], np.float32)),
        "end_id": ("INT32", np.array([-1], np.int32)),
        "lora_name": ("BYTES", np.array([b"bullets"], np.object_)),
        "return_generation_logits": ("BOOL", np.array([True])),
    }
    inputs = []
    for name, (dtype, array) in values.items():
        inputs.append(grpcclient.InferInput(name, array.shape, dtype))
        inputs[-1].set_data_from_numpy(array)
    answers: queue.Queue[tuple[Any, Any]] = queue.Queue()
    with grpcclient.InferenceServerClient(url) as client:
        client.start_stream(lambda result, error: answers.put((result, error)))
        client.async_stream_infer("llm", inputs)
        result, error = answers.get(timeout=60)
        client.stop_stream()
    if error is not None:
        raise SystemExit(str(error))
    return result.as_numpy("output_ids")[0][-NUM_DRAFTS:].tolist(), result.as_numpy("generation_logits")[0]


url = sys.argv[1] if len(sys.argv) > 1 else "localhost:8001"
tokens, logits = draft(url)
with Client(url) as client:
    answer = client.generate(
        PROMPT, max_tokens=48, temperature=TEMPERATURE, draft_input_ids=tokens, draft_logits=logits
    )
differing = (index for index, pair in enumerate(zip(tokens, answer.token_ids, strict=False)) if pair[0] != pair[1])
print(f"{next(differing, len(tokens))} of {len(tokens)} drafts became text: {answer.text!r}")
