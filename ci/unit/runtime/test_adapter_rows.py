"""Which adapter each token of a step goes through, in the order of the batch, and what a step puts into slots."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from inflight.runtime.row_table import RowTable
from inflight.runtime.step_input import StepInput, StepPreparation
from inflight.runtime.step_sizes import StepSizes
from inflight.sampling_config import SamplingConfig
from inflight.scheduler_output import NO_SLOT, NewSequence, RowWork, SchedulerOutput

SLOTS = {0: 1, 1: NO_SLOT, 2: 0, 3: 2}
"""Row -> slot."""


class Store:
    def find(self, uid: int) -> dict[str, Any]:
        if uid != 7:
            raise ValueError(f"adapter {uid} is not stored")
        return {"a layer": uid}


def preparation(device: str = "cpu", num_slots: int = 3) -> StepPreparation:
    table = RowTable(8, 16, 99)
    store: Any = Store()
    return StepPreparation(
        table,
        vocab_size=50,
        sizes=StepSizes.of(device, 8),
        adapters=store,
        num_adapter_slots=num_slots,
    )


def new(row: int, num_tokens: int, slot: int) -> NewSequence:
    tokens = list(range(num_tokens))
    return NewSequence(
        row=row,
        token_ids=tokens,
        num_prompt_tokens=num_tokens,
        block_ids=[row],
        sampling_config=SamplingConfig(),
        adapter_slot=slot,
    )


def place(prepared: StepPreparation, counts: dict[int, int], **more: Any) -> StepInput:
    """A step of new rows with so many tokens each."""
    sequences = [new(row, count, SLOTS[row]) for row, count in counts.items()]
    rows = [RowWork(row=s.row, start=0, num_tokens=len(s.token_ids), token_ids=s.token_ids) for s in sequences]
    return prepared.prepare(SchedulerOutput(new_sequences=sequences, rows=rows, **more), [])


def adapters(step: StepInput) -> list[int]:
    found: list[int] = step.arrays["adapters"].tolist()
    return found


def test_each_token_has_the_adapter_of_its_row_in_batch_order() -> None:
    step = place(preparation(), {0: 3, 1: 2, 2: 1, 3: 2})
    assert adapters(step) == [0, 1, 1, 1, NO_SLOT, NO_SLOT, 2, 2]
    assert step.arrays["adapters"].dtype == np.int32


def test_padding_has_none() -> None:
    step = place(preparation("cuda"), {0: 3, 2: 1, 1: 1, 3: 1})
    padded = step.num_decodes - 3
    assert padded > 0
    assert adapters(step) == [0, NO_SLOT, 2] + [NO_SLOT] * padded + [1, 1, 1]


def test_a_step_without_adapters_carries_nothing_of_them() -> None:
    prepared = preparation()
    place(prepared, {0: 3, 1: 2})
    step = prepared.prepare(
        SchedulerOutput(new_sequences=[], rows=[RowWork(row=1, start=2, num_tokens=1)]),
        [],
    )
    assert "adapters" not in step.arrays and step.adapter_loads == []
    again = prepared.prepare(SchedulerOutput(new_sequences=[], rows=[RowWork(row=0, start=3, num_tokens=1)]), [])
    assert adapters(again) == [1], "the row keeps its adapter"


def test_a_row_that_is_given_away_loses_its_adapter() -> None:
    prepared = preparation()
    place(prepared, {0: 2})
    sequence = new(0, 1, NO_SLOT)
    row = RowWork(row=0, start=0, num_tokens=1, token_ids=[0])
    step = prepared.prepare(SchedulerOutput(new_sequences=[sequence], rows=[row]), [])
    assert "adapters" not in step.arrays


def test_slots_are_filled_with_what_is_stored() -> None:
    step = place(preparation(), {0: 1}, adapter_loads=[(1, 7)])
    assert step.adapter_loads == [(1, {"a layer": 7})]
    with pytest.raises(ValueError, match="adapter 8 is not stored"):
        place(preparation(), {0: 1}, adapter_loads=[(1, 8)])
    with pytest.raises(ValueError, match="a step fills another slot"):
        place(preparation(), {0: 1}, adapter_loads=[(3, 7)])
    with pytest.raises(ValueError, match="1 adapters are served, but row 0 names slot 1"):
        place(preparation(num_slots=1), {0: 1})
