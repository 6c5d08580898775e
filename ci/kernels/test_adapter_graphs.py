"""Decode steps with LoRA adapters that replay graphs: the tokens of steps that launch each kernel, beside rows without
an adapter, and when an adapter is put into another slot between two replays.

Run: pytest ci/kernels/test_adapter_graphs.py
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from lora_adapters import RandomAdapter
from model_driver import Work
from tiny_checkpoints import TinyCheckpoint, make_prompt
from torch import Tensor

from ci.kernels.recorded_runners import graphs_on_cpu, load_greedy, run_two_rows, tiny_checkpoint, without_graphs
from inflight.distributed.rank_group import SingleRank
from inflight.layers.lora import LoraSlots
from inflight.lora import AdapterOrders, AdapterPart
from inflight.runtime.model_runner import ModelRunner
from inflight.runtime.staging import InputBuffer
from inflight.scheduler_output import NO_SLOT

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.is_available(), reason="the graphs are recorded on the CPU, for the interpreter"),
]

FIRST, SECOND = 1, 2
"""uids of adapters."""


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelRunner]:
    checkpoint = tiny_checkpoint(tmp_path_factory.mktemp("checkpoint"))
    with graphs_on_cpu():
        runner = load_greedy(checkpoint.folder, SingleRank(), max_loras=2, lora_cache_max_adapter_size=8)
        assert runner.adapters is not None
        runner.adapters.follow(AdapterOrders(parts=[part(checkpoint, uid) for uid in (FIRST, SECOND)]))
        yield runner
        runner.close()


def part(checkpoint: TinyCheckpoint, uid: int) -> AdapterPart:
    return RandomAdapter.of(checkpoint, seed=uid, rank=4 * uid).part(uid)


def run(runner: ModelRunner) -> list[list[int]]:
    """A row without an adapter; the same prompt with the first one, with the second one in its slot, and with the first
    one in another slot, then alone beside padding."""
    return run_two_rows(
        runner,
        [
            Work(prompt=make_prompt(5), max_tokens=8),
            Work(prompt=make_prompt(4), max_tokens=3, adapter=(0, FIRST)),
            Work(prompt=make_prompt(4), max_tokens=3, adapter=(0, SECOND), arrives=5),
            Work(prompt=make_prompt(4), max_tokens=3, adapter=(1, FIRST), arrives=10),
        ],
    )


@pytest.fixture(scope="module")
def expected(runner: ModelRunner) -> list[list[int]]:
    """Of steps without graphs."""
    with without_graphs(runner):
        return run(runner)


def test_tokens_are_those_of_steps_without_graphs(runner: ModelRunner, expected: list[list[int]]) -> None:
    found = run(runner)
    num_replays = runner._computation._networks.num_replays
    assert {key.has_adapters for key, count in num_replays.items() if count} == {False, True}
    assert found == expected
    _, first, second, again = found
    assert first == again != second


# -- what is noticed ---------------------------------------------------------------------------------------------------


def test_slots_of_rows_that_are_not_where_they_were_recorded(
    runner: ModelRunner, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    load = InputBuffer.load

    def elsewhere(self: InputBuffer, arrays: dict[str, Any]) -> dict[str, Tensor]:
        if "adapters" not in arrays:
            return load(self, arrays)
        stale = load(self, {**arrays, "adapters": np.full_like(arrays["adapters"], NO_SLOT)})
        return {**stale, "adapters": torch.from_numpy(arrays["adapters"].copy())}

    monkeypatch.setattr(InputBuffer, "load", elsewhere)
    assert_adapted_rows_are_wrong(runner, expected)


def test_slots_that_are_not_where_they_were_recorded(
    runner: ModelRunner, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each adapter brings new memory for all slots."""
    assert runner._computation._adapters is not None
    for slots in runner._computation._adapters._places.slots:
        monkeypatch.setattr(slots, "_b", slots._b)  # back where it was afterwards
    fill = LoraSlots.fill

    def fill_elsewhere(self: LoraSlots, *arguments: Any) -> None:
        self._b = self._b.clone()
        fill(self, *arguments)

    monkeypatch.setattr(LoraSlots, "fill", fill_elsewhere)
    assert_adapted_rows_are_wrong(runner, expected)


def assert_adapted_rows_are_wrong(runner: ModelRunner, expected: list[list[int]]) -> None:
    plain, *adapted = run(runner)
    assert plain == expected[0] and adapted != expected[1:]
