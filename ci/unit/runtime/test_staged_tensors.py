"""Staged tensors may lie anywhere: nothing behind them asks how, and what reaches a kernel is as its launcher demands.

pytest ci/unit/runtime/test_staged_tensors.py
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_checkpoints import make_checkpoint
from torch import Tensor

from inflight.config import EngineConfig
from inflight.distributed.rank_group import SingleRank
from inflight.runtime.memory_profile import largest_steps
from inflight.runtime.model_runner import ModelRunner
from inflight.runtime.staging import Array, InputBuffer
from inflight.scheduler_output import StepOutput
from inflight_kernels import dispatch

pytestmark = pytest.mark.slow

MAX_NUM_TOKENS = 64


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"), "llama").folder


def scattered(tensor: Tensor) -> Tensor:
    """The same numbers with others between them."""
    return torch.stack([tensor, torch.ones_like(tensor)], dim=-1)[..., 0]


class Launchers:
    """A family's functions, which refuse the vectors that the launchers of its triton kernels refuse."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._module, name)
        if not isinstance(function, Callable):  # type: ignore[arg-type]
            return function

        def launch(*arguments: Any, **options: Any) -> Any:
            for tensor in (*arguments, *options.values()):
                if isinstance(tensor, Tensor) and tensor.dim() == 1:
                    assert tensor.is_contiguous(), f"{name} gets a vector of stride {tensor.stride()}"
            return function(*arguments, **options)

        return launch


@pytest.fixture
def launchers(monkeypatch: pytest.MonkeyPatch) -> None:
    module = dispatch._module
    monkeypatch.setattr(dispatch, "_module", lambda family, kind: Launchers(module(family, kind)))


@pytest.fixture
def load(folder: Path) -> Iterator[Callable[[], ModelRunner]]:
    runners: list[ModelRunner] = []

    def load() -> ModelRunner:
        config = EngineConfig(
            gpt_model_path=str(folder),
            device="cpu",
            max_batch_size=6,
            max_num_tokens=MAX_NUM_TOKENS,
            max_seq_len=64,
            tokens_per_block=4,
            max_tokens_in_paged_kv_cache=512,
            max_loras=1,
        )
        runners.append(ModelRunner.load(config, SingleRank()))
        return runners[-1]

    yield load
    for runner in runners:
        runner.close()


def run(runner: ModelRunner) -> list[StepOutput]:
    """Steps with every option of sampling, low-rank adapters and copied blocks."""
    outputs = []
    for step in largest_steps(runner.limits, runner.block_size, MAX_NUM_TOKENS, is_staged=False):
        step.block_copies.extend([(1, 3), (2, 4)])
        handle = runner.forward(step)
        runner.sample(handle)
        outputs.append(runner.collect(handle))
    return outputs


def test_numbers_that_do_not_lie_side_by_side_are_the_same_numbers(
    load: Callable[[], ModelRunner], launchers: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = run(load())
    load_arrays = InputBuffer.load

    def load_scattered(self: InputBuffer, arrays: dict[str, Array]) -> dict[str, Tensor]:
        return {name: scattered(tensor) for name, tensor in load_arrays(self, arrays).items()}

    monkeypatch.setattr(InputBuffer, "load", load_scattered)
    found = run(load())
    assert [output.token_ids for output in found] == [output.token_ids for output in expected]
    assert [output.log_probs for output in found] == [output.log_probs for output in expected]
