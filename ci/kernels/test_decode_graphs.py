"""Decode steps that replay graphs: the tokens and the bits of steps that launch each kernel, with the engine's own
kernels in triton's interpreter.

Run: pytest ci/kernels/test_decode_graphs.py
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from model_driver import Driver, Work
from tiny_checkpoints import make_checkpoint, make_prompt
from torch import Tensor

from ci.kernels.recorded_runners import graphs_on_cpu, load
from inflight.distributed.rank_group import SingleRank
from inflight.runtime.model_runner import ModelRunner
from inflight.runtime.sampler import SampledTokens
from inflight.runtime.staging import InputBuffer
from inflight.runtime.step_computation import Computed, StepComputation
from inflight.runtime.step_input import StepInput, padding_step
from inflight.sampling_config import SamplingConfig

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.is_available(), reason="the graphs are recorded on the CPU, for the interpreter"),
]

MAX_BATCH_SIZE = 4
RANDOM = SamplingConfig(temperature=0.8, seed=5)
FILTERED = SamplingConfig(temperature=0.9, top_k=9, top_p=0.9, min_p=0.02, seed=3)
PENALISED = SamplingConfig(repetition_penalty=1.3, presence_penalty=0.4)

Make = Callable[[bool], ModelRunner]
Result = Computed | SampledTokens


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Make]:
    """Makes a runner with graphs or without, on a device that has kernels, pads its steps and has graphs."""
    folder = make_checkpoint(tmp_path_factory.mktemp("checkpoint"), "qwen3").folder
    runners: list[ModelRunner] = []

    def make(has_graphs: bool) -> ModelRunner:
        runners.append(load(folder, SingleRank(), max_batch_size=MAX_BATCH_SIZE, cuda_graph_mode=has_graphs))
        return runners[-1]

    with graphs_on_cpu():
        yield make
        for runner in runners:
            runner.close()


@pytest.fixture(scope="module")
def runner(make: Make) -> ModelRunner:
    return make(True)


def works() -> list[Work]:
    """All kinds of sampling, alone and beside each other; rows that end, pause, and go to others."""
    return [
        Work(prompt=make_prompt(5), max_tokens=14),
        Work(prompt=make_prompt(20), max_tokens=4, sampling=RANDOM, log_probs=True, arrives=2),
        Work(prompt=make_prompt(9), max_tokens=6, sampling=FILTERED, pauses_at=3, arrives=4),
        Work(prompt=make_prompt(3), max_tokens=3, sampling=PENALISED, bad_words=[[7], [3, 4]], arrives=10),
        Work(prompt=make_prompt(17), max_tokens=3, chunk=16, arrives=11),
    ]


def run(runner: ModelRunner, own: list[Work]) -> tuple[list[list[int]], list[list[float]]]:
    driver = Driver(runner)
    driver._free_rows = [2, 0, 3, 1]
    return driver.run(own), [work.output_log_probs for work in own]


def test_tokens_are_those_of_steps_without_graphs(make: Make, runner: ModelRunner) -> None:
    found = run(runner, works())
    replayed = runner._computation._networks.num_replays, runner._computation._samplings.num_replays
    sizes = {key.num_rows for key, count in replayed[0].items() if count}
    kinds = {(key.is_random, key.is_filtered, key.log_probs) for key, count in replayed[1].items() if count}
    assert sizes == {1, 2, 4}
    assert kinds >= {(False, False, False), (True, False, True), (True, True, False)}
    assert sum(replayed[0].values()) > sum(replayed[1].values()), "some steps were to be sampled without a graph"
    assert found == run(make(False), works())


def test_input_that_is_not_where_it_was_recorded_is_not_read(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the test before this one is for."""
    tokens, _ = run(runner, [Work(prompt=make_prompt(5), max_tokens=3)])
    load, padding = InputBuffer.load, padding_step(1, runner._computation.state.padding_row, has_adapters=False)

    def elsewhere(self: InputBuffer, arrays: dict[str, Any]) -> dict[str, Tensor]:
        load(self, padding.arrays)
        with monkeypatch.context() as patch:
            patch.setattr(self, "_memory", torch.zeros_like(self._memory))
            return load(self, arrays)

    monkeypatch.setattr(InputBuffer, "load", elsewhere)
    assert run(runner, [Work(prompt=make_prompt(5), max_tokens=3)])[0] != tokens


def random_step(computation: StepComputation, num_rows: int, *, has_adapters: bool) -> StepInput:
    """Decodes of random rows, the last of them padding if there are several, behind random tokens."""
    step = padding_step(num_rows, computation.state.padding_row, has_adapters=has_adapters)
    num_real = max(num_rows - 1, 1)
    rows = torch.randperm(MAX_BATCH_SIZE)[:num_real].numpy()
    step.arrays["rows"][:num_real] = rows
    step.arrays["counts"][:num_real] = 1
    state = computation.state
    state.lengths_R[:-1].random_(1, 60)
    state.last_token_R[:-1].random_(0, 200)
    state.block_tables[:-1].random_(0, 30)
    state.seeds_R.random_(0, 2**40)
    state.top_k_R[:-1].random_(0, 20)
    state.floats_FR[:, :-1].uniform_(0.1, 0.9)
    return step


def touched(computation: StepComputation) -> list[Tensor]:
    """What a step changes."""
    return [computation.state.lengths_R, computation.state.last_token_R, *computation._store.block_tensors]


def assert_same(
    computation: StepComputation, launch: Callable[[], Result], replay: Callable[[], Result], key: object
) -> None:
    """That both return and change the same from the same state, and that they change something."""
    before = [tensor.clone() for tensor in touched(computation)]
    found: list[list[Tensor]] = []
    for compute in (launch, replay):
        for tensor, value in zip(touched(computation), before, strict=True):
            tensor.copy_(value)
        found.append([tensor.clone() for tensor in (*tensors_of(compute()), *touched(computation))])
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True)), key
    assert not all(torch.equal(*pair) for pair in zip(touched(computation), before, strict=True)), key


def tensors_of(result: Result) -> list[Tensor]:
    if isinstance(result, Computed):
        return [*result.hidden.values(), result.rows_S, result.lengths_S]
    log_probs = [] if result.log_probs_S is None else [result.log_probs_S]
    return [result.token_ids_S, result.is_finite_S, *log_probs]


@torch.inference_mode()
def test_every_graph_computes_the_same_bits_as_its_launches(runner: ModelRunner) -> None:
    computation = runner._computation
    networks, samplings = computation._networks, computation._samplings
    assert {key.num_rows for key in networks.num_replays} == {1, 2, 4}
    for tensor in computation._store.block_tensors:
        tensor.normal_()
    for key in networks.num_replays:
        step = random_step(computation, key.num_rows, has_adapters=key.has_adapters)
        arrays = computation.input.load(step.arrays)
        assert_same(computation, partial(computation._compute, step, arrays), partial(networks.replay, key), key)
        for own in samplings.num_replays:
            if own.network == key:
                computation.state.last_token_R.fill_(-1)  # so that every token that is sampled is another one
                assert_same(computation, partial(computation._sample_all, own), partial(samplings.replay, own), own)
