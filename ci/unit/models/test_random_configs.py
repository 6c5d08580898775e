"""Greedy tokens equal transformers' own for configurations that nobody chose, of every native architecture: sequences
that join a batch, prompts in chunks, a shared prefix, and a pause, in one run; in torch and in C++.

The seeds below are a sample, whose tokens of transformers are kept (`make references`). INFLIGHT_RANDOM_CONFIGS=20
takes so many of each architecture: 11 minutes more of one core, where 2 take half of one (2026-11-29), so by default it
is 2.
"""

from __future__ import annotations

import os
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from compiled_network import needs_compiler
from model_driver import Driver, Work
from random_configs import OPTIONS, draw_config
from tiny_checkpoints import NearTie, TinyCheckpoint, make_prompt, write_checkpoint

from inflight.config import EngineConfig
from inflight.distributed.rank_group import SingleRank
from inflight.runtime.model_runner import ModelRunner

pytestmark = pytest.mark.slow

SEEDS = range(int(os.environ.get("INFLIGHT_RANDOM_CONFIGS", "2")))
WITH_EXPERTS = ("Moe", "Mixtral", "GptOss", "Deepseek", "NemotronH", "KimiLinear", "MiniMax", "Gemma4For")
NUM_TOKENS, BLOCK_SIZE = 12, 4


def load(folder: Path, **options: Any) -> ModelRunner:
    config = EngineConfig(
        gpt_model_path=str(folder),
        device="cpu",
        model_impl="native",
        max_batch_size=8,
        max_num_tokens=256,
        tokens_per_block=BLOCK_SIZE,
        max_tokens_in_paged_kv_cache=1024,
        max_seq_len=64,
        **options,
    )
    return ModelRunner.load(config, SingleRank())


def check_choices(checkpoint: TinyCheckpoint, pairs: list[tuple[list[int], list[int]]]) -> None:
    """NearTie where other experts are chosen, and with them other tokens, if weights are rounded otherwise."""
    weights = {name: tensor.clone() for name, tensor in checkpoint.model.state_dict().items()}
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        noisy = {
            name: tensor * (1 + 1e-5 * torch.randn(tensor.shape, generator=generator))
            for name, tensor in weights.items()
        }
        checkpoint.model.load_state_dict(noisy)
        for prompt, tokens in pairs:
            if checkpoint.expected(prompt, NUM_TOKENS) != tokens:
                raise NearTie


@pytest.mark.parametrize("architecture", OPTIONS)
@pytest.mark.parametrize("cpu_compile", ["false", pytest.param("true", marks=needs_compiler)])
@pytest.mark.parametrize("seed", SEEDS)
def test_tokens_are_those_of_transformers(tmp_path: Path, architecture: str, cpu_compile: str, seed: int) -> None:
    checkpoint = write_checkpoint(tmp_path, draw_config(architecture, seed, is_wide=cpu_compile == "true"), seed)
    try:
        pairs = [checkpoint.prompt(length, NUM_TOKENS) for length in (1, 6, 17, 30)]
        if any(name in architecture for name in WITH_EXPERTS):
            check_choices(checkpoint, pairs)
    except NearTie:
        pytest.skip("transformers' tokens of this network depend on rounding")
    rng = Random(seed)
    works = [
        Work(prompt=prompt, max_tokens=NUM_TOKENS, arrives=rng.randint(0, 5), chunk=rng.choice((1, 3, 7, 100)))
        for prompt, _ in pairs
    ]
    works[rng.randrange(len(works))].pauses_at = rng.randint(1, NUM_TOKENS - 1)
    last, tokens = pairs[-1]
    first = Work(prompt=last[: 3 * BLOCK_SIZE] + make_prompt(4, seed=1), max_tokens=20)
    works += [first, Work(prompt=last, max_tokens=NUM_TOKENS, arrives=6, shares=first, shared_blocks=3)]
    runner = load(tmp_path, cpu_compile=cpu_compile)
    try:
        outputs = Driver(runner).run(works)
    finally:
        runner.close()
    assert outputs[:4] == [expected for _, expected in pairs]
    assert outputs[-1] == tokens


@needs_compiler
@pytest.mark.parametrize("architecture", OPTIONS)
def test_weights_become_codes(tmp_path: Path, architecture: str) -> None:
    """Tokens of int4 over a cache in int8 depend on nothing but the request."""
    write_checkpoint(tmp_path, draw_config(architecture, 3, is_wide=True), 3)
    runner = load(tmp_path, cpu_compile="true", quantization="int4", kv_cache_dtype="int8")
    prompts = [make_prompt(length) for length in (3, 9, 20)]
    works = [Work(prompt=prompt, max_tokens=NUM_TOKENS, chunk=5, arrives=2 * i) for i, prompt in enumerate(prompts)]
    try:
        together = Driver(runner).run(works)
        alone = [Driver(runner).run([Work(prompt=prompt, max_tokens=NUM_TOKENS)])[0] for prompt in prompts]
    finally:
        runner.close()
    assert together == alone
