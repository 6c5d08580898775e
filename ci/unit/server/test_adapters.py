"""LoRA adapters: from tensors into a request."""

from __future__ import annotations

import fake_tokenizer
import numpy as np
import pytest
from llm_tensors import LIMITS, OK, build, read
from msgspec import structs

from inflight.errors import InvalidRequest
from inflight.generation_defaults import GenerationDefaults
from inflight.lora import LoraConfig, LoRARequest
from inflight.request import Request
from inflight.server.request_builder import RequestBuilder

SERVING = structs.replace(LIMITS, num_adapter_slots=2)


def build_adapted(inputs: dict) -> Request:
    return RequestBuilder(fake_tokenizer.byte_tokenizer(), SERVING, GenerationDefaults()).build(read(inputs), 1, "")


WEIGHTS = {"lora_weights": np.ones((2, 6), np.float16), "lora_config": np.array([[1, 0, 2], [6, 3, 1]], np.int32)}


def test_an_adapter_by_name_or_by_number() -> None:
    assert build_adapted({**OK, "lora_name": "pirate"}).lora_request == LoRARequest("pirate")
    assert build_adapted({**OK, "lora_name": ""}).lora_request is None
    assert build_adapted({**OK, "lora_task_id": 2**64 - 1}).lora_config == LoraConfig(2**64 - 1)
    config = build_adapted({**OK, "lora_task_id": 5, **WEIGHTS}).lora_config
    assert config is not None
    assert (config.config, config.weights_dtype) == ([(1, 0, 2), (6, 3, 1)], "float16")
    assert np.array_equal(config.rows(), WEIGHTS["lora_weights"])


def test_an_order_needs_no_prompt() -> None:
    request = build_adapted({"lora_order": "load", "lora_task_id": 5, **WEIGHTS})
    assert (request.lora_order, request.input_token_ids) == ("load", [])
    assert request.lora_config is not None and request.lora_config.task_id == 5
    assert build_adapted({"lora_order": "unload", "lora_name": "pirate"}).lora_order == "unload"


@pytest.mark.parametrize(
    ("inputs", "sentence"),
    [
        ({"lora_name": "../x"}, "lora_name must be 1 to 128 letters"),
        ({"lora_name": "a", "lora_task_id": 1}, "lora_name and lora_task_id are two adapters"),
        ({"lora_task_id": 0}, "lora_task_id must be from 1"),
        (WEIGHTS, "lora_weights and lora_config need lora_task_id"),
        ({"lora_task_id": 1, "lora_weights": WEIGHTS["lora_weights"]}, "must be given together"),
        ({"lora_task_id": 1, **WEIGHTS, "lora_config": np.ones((1, 3), np.int32)}, r"got \[2, 6\] and \[1, 3\]"),
        (
            {"lora_task_id": 1, **WEIGHTS, "lora_weights": np.ones(6, np.float16)},
            "lora_weights must have two dimensions",
        ),
        (
            {
                "lora_task_id": 1,
                "lora_weights": np.ones((2**14 + 1, 0), np.float16),
                "lora_config": np.ones((2**14 + 1, 3), np.int32),
            },
            "lora_config has 16385 rows, more than 16384",
        ),
        (
            {"lora_task_id": 1, **WEIGHTS, "lora_weights": np.broadcast_to(np.float16(1), (2, 2**25))},
            "lora_weights has 134217728 bytes, more than 67108864",
        ),
        ({"lora_order": "drop", "lora_name": "a"}, "lora_order must be load or unload"),
        ({"lora_order": "load"}, "lora_order load needs an adapter"),
    ],
)
def test_adapters_that_are_refused(inputs: dict, sentence: str) -> None:
    with pytest.raises(InvalidRequest, match=sentence):
        build_adapted({**OK, **inputs})


def test_an_engine_without_adapters_says_so() -> None:
    with pytest.raises(InvalidRequest, match="serves no LoRA adapters: they need max_loras above 0"):
        build({**OK, "lora_name": "pirate"})
