"""The whole step on a GPU that computes nothing: nothing in it waits, every tensor is where it must be, and what it
launches and copies is what is kept in step_costs.json.

Each of these is shown to notice what it is for.

Run: pytest ci/unit/gpu/test_steps.py
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_cuda.context import fake_cuda
from fake_cuda.device import CUDA, FakeDevice, HostWaits, Race, StaleCopy, WrongDevice
from fake_cuda.engine import FakeEngine
from fake_cuda.modes import MODES, NUM_ROWS, PROMPT_LEN, begin, decodes, steps_of
from fake_cuda.networks import BERT_SCORES
from fake_cuda.trace import KINDS, LAUNCH, Storages
from torch import Tensor

from ci import step_costs
from inflight.errors import InsufficientMemory
from inflight.output_config import SCORES
from inflight.runtime import decode_graphs, result_copies
from inflight.runtime.result_copies import ResultCopies
from inflight.runtime.sampler import SampledTokens, Sampler
from inflight.runtime.step_handle import StepHandle
from inflight.sampling_config import SamplingConfig
from inflight.scheduler_output import CONTEXT, HIDDEN_STATES, NewSequence, RowWork, SchedulerOutput

pytestmark = pytest.mark.slow


@pytest.fixture
def device() -> Iterator[FakeDevice]:
    with fake_cuda() as fake:
        yield fake


@pytest.fixture
def engine(device: FakeDevice, tmp_path: Path) -> FakeEngine:
    return FakeEngine(device, tmp_path)


def run(engine: FakeEngine, mode: str = "greedy") -> list[list[list[int]]]:
    """The tokens of every step."""
    return [engine.step(scheduled)[1].token_ids for _, scheduled in steps_of(MODES[mode])]


@pytest.mark.parametrize("num_ranks", step_costs.NUM_RANKS)
def test_no_step_waits_or_mixes_devices_and_each_costs_what_is_kept(num_ranks: int) -> None:
    assert step_costs.faults(step_costs.measure(num_ranks), num_ranks) == []


def test_a_rise_and_a_fall_are_told() -> None:
    kept = step_costs.kept_rows(1)
    key = "greedy | decode | ranks 1"
    assert step_costs.faults(kept, 1) == []
    before = kept[key][LAUNCH]
    [risen] = step_costs.faults({**kept, key: {**kept[key], LAUNCH: before + 1}}, 1)
    assert risen == f"{key} rose from {before} to {before + 1} of triton"
    [fallen] = step_costs.faults({**kept, key: {**kept[key], LAUNCH: before - 1}}, 1)
    assert fallen == f"{key} fell from {before} to {before - 1} of triton: {step_costs.REMEDY}"
    [added] = step_costs.faults({**kept, "new | decode | ranks 1": dict.fromkeys(KINDS, 0)}, 1)
    [removed] = step_costs.faults({name: kept[name] for name in kept if name != key}, 1)
    assert "is not in the kept table" in added and "is kept, but is no step" in removed


def test_tokens_come_back_once_the_step_is_done(engine: FakeEngine) -> None:
    assert run(engine)[:3] == [[[0]] * NUM_ROWS] * 3


# -- what each check is for --------------------------------------------------------------------------------------------


def beside_sampling(monkeypatch: pytest.MonkeyPatch, act: Callable[[Tensor], Any]) -> None:
    """Let the sampler also `act` on the logits."""
    sample = Sampler._sample

    def acting(self: Sampler, logits_SV: Tensor, *others: Any) -> Any:
        act(logits_SV)
        return sample(self, logits_SV, *others)

    monkeypatch.setattr(Sampler, "_sample", acting)


@pytest.mark.parametrize(
    "act",
    [
        lambda x: x.amax().item(),
        lambda x: bool((x > 0).any()),
        lambda x: x.amax(1).tolist(),
        lambda x: x.cpu(),
        lambda x: x.to("cpu"),
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: torch.tensor([1, 2], device=x.device),
        lambda x: torch.zeros(4).to(x.device),
        lambda x: torch.zeros(4).to(x.device, non_blocking=True),
        lambda x: torch.empty(x.shape, dtype=x.dtype).copy_(x, non_blocking=True),
        lambda x: torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x),
        lambda x: torch.zeros(2, 4).pin_memory().t().to(x.device, non_blocking=True),
        lambda x: torch.cuda.synchronize(),
        lambda x: torch.cuda.current_stream().synchronize(),
    ],
    ids=["item", "bool", "tolist", "cpu", "to-cpu", "nonzero", "mask", "tensor", "blocking", "pageable", "to-pageable",
         "blocking-to-host", "strided", "synchronize", "stream"],
)  # fmt: skip
def test_what_waits_is_caught(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, act: Callable[[Tensor], Any]
) -> None:
    beside_sampling(monkeypatch, act)
    with pytest.raises(HostWaits):
        run(engine)


@pytest.mark.parametrize(
    "act",
    [
        lambda x: x.to("cpu", non_blocking=True),
        lambda x: torch.zeros(4).pin_memory().to(x.device, non_blocking=True),
        lambda x: torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True),
        lambda x: x[:, 0].fill_(1.0),
        lambda x: x.index_select(0, torch.arange(2, device=x.device)),
        lambda x: torch.where(x > 0, 1.0, 0.0),
    ],
)
def test_what_does_not_wait_is_let_through(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, act: Callable[[Tensor], Any]
) -> None:
    beside_sampling(monkeypatch, act)
    run(engine)


def test_pageable_input_is_caught(engine: FakeEngine) -> None:
    for buffer in engine.runner._computation.input._ring:
        buffer._memory = torch.zeros(len(buffer._memory), dtype=torch.uint8)
    with pytest.raises(HostWaits, match="not pinned"):
        run(engine)


def test_results_on_pageable_memory_are_caught(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(result_copies, "_pinned_copy", lambda values: torch.empty(len(values)).copy_(values))
    with pytest.raises(HostWaits, match="a blocking copy to the host"):
        run(engine)


def test_a_host_tensor_in_an_operation_is_caught(engine: FakeEngine) -> None:
    engine.runner._computation.state.last_token_R = torch.zeros(17, dtype=torch.int64)
    with pytest.raises(RuntimeError, match=r"at least two devices|different devices"):
        run(engine)


def test_a_host_tensor_in_a_kernel_is_caught(engine: FakeEngine) -> None:
    for layer in engine.runner._computation.decoder.layers:  # type: ignore[attr-defined]
        layer.branches[0].stateful.attention.cos_sin = torch.zeros(4097, 128)
    with pytest.raises(WrongDevice, match="cos_sin_ptr on cpu"):
        run(engine)


# -- copies in flight --------------------------------------------------------------------------------------------------


def test_results_that_are_read_too_early_are_garbage(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StepHandle, "wait", lambda handle: handle.sampled.result())
    _, first = next(steps_of(MODES["greedy"]))
    assert engine.step(first)[1].token_ids == [[]] * NUM_ROWS  # nothing is known to be finite


def test_results_that_are_copied_too_early_are_caught(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stream of copies does not wait for that of steps."""
    monkeypatch.setattr(torch.cuda.Stream, "wait_stream", lambda *_: None)
    with pytest.raises(Race, match="before they are computed"):
        run(engine)


