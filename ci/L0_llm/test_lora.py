"""The default model's adapters through tritonserver: by name, by number with weights, loaded and unloaded by request.

pytest ci/L0_llm/test_lora.py
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from lora_adapters import RandomAdapter
from raw_stream import RawStream
from real_engine import CHECKPOINT
from server_process import ServerProcess
from tiny_checkpoints import TinyCheckpoint
from transformers import AutoModelForCausalLM

from inflight_client import Client, InvalidRequest

PROMPT = "Once upon a time"
IDS = [10, 20, 30]
NUM_TOKENS = 12


@pytest.fixture
def stream(server: ServerProcess) -> Iterator[RawStream]:
    with RawStream(server.grpc_url) as opened:
        yield opened


@pytest.fixture(scope="module")
def checkpoint() -> TinyCheckpoint:
    model = AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    return TinyCheckpoint(CHECKPOINT, model, margin=0.0)


def test_each_adapter_of_the_default_model_has_its_style(client: Client) -> None:
    plain = client.generate(PROMPT, max_tokens=60, temperature=0.0).text
    pirate = client.generate(PROMPT, max_tokens=60, temperature=0.0, lora_name="pirate").text
    bullets = client.generate(PROMPT, max_tokens=60, temperature=0.0, lora_name="bullets").text
    assert pirate.count(", arr!") >= 3 and "arr" not in plain
    assert bullets.count("\n- ") >= 3 and "\n- " not in plain
    assert client.generate(PROMPT, max_tokens=60, temperature=0.0).text == plain


@pytest.mark.parametrize("name", ["missing", "../checkpoint", "/etc"])
def test_names_reach_nothing_but_adapters(client: Client, name: str) -> None:
    with pytest.raises(InvalidRequest, match=r"there is no LoRA adapter missing|lora_name must be"):
        client.generate(PROMPT, lora_name=name)


def test_a_number_with_weights_then_alone_then_unloaded(stream: RawStream, checkpoint: TinyCheckpoint) -> None:
    adapter = RandomAdapter.of(checkpoint, 3, targets=("q_proj", "down_proj"), strength=0.1)
    with adapter.merged(checkpoint) as merged:
        expected = merged.expected(IDS, NUM_TOKENS)
    assert expected != checkpoint.expected(IDS, NUM_TOKENS)
    weights, config = adapter.tensors(np.float16)
    number = np.array([2**63 + 5], np.uint64)

    def ask(**inputs: Any) -> Any:
        prompt = {"input_ids": np.array(IDS, np.int32), "max_tokens": NUM_TOKENS, "end_id": -1}
        return stream.ask({**prompt, "exclude_input_in_output": True, "lora_task_id": number, **inputs})

    assert "is not loaded" in ask().error
    first = ask(lora_weights=weights, lora_config=config)
    assert first.token_ids == expected
    assert ask().token_ids == expected
    assert stream.ask({"lora_order": "unload", "lora_task_id": number}).error == ""
    assert "is not loaded" in ask().error
    order = {"lora_order": "load", "lora_task_id": number, "lora_weights": weights, "lora_config": config}
    loaded = stream.ask(order)
    assert loaded.error == ""
    assert ask().token_ids == expected


def test_orders_by_name(stream: RawStream) -> None:
    assert stream.ask({"lora_order": "load", "lora_name": "pirate"}).error == ""
    assert stream.ask({"lora_order": "unload", "lora_name": "pirate"}).error == ""
    assert "no such LoRA adapter" in stream.ask({"lora_order": "unload", "lora_name": "pirate"}).error
    assert "lora_order must be load or unload" in stream.ask({"lora_order": "drop", "lora_name": "pirate"}).error
    assert "needs an adapter" in stream.ask({"lora_order": "load"}).error
