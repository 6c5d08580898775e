"""Layers in C++ behind a real tritonserver: every stream of a full batch gets tokens that float32 finds likeliest.

pytest ci/L0_backend/test_compiled.py
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from raw_stream import RawStream
from server_process import ServerProcess
from transformers import AutoModelForCausalLM

from inflight_kernels.cpu import unsupported_reason

CHECKPOINT = Path(__file__).parents[2] / "model_repository" / "llm" / "1" / "checkpoint"
PROMPTS = ["Once upon a time", "The little dog", "There was a girl named", "One day the old"]

pytestmark = pytest.mark.skipif(bool(unsupported_reason()), reason=f"cannot compile here: {unsupported_reason()}")


@pytest.fixture(scope="module")
def compiled_server() -> Iterator[ServerProcess]:
    parameters = {
        "dtype": "bfloat16",
        "cpu_compile": "true",
        "num_threads": "2",
        "max_batch_size": "16",
        "max_num_tokens": "32",
    }
    with ServerProcess(parameters=parameters) as running:
        yield running


def test_tokens_of_a_full_batch_are_the_likeliest(compiled_server: ServerProcess) -> None:
    model = AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32).eval()
    requests = [
        {"text_input": " ".join([prompt] * repeats), "max_tokens": length, "end_id": -1, "stream": True}
        for prompt, length, repeats in itertools.product(PROMPTS, (1, 17, 40), (1, 9))
    ]
    with RawStream(compiled_server.grpc_url) as stream:
        answers = [stream.send(request) for request in requests]
        stream.collect(*answers)
        prompts = [
            stream.ask({"text_input": request["text_input"], "max_tokens": 1, "end_id": -1}).token_ids[:-1]
            for request in requests
        ]
    for request, prompt, answer in zip(requests, prompts, answers, strict=True):
        assert not answer.error and len(answer.token_ids) == request["max_tokens"]
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + answer.token_ids])).logits[0, len(prompt) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(answer.token_ids)[:, None])[:, 0]
        # As likely as the most likely token, except for bfloat16's rounding.
        assert bool((logits.amax(1) - chosen < 0.15 * logits.std(1)).all())