def start(engine: FakeEngine, scheduled: SchedulerOutput) -> StepHandle:
    with engine.device.tracing():
        handle = engine.runner.forward(scheduled)
        engine.runner.sample(handle)
    return handle


def test_steps_that_overlap_read_what_was_staged_for_them(engine: FakeEngine) -> None:
    """A step is started before the one before it is waited for, so that copies are as late as they can be."""
    before: StepHandle | None = None
    for _, scheduled in steps_of(MODES["all tensors"]):
        handle = start(engine, scheduled)
        assert before is None or not engine.runner.collect(before).errors
        before = handle
    assert before is not None and not engine.runner.collect(before).errors


def test_results_that_are_overwritten_before_they_are_copied_are_caught(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stream of steps does not wait for that of copies."""
    monkeypatch.setattr(torch.cuda.Event, "wait", lambda *_: None)
    first, second, *_ = (scheduled for _, scheduled in steps_of(MODES["greedy"]))
    start(engine, first)
    with pytest.raises(Race, match="before a copy to the host has read it"):
        start(engine, second)


def test_results_that_are_given_up_before_they_are_copied_are_caught(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What torch would give to the next operation that needs memory."""
    monkeypatch.setattr(ResultCopies, "_copy", lambda self, values: result_copies._pinned_copy(values))
    first, second, *_ = (scheduled for _, scheduled in steps_of(MODES["all tensors"]))
    start(engine, first)
    with pytest.raises(Race, match="before a copy to the host has read it"):
        engine.runner.forward(second)


def test_a_ring_of_one_buffer_waits(engine: FakeEngine) -> None:
    del engine.runner._computation.input._ring[1:]
    first, second, *_ = (scheduled for _, scheduled in steps_of(MODES["greedy"]))
    start(engine, first)
    with pytest.raises(HostWaits, match=r"Event\.synchronize"):
        start(engine, second)


def test_staging_that_is_used_again_too_early_is_caught(engine: FakeEngine) -> None:
    """One pinned buffer for all steps, and no event before it is written again."""
    ring = engine.runner._computation.input._ring
    del ring[1:]
    ring[0]._copied = None
    first, second, *_ = (scheduled for _, scheduled in steps_of(MODES["greedy"]))
    handle = start(engine, first)
    start(engine, second)
    with pytest.raises(StaleCopy, match="changed before they were copied to the device"):
        engine.runner.collect(handle)


# -- graphs ------------------------------------------------------------------------------------------------------------


class NotedGraph:
    """A graph of which only the replays are noted, and the memory that they work on."""

    def __init__(self, device: FakeDevice, pool: set[int]) -> None:
        """`pool`: the memory that was made while any of the graphs was recorded. Each may use all of it."""
        self._device = device
        self._pool = pool
        self._memory: set[int] = set()

    @contextmanager
    def recording(self) -> Iterator[None]:
        num_before = Storages.end
        with self._device.accesses() as self._memory:
            yield
        self._pool.update(number for number in self._memory if number >= num_before)

    def replay(self) -> None:
        self._device.note(LAUNCH, "graph")
        self._device.access(self._memory | self._pool)


def with_graphs(device: FakeDevice, folder: Path, monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    monkeypatch.setitem(decode_graphs.GRAPHS, "cuda", lambda: partial(NotedGraph, device, set()))
    return FakeEngine(device, folder, max_batch_size=9, warms_up=True, records_graphs=True)


def test_a_replayed_step_is_two_launches(device: FakeDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One copy to the device, two graphs, and one copy of the results; with sampling out of the ordinary, one graph
    and the launches of that."""
    engine = with_graphs(device, tmp_path, monkeypatch)
    traces = {name: engine.step(scheduled)[0] for name, scheduled in steps_of(MODES["filters"])}
    assert traces["decode"].counts() == {"triton": 2, "torch": 1, "collective": 0, "to_device": 1, "to_host": 1}
    assert traces["decode"].names(LAUNCH) == traces["drafts"].names(LAUNCH) == {"graph": 2}
    assert "graph" not in traces["prefill"].names(LAUNCH) + traces["mixed"].names(LAUNCH)
    traces = {name: engine.step(scheduled)[0] for name, scheduled in steps_of(MODES["penalties"])}
    assert traces["decode"].names(LAUNCH)["graph"] == 1
    assert traces["decode"].names(LAUNCH)["tile_stats_kernel"] == 1


def two_replays(engine: FakeEngine) -> None:
    """Of the same graphs, the second before anybody has waited for the first."""
    mode, rows = MODES["log probabilities"], range(NUM_ROWS)
    engine.step(begin(mode, rows))
    handles = [
        start(engine, SchedulerOutput(new_sequences=[], rows=decodes(mode, rows, PROMPT_LEN + number)))
        for number in range(2)
    ]
    for handle in handles:
        output = engine.runner.collect(handle)
        assert (output.token_ids, output.log_probs) == ([[0]] * NUM_ROWS, [[0.0]] * NUM_ROWS)


def test_a_replay_waits_for_the_copies_of_the_one_before(
    device: FakeDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = with_graphs(device, tmp_path, monkeypatch)
    two_replays(engine)
    monkeypatch.setattr(torch.cuda.Event, "wait", lambda *_: None)
    with pytest.raises(Race, match="before a copy to the host has read it"):
        two_replays(engine)


def test_results_in_memory_that_graphs_share_are_caught(
    device: FakeDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The network of the next step is replayed before the wait."""

    def copy(self: ResultCopies, sampled: SampledTokens) -> SampledTokens:
        values = {each.name: getattr(sampled, each.name) for each in fields(SampledTokens)}
        return SampledTokens(**{name: None if each is None else self._copy(each) for name, each in values.items()})

    monkeypatch.setattr(ResultCopies, "memory", lambda self, num_rows: SampledTokens.empty(num_rows, CUDA))
    monkeypatch.setattr(ResultCopies, "_copy_sampled", copy)
    engine = with_graphs(device, tmp_path, monkeypatch)
    with pytest.raises(Race, match="before a copy to the host has read it"):
        two_replays(engine)


def test_graphs_without_room_are_told_with_the_keys(
    device: FakeDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def out_of_memory() -> NotedGraph:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setitem(decode_graphs.GRAPHS, "cuda", lambda: out_of_memory)
    with pytest.raises(InsufficientMemory, match="set cuda_graph_mode to false"):
        FakeEngine(device, tmp_path, max_batch_size=1, warms_up=True, records_graphs=True)


def test_an_encoders_step_waits_for_nothing_and_brings_what_was_asked(device: FakeDevice, tmp_path: Path) -> None:
    """Texts of one token and of more, one of them a pair."""
    engine = FakeEngine(device, tmp_path, BERT_SCORES)
    lengths = [1, 40, 7]
    news = [
        NewSequence(
            row=row,
            token_ids=[5] * length,
            num_prompt_tokens=length,
            block_ids=[],
            sampling_config=SamplingConfig(),
            outputs=(SCORES, f"{CONTEXT}{HIDDEN_STATES}"),
            second_text_start=length // 2,
        )
        for row, length in enumerate(lengths)
    ]
    works = [
        RowWork(row=new.row, start=0, num_tokens=len(new.token_ids), token_ids=new.token_ids, num_sampled=0)
        for new in news
    ]
    trace, output = engine.step(SchedulerOutput(new_sequences=news, rows=works))
    assert trace.names(LAUNCH)["bidirectional_attention_kernel"] == 2, "one for each layer"
    assert output.token_ids == []
    shapes = {row: {name: array.shape for name, array in of.prompt.items()} for row, of in output.tensors.items()}
    assert shapes == {
        row: {SCORES: (1, 1), f"{CONTEXT}{HIDDEN_STATES}": (length, 768)} for row, length in enumerate(lengths)
    }
