"""What a runner does with its GPU besides computing: which device and stream each thread has, how it waits, and which
errors end it. torch.cuda is a stand-in that notes this; the tensors lie on the CPU.

pytest ci/unit/runtime/test_gpu_steps.py
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_checkpoints import make_checkpoint

from inflight.config import EngineConfig
from inflight.distributed.rank_group import SingleRank
from inflight.runtime import decode_graphs, model_runner, result_copies
from inflight.runtime.decode_graphs import CudaGraph
from inflight.runtime.device import is_usable_after
from inflight.runtime.loading import RankResources
from inflight.runtime.model_runner import ModelRunner
from inflight.runtime.result_copies import ROW_BYTES
from inflight.sampling_config import SamplingConfig
from inflight.scheduler_output import NewSequence, RowWork, SchedulerOutput

pytestmark = pytest.mark.slow

GPU = torch.device("cuda", 1)
PROMPT = [3, 5, 7]
MAX_ROWS = 8


class Cuda:
    """Of torch.cuda what a step calls. As in CUDA, a thread has device 0 until it chooses another one."""

    def __init__(self) -> None:
        self._threads = threading.local()
        self.touched: list[tuple[str, int, object]] = []
        """What was done with the device, and the calling thread's device and stream."""
        self.is_blocking: list[bool] = []
        """Of each event."""
        self.broken: Exception | None = None

    def touch(self, what: str) -> None:
        threads = self._threads
        self.touched.append((what, getattr(threads, "device", 0), getattr(threads, "stream", None)))

    def set_device(self, device: torch.device) -> None:
        self._threads.device = device.index

    def set_stream(self, stream: object) -> None:
        self._threads.stream = stream

    def current_stream(self) -> object:
        return self._threads.stream

    @contextmanager
    def stream(self, stream: object) -> Iterator[None]:
        before, self._threads.stream = self._threads.stream, stream
        yield
        self._threads.stream = before

    def synchronize(self, device: torch.device | None = None) -> None:
        self.touch("synchronize")
        if self.broken is not None:
            raise self.broken

    def Event(self, *, blocking: bool) -> Event:
        self.is_blocking.append(blocking)
        return Event(self)


class Event:
    def __init__(self, cuda: Cuda) -> None:
        self._cuda = cuda

    def record(self) -> None:
        self._cuda.touch("record")

    def wait(self) -> None:
        self._cuda.touch("go on behind the copies")

    def synchronize(self) -> None:
        self._cuda.touch("wait")


class Stream:
    def __init__(self, cuda: Cuda) -> None:
        self._cuda = cuda

    def synchronize(self) -> None:
        self._cuda.touch("drain")

    def wait_stream(self, _: object) -> None:
        self._cuda.touch("go on behind the step")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"), "llama").folder


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    cuda = Cuda()
    for name in ("set_device", "set_stream", "current_stream", "stream", "synchronize", "Event"):
        monkeypatch.setattr(torch.cuda, name, getattr(cuda, name))
    return cuda


