"""An executor with ranks in a process of their own: starts, deaths, hangs and ends, against a scripted leader."""

from __future__ import annotations

import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import fake_worker
import pytest
from calls import until
from fake_worker import FAILURE, LIMITS, MAX_IN_FLIGHT, Order

from inflight import backoff
from inflight.config import EngineConfig
from inflight.errors import ConfigurationError, EngineUnavailable, InvalidRequest, QueueFull
from inflight.executor.front import remote
from inflight.executor.front.remote import RemoteFront
from inflight.executor.launchers.processes import ProcessLauncher
from inflight.executor.launchers.uniproc import UniProc
from inflight.executor.wire.launch import LAUNCH
from inflight.request import Request
from inflight.result import FinishReason, Response
from inflight.run_directory import RUN_DIRECTORY

pytestmark = pytest.mark.slow

PATIENCE = 60
"""Seconds after which something that should happen counts as never happening."""

Launcher = Callable[..., RemoteFront]


@pytest.fixture
def run_directory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where executors put their folders; the name must be short enough for a socket's address."""
    path = Path(tempfile.mkdtemp(prefix="run-"))
    monkeypatch.setenv(RUN_DIRECTORY, str(path))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def launcher(tmp_path: Path, run_directory: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Launcher]:
    """Makes executors over the fake worker, and ends them with the test."""
    monkeypatch.setattr(backoff, "LONGEST", 0.0)
    made: list[RemoteFront] = []

    def make(behaviour: str = "serve", config: EngineConfig | None = None, **options: object) -> RemoteFront:
        config = config or EngineConfig()
        launcher = ProcessLauncher(config, UniProc((fake_worker.__file__, behaviour, str(tmp_path))))
        executor = RemoteFront(config, launcher, **options)  # type: ignore[arg-type]
        made.append(executor)
        return executor

    yield make
    for executor in made:
        executor.shutdown()
    assert list(run_directory.iterdir()) == []
    assert launched(tmp_path) == []


