"""Adapters on two ranks: the tokens of merged weights, by name and by number, loads that fail, eviction, relaunch.

pytest ci/L0_executor/test_lora_ranks.py
"""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lora_adapters import RandomAdapter
from real_engine import CHECKPOINT, PATIENCE, Engine, wait_for_end
from tiny_checkpoints import TinyCheckpoint
from transformers import AutoModelForCausalLM

from inflight.lora import LoraConfig, LoRARequest
from inflight.run_directory import RUN_DIRECTORY

PROMPTS = [[10, 20, 30], list(range(40, 75)), [7]]
NUM_TOKENS = 16


class Case:
    """Two adapters of the default checkpoint, and their tokens."""

    def __init__(self, folder: Path) -> None:
        model = AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32).eval()
        model.generation_config.eos_token_id = None
        self.lora_dir = folder
        checkpoint = TinyCheckpoint(CHECKPOINT, model, margin=0.0)
        self.adapters = {
            "small": RandomAdapter.of(checkpoint, 1, rank=5, targets=("v_proj", "down_proj"), strength=0.02),
            "wide": RandomAdapter.of(checkpoint, 2, rank=16, strength=0.005),
        }
        self.expected = {"": [checkpoint.expected(prompt, NUM_TOKENS) for prompt in PROMPTS]}
        for name, adapter in self.adapters.items():
            adapter.save(folder / name)
            with adapter.merged(checkpoint) as merged:
                self.expected[name] = [merged.expected(prompt, NUM_TOKENS) for prompt in PROMPTS]
        self.adapters["small"].save(folder / "broken", bias="all")


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(tmp_path_factory.mktemp("adapters"))


@pytest.fixture(scope="module")
def engine(case: Case) -> Iterator[Engine]:
    run_directory = Path(tempfile.mkdtemp(prefix="run-"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(RUN_DIRECTORY, str(run_directory))
        engine = Engine(
            run_directory,
            tensor_parallel_size="2",
            dtype="float32",
            max_loras="1",
            lora_dir=str(case.lora_dir),
            lora_cache_host_memory_bytes=str(3 * 2**20),
        )
        engine.executor.start()
        yield engine
        engine.executor.shutdown()


def named(name: str) -> dict[str, Any]:
    return {"lora_request": LoRARequest(name)} if name else {}


def check(engine: Engine, case: Case, names: list[str]) -> None:
    """All prompts with each of these adapters, all in flight at once."""
    sent = [
        (engine.submit(prompt, NUM_TOKENS, **named(name)), case.expected[name][index])
        for index, prompt in enumerate(PROMPTS)
        for name in names
    ]
    assert [engine.tokens(request_id) for request_id, _ in sent] == [tokens for _, tokens in sent]


def test_the_adapters_change_the_tokens(case: Case) -> None:
    assert len({str(tokens) for tokens in case.expected.values()}) == 3


def test_tokens_are_those_of_merged_weights(engine: Engine, case: Case) -> None:
    check(engine, case, ["small"])
    check(engine, case, ["", "wide", "small"])


def test_a_load_that_fails_ends_its_request_alone(engine: Engine, case: Case) -> None:
    good = engine.submit(PROMPTS[0], NUM_TOKENS, **named("wide"))
    for name, words in (("broken", "bias in adapter_config.json"), ("missing", "there is no LoRA adapter missing")):
        final = engine.final(engine.submit(PROMPTS[0], NUM_TOKENS, **named(name)))
        assert final.error_code == "INVALID_ARGUMENT"
        assert words in final.error_msg
    assert engine.tokens(good) == case.expected["wide"][0]


def test_numbers_outlive_the_ranks(engine: Engine, case: Case) -> None:
    config = case.adapters["small"].lora_config(11)
    first = engine.submit(PROMPTS[1], NUM_TOKENS, lora_config=config)
    later = engine.submit(PROMPTS[2], NUM_TOKENS, lora_config=LoraConfig(11))
    assert [engine.tokens(first), engine.tokens(later)] == case.expected["small"][1:]
    engine.wait_until_ready()
    running = engine.submit(PROMPTS[2], NUM_TOKENS, streaming=True, lora_config=LoraConfig(11))
    engine.wait_for_first([running])
    pid = engine.rank_pid(1)
    os.kill(pid, signal.SIGKILL)
    wait_for_end(pid)
    assert engine.deaths.acquire(timeout=PATIENCE)
    assert engine.tokens(running) == case.expected["small"][2]
    for prompt, expected in zip(PROMPTS, case.expected["small"], strict=True):
        assert engine.tokens(engine.submit(prompt, NUM_TOKENS, lora_config=LoraConfig(11))) == expected
    check(engine, case, ["small", "wide"])