@pytest.fixture
def load(folder: Path, cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., ModelRunner]]:
    """A runner that takes itself for one on the second GPU."""
    runners: list[ModelRunner] = []

    def noted(what: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            cuda.touch(what)
            return function(*arguments)

        return call

    def load(**options: Any) -> ModelRunner:
        config = EngineConfig(
            gpt_model_path=str(folder), device="cpu", max_seq_len=64, max_tokens_in_paged_kv_cache=256, **options
        )
        runner = ModelRunner.load(config, SingleRank())
        runners.append(runner)
        runner._device, runner._stream = GPU, Stream(cuda)  # type: ignore[assignment]
        computation = runner._computation
        computation._device = GPU
        for part, name in ((runner._preparation, "prepare"), (computation, "forward"), (computation, "sample")):
            monkeypatch.setattr(part, name, noted(name, getattr(part, name)))
        results = computation.results
        results._stream = Stream(cuda)  # type: ignore[assignment]
        results._memory = torch.zeros(MAX_ROWS * ROW_BYTES, dtype=torch.uint8)
        monkeypatch.setattr(result_copies, "_pinned_copy", noted("copy", torch.Tensor.clone))
        return runner

    yield load
    for runner in runners:
        runner._stream = runner._computation.results._stream = None
        runner.close()


def prefill() -> SchedulerOutput:
    new = NewSequence(
        row=0, token_ids=PROMPT, num_prompt_tokens=3, block_ids=[0], sampling_config=SamplingConfig(temperature=1.0)
    )
    return SchedulerOutput(new_sequences=[new], rows=[RowWork(row=0, start=0, num_tokens=3, token_ids=PROMPT)])


def decode() -> SchedulerOutput:
    return SchedulerOutput(new_sequences=[], rows=[RowWork(row=0, start=3, num_tokens=1)])


def on_a_new_thread(function: Callable[[], object]) -> None:
    errors: list[Exception] = []

    def run() -> None:
        try:
            function()
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert not errors, errors


def test_every_thread_that_touches_the_device_chooses_it_first(
    load: Callable[..., ModelRunner], cuda: Cuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = load()
    stream, copies = runner._stream, runner._computation.results._stream
    steps: list[Any] = []
    monkeypatch.setattr(runner._groups.pipeline, "publish", lambda result: cuda.touch("publish"), raising=False)
    on_a_new_thread(lambda: steps.append(runner.forward(prefill())))
    on_a_new_thread(lambda: runner.sample(steps[0]))
    on_a_new_thread(lambda: runner._publish(steps[0]))
    on_a_new_thread(lambda: steps.append(runner.collect(steps[0])))
    on_a_new_thread(lambda: steps.append(runner.forward(decode())))
    on_a_new_thread(lambda: runner.sample(steps[2]))
    on_a_new_thread(runner.close)
    assert len(steps[1].token_ids[0]) == 1
    of_copies = {"copy", "record"}
    of_steps = {"prepare", "forward", "sample", "go on behind the step", "wait", "publish", "go on behind the copies"}
    assert {what for what, *_ in cuda.touched} == of_copies | of_steps | {"synchronize"}
    streams = {what: {stream} for what in (*of_steps, "synchronize")} | {what: {copies} for what in of_copies}
    assert {what: {each[2] for each in cuda.touched if each[0] == what} for what in streams} == streams
    assert {number for _, number, _ in cuda.touched} == {1}


def test_graphs_are_recorded_on_the_stream_of_steps(
    load: Callable[..., ModelRunner], cuda: Cuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also by a thread that has run no step: CUDA records nothing on its default stream."""
    runner = load()
    runner._records_graphs = True
    stream = runner._stream
    monkeypatch.setitem(decode_graphs.GRAPHS, "cuda", lambda: CudaGraph)
    monkeypatch.setattr(runner._computation, "record_graphs", lambda make_graph: cuda.touch("record graphs") or 0)
    on_a_new_thread(runner.record_graphs)
    assert ("record graphs", 1, stream) in cuda.touched


def test_graphs_are_given_up_before_the_groups_whose_collectives_they_hold(
    load: Callable[..., ModelRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = load()
    left: list[int] = []
    graphs = runner._computation._networks, runner._computation._samplings
    for each in graphs:
        each._recorded[object()] = (None, None)  # type: ignore[index]
    monkeypatch.setattr(runner._groups.pipeline, "close", lambda: left.append(sum(map(len, graphs))), raising=False)
    runner.close()
    assert left == [0]


class _FailedGraph:
    """As torch's: after an error no recording can be ended."""

    def capture_begin(self, **_: Any) -> None:
        assert not gc.isenabled()

    def capture_end(self) -> None:
        raise torch.AcceleratorError("operation failed due to a previous error during capture")


def test_the_error_that_ends_a_recording_is_told(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "CUDAGraph", _FailedGraph)
    with pytest.raises(torch.OutOfMemoryError), CudaGraph(None).recording():
        raise torch.OutOfMemoryError("CUDA out of memory")
    with pytest.raises(torch.AcceleratorError), CudaGraph(None).recording():
        pass
    assert gc.isenabled()


@pytest.mark.parametrize("spins", [False, True])
def test_the_host_sleeps_while_it_waits_unless_it_is_to_spin(
    load: Callable[..., ModelRunner], cuda: Cuda, spins: bool
) -> None:
    runner = load(**({"busy_wait_events": True} if spins else {}))
    handle = runner.forward(prefill())
    runner.sample(handle)
    runner.collect(handle)
    assert cuda.is_blocking == [not spins]


def test_a_gpu_has_sizes_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    class Loading(Exception):
        """Begins, with this configuration."""

    def load_engine(config: EngineConfig, *_: Any, **__: Any) -> None:
        raise Loading(config.max_batch_size, config.max_num_tokens, config.tokens_per_block)

    monkeypatch.setattr(model_runner, "load_engine", load_engine)
    with pytest.raises(Loading) as caught:
        ModelRunner.load(EngineConfig(max_num_tokens=4096), SingleRank(), resources=RankResources(device=GPU))
    assert caught.value.args == (256, 4096, 64)


CUDA_ERROR = "CUDA error: an illegal memory access was encountered"


@pytest.mark.parametrize("error", [torch.AcceleratorError(CUDA_ERROR), torch.OutOfMemoryError("CUDA out of memory")])
def test_errors_of_the_device_end_a_rank_whatever_the_device_says_now(error: Exception, cuda: Cuda) -> None:
    assert not is_usable_after(error, GPU) and not is_usable_after(error, torch.device("cpu"))


def test_after_other_errors_the_device_is_asked(cuda: Cuda) -> None:
    """A library that met the error first reports it in its own way."""
    error = RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered")
    assert is_usable_after(error, GPU) and cuda.touched
    cuda.broken = torch.AcceleratorError(CUDA_ERROR)
    assert not is_usable_after(error, GPU) and not is_usable_after(ValueError("a step that is refused"), GPU)
    assert is_usable_after(error, torch.device("cpu"))


@pytest.mark.parametrize("allocate", [torch.zeros, np.zeros])
def test_no_rank_goes_on_without_host_memory(allocate: Callable[[int], object]) -> None:
    """Of which torch tells in a RuntimeError like any other."""
    with pytest.raises((RuntimeError, MemoryError)) as raised:
        allocate(2**58)
    assert not is_usable_after(raised.value, torch.device("cpu"))
