"""A runner of a tiny network for the tests of sampling, and the oracle that they compare it with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from model_driver import Driver, Work
from tiny_checkpoints import TinyCheckpoint

from inflight.config import EngineConfig
from inflight.distributed.rank_group import SingleRank
from inflight.runtime.model_runner import ModelRunner

DEVICES = ["cpu", *([pytest.param("cuda", marks=pytest.mark.gpu)] if torch.cuda.is_available() else [])]


def load(folder: Path, device: str) -> ModelRunner:
    config = EngineConfig(
        gpt_model_path=str(folder),
        device=device,
        max_batch_size=8,
        max_num_tokens=128,
        max_seq_len=64,
        tokens_per_block=4,
        max_tokens_in_paged_kv_cache=512,
    )
    return ModelRunner.load(config, SingleRank())


def greedy(
    checkpoint: TinyCheckpoint, prompt: list[int], num_tokens: int, change: Callable[[torch.Tensor, list[int]], None]
) -> list[int]:
    """Greedy decoding where `change` edits the logits, given the output so far."""
    output: list[int] = []
    for _ in range(num_tokens):
        with torch.no_grad():
            logits = checkpoint.model(torch.tensor([prompt + output])).logits[0, -1]
        change(logits, output)
        output.append(int(logits.argmax()))
    return output


def run(runner: ModelRunner, **options: Any) -> list[int]:
    return Driver(runner).run([Work(**options)])[0]


def as_tensors(bias: dict[int, float]) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor(list(bias)), torch.tensor(list(bias.values()))
