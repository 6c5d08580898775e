"""Networks that transformers' modelling code computes: loading one for a test, or its refusal, and the right tokens."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from model_driver import Driver, Work
from tiny_checkpoints import TinyCheckpoint

from inflight.config import EngineConfig
from inflight.distributed.rank_group import SingleRank
from inflight.errors import ConfigurationError
from inflight.models.transformers_sequential import wants_positions
from inflight.runtime.model_runner import ModelRunner

BLOCK_SIZE = 4
NUM_TOKENS = 16


def config_of(folder: Path, **options: Any) -> EngineConfig:
    defaults: dict[str, Any] = {
        "device": "cpu",
        "max_batch_size": 8,
        "max_num_tokens": 256,
        "max_seq_len": 100,
        "tokens_per_block": BLOCK_SIZE,
        "max_tokens_in_paged_kv_cache": 1024,
        "num_threads": 1,
    }
    return EngineConfig(gpt_model_path=str(folder), **{**defaults, **options})


def load(folder: Path, **options: Any) -> ModelRunner:
    return ModelRunner.load(config_of(folder, **options), SingleRank())


def refusal(folder: Path, **options: Any) -> str:
    with pytest.raises(ConfigurationError) as caught:
        load(folder, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value).removeprefix(f"{folder}").removeprefix("/config.json").removeprefix(": ")


@dataclass(frozen=True)
class Sample:
    """A prompt, and what transformers makes of it."""

    prompt: list[int]
    tokens: list[int]
    log_probs: torch.Tensor

    @classmethod
    def of(cls, checkpoint: TinyCheckpoint, length: int) -> Sample:
        prompt, tokens = checkpoint.prompt(length, NUM_TOKENS)
        model = checkpoint.model
        with torch.inference_mode():
            token_ids = torch.tensor([prompt + tokens])
            # As generate numbers them.
            positions = {"position_ids": torch.arange(token_ids.shape[1])[None]} if wants_positions(model) else {}
            logits = model(token_ids, **positions).logits[0, length - 1 : -1]
        return cls(prompt, tokens, logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0])

    def work(self, **options: Any) -> Work:
        return Work(prompt=self.prompt, max_tokens=NUM_TOKENS, log_probs=True, **options)

    def check(self, work: Work) -> None:
        """The same tokens, and as likely: a network that repeats itself would hide a fault in its tokens alone."""
        assert work.output == self.tokens
        torch.testing.assert_close(torch.tensor(work.output_log_probs), self.log_probs, rtol=1e-3, atol=1e-3)


def run(runner: ModelRunner, samples: list[Sample], works: list[Work]) -> None:
    Driver(runner).run(works)
    for sample, work in zip(samples, works, strict=True):
        sample.check(work)