def launched(folder: Path) -> list[int]:
    """Fake workers of this test that still live."""
    mark = LAUNCH.encode() + b"="
    living = []
    for pid in (int(path.name) for path in folder.iterdir()):
        try:
            if any(item.startswith(mark) for item in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")):
                living.append(pid)
        except OSError:
            continue
    return living


def submit(executor: RemoteFront, order: Order) -> int:
    request_id = executor.next_request_id()
    executor.enqueue_request(Request(request_id=request_id, input_token_ids=[order], max_tokens=2))
    return request_id


def fetch(executor: RemoteFront, count: int) -> list[Response]:
    """The next `count` responses."""
    got: list[Response] = []
    while len(got) < count:
        responses = executor.await_responses(timeout=PATIENCE)
        assert responses, f"only {len(got)} of {count} responses came"
        got += responses
    assert len(got) == count
    return got


def wait_until_ready(executor: RemoteFront) -> None:
    with executor._changed:
        assert executor._changed.wait_for(executor.is_ready, PATIENCE)


def pid_of(response: Response) -> int:
    assert response.result is not None
    return response.result.output_token_ids[0]


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


# -- serving -----------------------------------------------------------------------------------------------------------


def test_requests_go_out_and_answers_come_back(launcher: Launcher) -> None:
    executor = launcher()
    executor.start()
    assert executor.is_ready()
    assert executor.limits == LIMITS
    request_id = submit(executor, Order.ANSWER)
    responses = fetch(executor, 2)
    assert [response.request_id for response in responses] == [request_id] * 2
    assert [response.is_final for response in responses] == [False, True]
    assert executor.num_requests_in_flight() == 0


def test_a_cancelled_request_ends(launcher: Launcher) -> None:
    executor = launcher()
    executor.start()
    request_id = submit(executor, Order.HOLD)
    fetch(executor, 1)
    executor.cancel_request(request_id)
    (response,) = fetch(executor, 1)
    assert response.result is not None and response.result.finish_reason is FinishReason.CANCELLED


def test_requests_are_checked_and_counted_before_they_leave(launcher: Launcher) -> None:
    executor = launcher()
    executor.start()
    with pytest.raises(InvalidRequest):
        executor.enqueue_request(Request(request_id=1, input_token_ids=[], max_tokens=1))
    for _ in range(MAX_IN_FLIGHT):
        submit(executor, Order.HOLD)
    with pytest.raises(QueueFull, match="Exceeds maximum queue size"):
        submit(executor, Order.HOLD)


def test_statistics_arrive(launcher: Launcher) -> None:
    executor = launcher()
    executor.start()
    submit(executor, Order.STATS)
    fetch(executor, 2)
    assert executor.get_latest_batch_manager_stats() == '{"Iteration Counter": 2}'
    assert executor.get_latest_batch_manager_stats() is None


def test_nonsense_from_the_leader_is_dropped(launcher: Launcher) -> None:
    executor = launcher()
    executor.start()
    request_id = submit(executor, Order.NONSENSE)
    (response,) = fetch(executor, 1)
    assert response.request_id == request_id and response.is_final
    submit(executor, Order.ANSWER)
    fetch(executor, 2)
    assert executor.is_ready()


def test_only_this_user_can_reach_the_socket(launcher: Launcher, run_directory: Path) -> None:
    executor = launcher()
    executor.start()
    (directory,) = run_directory.iterdir()
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700


# -- starts that fail --------------------------------------------------------------------------------------------------


def test_the_ranks_own_sentence_says_why_they_did_not_start(launcher: Launcher) -> None:
    with pytest.raises(ConfigurationError, match=FAILURE):
        launcher("fail").start()


def test_ranks_that_end_without_a_word_are_told_with_their_exit_code(launcher: Launcher) -> None:
    with pytest.raises(ConfigurationError, match="code 3"):
        launcher("exit").start()


def test_a_rank_that_dies_while_the_ranks_meet_is_named_and_leaves_nothing(
    launcher: Launcher, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = tmp_path_factory.mktemp("temporary")
    monkeypatch.setenv("TMPDIR", str(temporary))
    with pytest.raises(ConfigurationError, match=r"rank process \d+ has died"):
        launcher("lose a rank", EngineConfig(worker_start_timeout_ms=20_000)).start()
    assert list(temporary.iterdir()) == []


def test_ranks_that_are_never_ready_are_given_up(launcher: Launcher) -> None:
    config = EngineConfig(worker_start_timeout_ms=700)
    with pytest.raises(ConfigurationError, match=r"worker_start_timeout_ms|700|0\.7|within"):
        launcher("never ready", config).start()


def test_a_program_that_is_not_there_is_a_configuration_error(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = launcher()
    monkeypatch.setattr(UniProc, "command", lambda self, launch: (["/nonexistent/python"], {}))
    with pytest.raises(ConfigurationError):
        executor.start()


def test_a_failed_start_leaves_nothing_to_serve(launcher: Launcher) -> None:
    executor = launcher("exit")
    with pytest.raises(ConfigurationError):
        executor.start()
    assert not executor.is_ready()
    assert executor.await_responses(timeout=0) == []


# -- deaths and hangs --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", [Order.EXIT, Order.FATAL])
def test_ranks_that_end_fail_what_is_in_flight_once_and_are_launched_again(launcher: Launcher, order: Order) -> None:
    executor = launcher()
    executor.start()
    held = [submit(executor, Order.HOLD) for _ in range(3)]
    first = pid_of(fetch(executor, 3)[0])
    fatal = submit(executor, order)
    token, *errors = fetch(executor, 1 + 4)
    assert token.request_id == fatal
    assert sorted(error.request_id for error in errors) == [*held, fatal]
    assert {error.error_code for error in errors} == {"UNAVAILABLE"}
    wait_until_ready(executor)
    submit(executor, Order.ANSWER)
    assert pid_of(fetch(executor, 2)[0]) != first


def test_a_killed_rank_that_was_idle_is_launched_again(launcher: Launcher) -> None:
    died = threading.Event()
    executor = launcher(on_engine_death=lambda reason: died.set())
    executor.start()
    (pid,) = executor.engine_pids()
    os.kill(pid, signal.SIGKILL)
    assert died.wait(PATIENCE)
    wait_until_ready(executor)
    submit(executor, Order.ANSWER)
    fetch(executor, 2)


def test_a_hung_rank_counts_as_dead_after_the_heartbeats_deadline(launcher: Launcher) -> None:
    reasons: list[str] = []
    executor = launcher(config=EngineConfig(worker_heartbeat_timeout_ms=1000), on_engine_death=reasons.append)
    executor.start()
    request_id = submit(executor, Order.HOLD)
    first = pid_of(fetch(executor, 1)[0])
    with stopped(first):
        (error,) = fetch(executor, 1)
        assert (error.request_id, error.error_code) == (request_id, "UNAVAILABLE")
        wait_until_ready(executor)
    assert "no heartbeat" in reasons[0]
    submit(executor, Order.ANSWER)
    assert pid_of(fetch(executor, 2)[0]) != first


def test_a_pause_shorter_than_the_deadline_harms_nobody(launcher: Launcher) -> None:
    reasons: list[str] = []
    executor = launcher(config=EngineConfig(worker_heartbeat_timeout_ms=60_000), on_engine_death=reasons.append)
    executor.start()
    (pid,) = executor.engine_pids()
    with stopped(pid):
        submit(executor, Order.ANSWER)
        assert executor.await_responses(timeout=0.5) == []
    fetch(executor, 2)
    assert reasons == []


def test_requests_that_come_while_the_ranks_are_brought_back_are_served_by_the_next_ones(launcher: Launcher) -> None:
    died = threading.Event()
    executor = launcher(on_engine_death=lambda reason: died.set())
    executor.start()
    submit(executor, Order.EXIT)
    first = pid_of(fetch(executor, 2)[0])
    assert died.wait(PATIENCE)
    request_id = submit(executor, Order.ANSWER)
    responses = fetch(executor, 2)
    assert {response.request_id for response in responses} == {request_id}
    assert pid_of(responses[0]) != first


def test_ranks_that_cannot_be_brought_back_at_once_are_down_until_a_relaunch_is_asked_for(
    launcher: Launcher, tmp_path: Path
) -> None:
    deaths = threading.Semaphore(0)
    executor = launcher("serve once", keep_trying=False, on_engine_death=lambda reason: deaths.release())
    executor.start()
    submit(executor, Order.EXIT)
    for _ in range(2):
        assert deaths.acquire(timeout=PATIENCE)
    assert not deaths.acquire(timeout=1)
    assert len(list(tmp_path.iterdir())) == 2
    assert executor.is_down() and not executor.is_ready()
    with pytest.raises(EngineUnavailable):
        submit(executor, Order.ANSWER)
    executor.relaunch()
    assert deaths.acquire(timeout=PATIENCE)
    assert len(list(tmp_path.iterdir())) == 3


def test_ranks_that_cannot_be_brought_back_are_tried_again_for_ever(launcher: Launcher, tmp_path: Path) -> None:
    deaths = threading.Semaphore(0)
    executor = launcher("serve once", on_engine_death=lambda reason: deaths.release())
    executor.start()
    submit(executor, Order.EXIT)
    for _ in range(10):
        assert deaths.acquire(timeout=PATIENCE)


# -- the end -----------------------------------------------------------------------------------------------------------


def test_shutdown_answers_what_is_in_flight_and_leaves_nothing(
    launcher: Launcher, tmp_path: Path, run_directory: Path
) -> None:
    executor = launcher()
    executor.start()
    request_id = submit(executor, Order.HOLD)
    fetch(executor, 1)
    executor.shutdown()
    executor.shutdown()
    (response,) = executor.await_responses(timeout=0)
    assert (response.request_id, response.error_code) == (request_id, "UNAVAILABLE")
    assert executor.await_responses() == []
    assert launched(tmp_path) == []
    assert list(run_directory.iterdir()) == []
    with pytest.raises(EngineUnavailable):
        submit(executor, Order.ANSWER)


@pytest.mark.parametrize("is_stopped", [False, True])
def test_ranks_that_do_not_hear_the_shutdown_are_killed(
    launcher: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_stopped: bool
) -> None:
    monkeypatch.setattr(remote, "SHUTDOWN_SECONDS", 0.2)
    executor = launcher("deaf")
    executor.start()
    (pid,) = executor.engine_pids()
    if is_stopped:
        os.kill(pid, signal.SIGSTOP)
    executor.shutdown()
    assert launched(tmp_path) == []


def test_shutdown_ends_a_start(launcher: Launcher, tmp_path: Path) -> None:
    executor = launcher("never ready")
    outcome: list[Exception] = []

    def start() -> None:
        try:
            executor.start()
        except Exception as error:
            outcome.append(error)

    thread = threading.Thread(target=start)
    thread.start()
    with executor._changed:
        executor._changed.wait_for(lambda: any(tmp_path.iterdir()), 0.5)
    executor.shutdown()
    thread.join(PATIENCE)
    assert not thread.is_alive()
    assert outcome
    assert launched(tmp_path) == []


def test_shutdown_during_a_relaunch_answers_each_waiting_request_once(
    launcher: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranks load for as long as they are left alone."""
    monkeypatch.setattr(remote, "SHUTDOWN_SECONDS", 0.2)
    executor = launcher("never ready again")
    executor.start()
    assert not executor.is_relaunching()
    submit(executor, Order.EXIT)
    fetch(executor, 2)
    until(lambda: len(list(tmp_path.iterdir())) == 2, "the ranks are launched again")
    waiting = [submit(executor, Order.ANSWER) for _ in range(3)]
    assert executor.is_relaunching() and not executor.is_ready() and not executor.is_down()
    executor.shutdown()
    assert [(each.request_id, each.error_code) for each in executor.await_responses(timeout=0)] == [
        (request_id, "UNAVAILABLE") for request_id in waiting
    ]
    assert executor.await_responses() == [] and not executor.is_relaunching()


FRONT = """
import sys
from inflight.config import EngineConfig
from inflight.executor.front.remote import RemoteFront
from inflight.executor.launchers.processes import ProcessLauncher
from inflight.executor.launchers.uniproc import UniProc
executor = RemoteFront(EngineConfig(), ProcessLauncher(EngineConfig(), UniProc(sys.argv[1:])))
executor.start()
print(*executor.engine_pids(), flush=True)
if sys.stdin.readline():
    sys.exit(0)
"""


@contextmanager
def front_process(folder: Path) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Another process with a started executor, and the pid of its only rank."""
    command = [sys.executable, "-c", FRONT, fake_worker.__file__, "serve", str(folder)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        yield process, int(process.stdout.readline())
        process.kill()


def wait_for_end(pid: int) -> None:
    """Until the process `pid` is gone; it is no child of ours."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    import select

    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    assert poll.poll(PATIENCE * 1000), f"process {pid} did not end"
    os.close(descriptor)


def test_ranks_end_with_a_front_that_was_killed(tmp_path: Path, run_directory: Path) -> None:
    with front_process(tmp_path) as (process, rank):
        process.kill()
        wait_for_end(rank)


def test_an_interpreter_that_exits_takes_its_ranks_along_and_does_not_hang(tmp_path: Path, run_directory: Path) -> None:
    with front_process(tmp_path) as (process, rank):
        assert process.stdin is not None
        process.stdin.write("end\n")
        process.stdin.flush()
        assert process.wait(PATIENCE) == 0
        wait_for_end(rank)
        assert list(run_directory.iterdir()) == []
