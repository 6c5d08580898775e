"""Ranks that somebody else starts, and the fronts that find them, lose them and find them again."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import fake_outer_rank
import pytest
from calls import PATIENCE, Caller, until
from outer_jobs import MODEL, outer_job

from inflight.config import EngineConfig
from inflight.errors import ConfigurationError
from inflight.executor.executor import make_launcher
from inflight.executor.front.remote import RemoteFront
from inflight.executor.in_process import InProcessExecutor
from inflight.executor.launchers.external import ExternalLauncher
from inflight.executor.wire.address import ENGINES, EngineAddress
from inflight.executor.wire.launch import Launch
from inflight.model_config import read_engine_config
from inflight.request import Request
from inflight.run_directory import RUN_DIRECTORY

FAKE = [fake_outer_rank.__file__]
SMALL = {"max_batch_size": "4", "max_num_tokens": "64"}
LONG = 10_000
"""Tokens of a request that does not end by itself: the longer it is, the longer a fake rank takes for one."""

pytestmark = pytest.mark.usefixtures("user_files")

StartFront = Callable[..., RemoteFront]


def config_of(parameters: dict[str, str]) -> EngineConfig:
    return read_engine_config(MODEL, {"tensor_parallel_size": "2", "executor": "external"} | parameters)[1]


@pytest.fixture
def start_front() -> Iterator[StartFront]:
    fronts: list[RemoteFront] = []

    def start(address: EngineAddress | None = None, **changes: object) -> RemoteFront:
        config = replace(config_of(SMALL), **changes)  # type: ignore[arg-type]
        front = RemoteFront(config, ExternalLauncher(config, "llm", address))
        fronts.append(front)
        front.start()
        return front

    yield start
    for front in fronts:
        front.shutdown()


def rank_pids(user_files: Path) -> list[int]:
    (directory,) = (user_files / f"inflight-{os.getuid()}" / "jobs").glob("*/engine")
    launch = Launch.beside(directory / "engine.sock")
    assert launch is not None
    return launch.rank_pids()


def left_over(user_files: Path) -> list[Path]:
    return [path for path in user_files.rglob("*") if not path.is_dir() or path.parent.name == "jobs"]


@pytest.mark.parametrize("way", ["mpiexec", "torchrun", "srun"])
def test_fronts_come_and_go_and_the_ranks_stay(way: str, start_front: StartFront, user_files: Path) -> None:
    with outer_job(way, SMALL, program=FAKE) as job:
        first, second = start_front(), start_front()
        for number, front in enumerate((first, second)):
            caller = Caller(front)
            caller.serve(*(caller.request([number, n], 1 + n) for n in range(10)))
        first.shutdown()
        second.shutdown()
        third = Caller(start_front())
        third.serve(third.request(7, 40))
        job.end()
        until(lambda: not left_over(user_files), "no file is left")


def test_ranks_that_torchrun_starts_again_go_on_with_the_streams(start_front: StartFront, user_files: Path) -> None:
    with outer_job("torchrun", SMALL, restarts=1, program=FAKE):
        caller = Caller(start_front())
        (long,) = caller.send(caller.request(1, LONG, streaming=True))
        caller.wait_for_tokens(long)
        os.kill(rank_pids(user_files)[1], signal.SIGKILL)
        until(lambda: caller.executor.num_replays() > 0, "the stream goes on with the next ranks")
        caller.cancel_when_it_goes_on(long)


def test_ranks_told_to_end_leave_streams_to_those_that_come_next(start_front: StartFront) -> None:
    """A change of the ranks' configuration or machine, without losing a stream."""
    with outer_job("srun", SMALL, program=FAKE) as job:
        caller = Caller(start_front())
        (long,) = caller.send(caller.request(1, LONG, streaming=True))
        caller.wait_for_tokens(long)
        job.end()
    with outer_job("srun", SMALL, program=FAKE):
        until(lambda: caller.executor.num_replays() > 0, "the stream goes on with the next ranks")
        caller.cancel_when_it_goes_on(long)


def test_a_server_s_other_fronts_find_the_ranks_by_its_own_address(
    start_front: StartFront, user_files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_directory = user_files / "run"
    run_directory.mkdir(mode=0o700)
    monkeypatch.setenv(RUN_DIRECTORY, str(run_directory))
    address = EngineAddress.of("llm")
    assert address.link == run_directory / ENGINES / "llm"
    with outer_job("srun", SMALL, size=1, program=FAKE):
        front = start_front(address, tensor_parallel_size=1)
        assert address.resolve() is not None
        front.shutdown()
        assert address.resolve() is None


def test_a_front_of_another_configuration_is_refused_with_the_key(start_front: StartFront) -> None:
    with outer_job("srun", SMALL, size=1, program=FAKE):
        start_front(tensor_parallel_size=1)
        with pytest.raises(ConfigurationError, match="max_batch_size is '5' here, and the ranks serve with '4'"):
            start_front(tensor_parallel_size=1, max_batch_size=5)


def test_who_finds_no_ranks_is_told_how_to_start_them(start_front: StartFront) -> None:
    with pytest.raises(ConfigurationError, match=r"no ranks serve the engine llm here: start them, with python -m"):
        start_front(worker_start_timeout_ms=1)


@pytest.mark.parametrize(
    ("size", "parameters", "sentence"),
    [
        (1, {"tensor_parallel_size": "2"}, "the job has 1 ranks, and the engine's configuration asks for 2"),
        (1, {"max_batch_sise": "2"}, "unknown parameter max_batch_sise; did you mean max_batch_size?"),
    ],
)
def test_ranks_that_cannot_serve_say_why(
    size: int, parameters: dict[str, str], sentence: str, capfd: pytest.CaptureFixture[str], user_files: Path
) -> None:
    with outer_job("srun", parameters, size=size, program=FAKE) as job:
        assert job.processes[0].wait(PATIENCE) == 1
    assert sentence in capfd.readouterr().err
    assert left_over(user_files) == []


def test_a_second_engine_of_one_name_is_refused(
    start_front: StartFront, capfd: pytest.CaptureFixture[str], user_files: Path
) -> None:
    with outer_job("srun", SMALL, size=1, program=FAKE):
        start_front(tensor_parallel_size=1)
        with outer_job("srun", SMALL, size=1, program=FAKE) as second:
            assert second.processes[0].wait(PATIENCE) == 1
        assert "an engine called llm serves here already" in capfd.readouterr().err
        caller = Caller(start_front(tensor_parallel_size=1))
        caller.serve(caller.request())
    assert left_over(user_files) == []


def test_real_ranks_give_the_tokens_of_one_rank() -> None:
    prompt = [1, 1321, 436, 265]
    parameters = {"dtype": "float32", "max_loras": "", "lora_dir": "", "max_tokens_in_buffer": "64"}
    alone = replace(config_of(parameters), executor="auto", tensor_parallel_size=1)
    with InProcessExecutor(config=alone) as executor:
        expected = tokens_of(Caller(executor), prompt)
    with outer_job("torchrun", parameters):
        front = RemoteFront(config_of(parameters), make_launcher(config_of(parameters), "llm"))
        front.start()
        try:
            assert tokens_of(Caller(front), prompt) == expected
        finally:
            front.shutdown()
    assert len(expected) == 32


def tokens_of(caller: Caller, prompt: list[int]) -> list[int]:
    request_id = caller.executor.next_request_id()
    caller.send(Request(request_id=request_id, input_token_ids=prompt, max_tokens=32))
    caller.wait(request_id)
    return caller.tokens[request_id]
