"""What a CUDA graph of a decode step would freeze is the same in all steps that it is to replay: however long the rows
are, and however many of them a padded batch has. Ranks that sum through NCCL do it in the same order.

Run: pytest ci/unit/gpu/test_replay.py
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_cuda.context import fake_cuda
from fake_cuda.device import FakeDevice
from fake_cuda.engine import ADAPTER_UID, BLOCK_SIZE, FakeEngine
from fake_cuda.modes import MODES, Mode
from fake_cuda.networks import FAMILIES, FakeRanks
from fake_cuda.trace import COLLECTIVE, Trace, differences

import inflight_kernels
from inflight.layers.attention import AttentionMetadata
from inflight.runtime import batch_layout
from inflight.sampling_config import SamplingConfig
from inflight.scheduler_output import NewSequence, RowWork, SchedulerOutput
from inflight_kernels import StepTokens

pytestmark = pytest.mark.slow

REPLAYED = ("greedy", "random", "filters", "log probabilities", "penalties", "adapter")
LENGTHS = (15, 100, 3000)


@pytest.fixture(scope="module")
def device() -> Iterator[FakeDevice]:
    with fake_cuda() as device:
        yield device


@pytest.fixture(scope="module")
def engine(device: FakeDevice, tmp_path_factory: pytest.TempPathFactory) -> FakeEngine:
    return FakeEngine(device, tmp_path_factory.mktemp("network"), max_batch_size=64, with_options=True)


@pytest.fixture(scope="module")
def ranks(device: FakeDevice, tmp_path_factory: pytest.TempPathFactory) -> list[FakeEngine]:
    folder, group = tmp_path_factory.mktemp("network"), FakeRanks()
    return [FakeEngine(device, folder, rank=rank, ranks=group, max_batch_size=8) for rank in range(2)]


def decode(engine: FakeEngine, mode: Mode, num_rows: int, length: int) -> Trace:
    """A step of `num_rows` rows, each with `length` tokens in the cache."""
    prompt = list(range(length))
    starts = [
        NewSequence(
            row=row,
            token_ids=prompt,
            num_prompt_tokens=length,
            block_ids=list(range(length // BLOCK_SIZE + 2)),
            sampling_config=SamplingConfig(**mode.sampling),
            **mode.new,
        )
        for row in range(num_rows)
    ]
    last = [RowWork(row=row, start=length - 1, num_tokens=1, token_ids=prompt[-1:]) for row in range(num_rows)]
    loads = [(1, ADAPTER_UID)] if mode.loads_adapter else []
    engine.step(SchedulerOutput(new_sequences=starts, rows=last, adapter_loads=loads))
    rows = [RowWork(row=row, start=length, num_tokens=1) for row in range(num_rows)]
    return engine.step(SchedulerOutput(new_sequences=[], rows=rows))[0]


@pytest.mark.parametrize("name", REPLAYED)
@pytest.mark.parametrize("num_rows", [1, 3, 32])
def test_the_length_of_rows_changes_nothing_that_a_graph_freezes(engine: FakeEngine, name: str, num_rows: int) -> None:
    first, *others = (decode(engine, MODES[name], num_rows, length) for length in LENGTHS)
    assert [differences(first, other) for other in others] == [set()] * len(others)


@pytest.mark.parametrize("name", REPLAYED)
def test_the_number_of_rows_in_a_padded_batch_changes_nothing(engine: FakeEngine, name: str) -> None:
    of_five, of_seven, of_eight = (decode(engine, MODES[name], num_rows, 100) for num_rows in (5, 7, 8))
    assert differences(of_five, of_seven) == set()
    assert differences(of_seven, of_eight) == set()


@pytest.mark.parametrize(
    "family", ["gemma 2", "olmo 2", "cohere 2", "gpt-2", "gpt-oss", "glm4 moe", "qwen3.5", "falcon h1"]
)
def test_nor_do_they_with_parts_that_llama_lacks(family: str, device: FakeDevice, tmp_path: Path) -> None:
    engine = FakeEngine(device, tmp_path, FAMILIES[family], max_batch_size=8)
    first, *others = (decode(engine, MODES["greedy"], *step) for step in ((5, 100), (7, 100), (8, 3000)))
    assert [differences(first, other) for other in others] == [set()] * len(others)


def collectives(trace: Trace) -> list[tuple[Any, ...]]:
    """Name of each, and type, shape and strides of its tensors."""
    return [
        (event.name, *(tensor[:3] for tensor in event.arguments.values()))
        for event in trace.events
        if event.kind == COLLECTIVE
    ]


@pytest.mark.parametrize("name", ["greedy", "filters"])
def test_ranks_exchange_the_same_in_every_step_that_a_graph_replays(ranks: list[FakeEngine], name: str) -> None:
    steps = ((5, 100), (7, 100), (8, 3000))
    traces = [[decode(rank, MODES[name], *step) for step in steps] for rank in ranks]
    assert [differences(first, other) for first, *others in traces for other in others] == [set()] * 4
    leader, other = (collectives(first) for first, *_ in traces)
    assert leader == other != []


# -- what is noticed ---------------------------------------------------------------------------------------------------


def test_a_table_as_wide_as_its_rows_is_noticed(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    describe, widths = batch_layout._metadata, iter((7, 7, 188, 188))

    def narrow(*arguments: Any, **options: Any) -> AttentionMetadata:
        metadata = describe(*arguments, **options)
        blocks = metadata.blocks[0]
        return replace(metadata, blocks=(replace(blocks, block_table=blocks.block_table[:, : next(widths)]),))

    monkeypatch.setattr(batch_layout, "_metadata", narrow)
    found = differences(*(decode(engine, MODES["greedy"], 32, length) for length in (100, 3000)))
    assert any("decode_persistent_kernel" in each and "[65, 7]" in each and "[65, 188]" in each for each in found), (
        found
    )


def test_a_number_that_grows_with_the_rows_is_noticed(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    advance_rows, lengths = inflight_kernels.advance_rows, iter((100, 100, 3000, 3000))

    def advance(*arguments: Any) -> StepTokens:
        tokens = advance_rows(*arguments)
        return tokens._replace(slots=(tokens.slots[0] + next(lengths),))

    monkeypatch.setattr(inflight_kernels, "advance_rows", advance)
    found = differences(*(decode(engine, MODES["greedy"], 1, length) for length in (100, 3000)))
    assert found == {"add.1: 100 -> 3000"}


def test_memory_that_was_replaced_is_noticed(engine: FakeEngine) -> None:
    before = decode(engine, MODES["greedy"], 2, 100)
    engine.runner._computation.state.last_token_R = torch.zeros_like(engine.runner._computation.state.last_token_R)
    found = differences(before, decode(engine, MODES["greedy"], 2, 100))
    assert found and all(
        "kept" in each and each.startswith(("advance_rows_kernel", "pick_kernel")) for each in found
    ), found


def test_a_rank_that_exchanges_something_else_is_noticed(
    ranks: list[FakeEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It gathers the parts of a sum."""
    monkeypatch.setattr(ranks[1].runner._groups.tensor, "_sums_in_order", True)
    leader, other = (collectives(decode(rank, MODES["greedy"], 8, 100)) for rank in ranks)
    assert leader != other
