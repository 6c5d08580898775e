"""The supervisor's side of the OpenAI server, with a program that plays it."""

from __future__ import annotations

import logging
import os
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from free_ports import free_port
from waiting import until

from inflight import log_output
from inflight.config import EngineConfig
from inflight.errors import ConfigurationError
from inflight.executor.front.engine_state import EngineState
from inflight.executor.front.remote import RemoteFront
from inflight.executor.launchers.attached import AttachedLaunch
from inflight.openai_options import OpenAIOptions
from inflight.supervisor import openai_process, output_pipe, processes
from inflight.supervisor.log import ServerLog
from inflight.supervisor.losses import SETTLED, Losses
from inflight.supervisor.openai_process import OpenAIProcess
from inflight.supervisor.options import Endpoints, ServeOptions
from inflight.supervisor.output_pipe import OutputPipe
from inflight.supervisor.serve import serve

PROGRAM = """
import http.server, pathlib, sys, time
how, port = pathlib.Path(sys.argv[1]).read_text().split()
if how == "fails":
    sys.exit(2)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        if how == "hangs":
            time.sleep(60)
        self.send_response(200 if how == "serves" else 503)
        self.end_headers()
    def log_message(self, *args):
        pass
http.server.ThreadingHTTPServer(("127.0.0.1", int(port)), Handler).serve_forever()
"""
"""Its only argument is a file that says what to do."""
ALONE = """
import http.server, json, pathlib, sys
options = json.loads(pathlib.Path(sys.argv[1]).read_text())
print("I1124 00:00:00.000 rank 0 inflight.worker] ready")
if options["served_model_names"] == ["fails"]:
    sys.exit("inflight: there is no such model")
print("I1124 00:00:00.000 inflight.http.serve] engine llm: what it is", flush=True)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if options["launches_ranks"] else 503)
        self.end_headers()
    def log_message(self, *args):
        pass
http.server.ThreadingHTTPServer(("127.0.0.1", options["port"]), Handler).serve_forever()
"""
"""As the OpenAI server, its only argument is a file of its options."""
PATIENCE = 150

Play = Callable[[str], OpenAIProcess]


@pytest.fixture
def told() -> list[str]:
    return []


@pytest.fixture
def play(tmp_path: Path, told: list[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Play]:
    (tmp_path / "played.py").write_text(PROGRAM)
    monkeypatch.setattr(openai_process, "MODULE", "played")
    monkeypatch.setattr(openai_process, "PERIOD", 0.0)
    monkeypatch.setattr(openai_process, "TIMEOUT", 5.0)
    port = free_port()
    processes: list[OpenAIProcess] = []

    OutputPipe(tmp_path, output_pipe.OPENAI).make()
    held = output_pipe.open_all(tmp_path)

    def make(how: str) -> OpenAIProcess:
        (tmp_path / openai_process.OPTIONS_FILE).write_text(f"{how} {port}")
        environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
        process = OpenAIProcess(tmp_path, f"127.0.0.1:{port}", environment, told.append, Losses(told.append))
        processes.append(process)
        process.start()
        return process

    yield make
    for process in processes:
        process.kill()
    for descriptor in held.values():
        os.close(descriptor)


@pytest.mark.slow
def test_it_is_ready_once_it_answers(play: Play) -> None:
    process = play("serves")
    until(process.is_ready)


@pytest.mark.slow
def test_one_without_an_engine_is_not_ready_and_not_killed(play: Play, told: list[str]) -> None:
    process = play("waits")
    pid = process.pid
    until(lambda: process.keep_up() or process._has_answered)
    assert not process.is_ready()
    for _ in range(10):
        process.keep_up()
    assert (process.pid, told) == (pid, [])


@pytest.mark.slow
def test_one_that_does_not_start_is_a_wrong_configuration(play: Play) -> None:
    process = play("fails")

    def fails() -> bool:
        try:
            return process.is_ready()
        except ConfigurationError as error:
            assert "exit code 2" in str(error)
            return True

    until(fails)


@pytest.mark.slow
def test_one_that_dies_is_started_again(play: Play, told: list[str]) -> None:
    process = play("serves")
    until(process.is_ready)
    pid = process.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    until(lambda: process.keep_up() or process.pid not in (pid, None))
    assert told == ["the OpenAI server ended (killed by SIGKILL); starting it again"]
    until(process.is_ready)


@pytest.mark.slow
def test_one_that_an_earlier_supervisor_has_started_is_watched_as_well(
    play: Play, told: list[str], tmp_path: Path
) -> None:
    first = play("serves")
    until(first.is_ready)
    adopted = OpenAIProcess(tmp_path, first._address, first._environment, told.append, first._losses)
    adopted.adopt()
    try:
        assert adopted.is_ready() and adopted.pid == first.pid
        adopted.keep_up()
        assert told == []
        os.kill(first.pid or 0, signal.SIGKILL)
        until(lambda: adopted.keep_up() or adopted.pid not in (first.pid, None))
        assert told == [
            "the OpenAI server ended (an earlier supervisor had started it, so nobody knows how); starting it again"
        ]
        until(adopted.is_ready)
    finally:
        adopted.kill()


@pytest.mark.slow
def test_one_that_stops_answering_is_started_again(play: Play, told: list[str]) -> None:
    process = play("serves")
    until(lambda: process.keep_up() or process._has_answered)
    pid = process.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    until(lambda: process.keep_up() or process.pid not in (pid, None))
    assert told == ["the OpenAI server does not answer; starting it again"]


@pytest.mark.slow
def test_it_may_finish_until_the_deadline(play: Play) -> None:
    process = play("serves")
    until(process.is_ready)
    process.drain(time.monotonic() + PATIENCE, time.sleep)
    assert process.pid is None


KNOWN = "rank process 7 has died"
NO_RANKS: Any = SimpleNamespace(owns_ranks=False)


def loss(reason: str, num_left: int, num_ended: int, *, num_replicas: int = 1, name: str = "llm") -> str:
    """The line that a front logs about its requests, of replica 1 if there are several."""
    told: list[logging.LogRecord] = []
    front: Any = RemoteFront(EngineConfig(), *[NO_RANKS] * num_replicas, name=name)
    front._replica_lost = lambda *args: num_ended
    front.num_requests_in_flight = lambda: num_left
    logger = logging.getLogger("inflight.executor.front.connection")
    logger.addFilter(told.append)
    front._connections[-1]._lose(EngineState.RELAUNCHING, "", reason)
    logger.removeFilter(told.append)
    return f"{log_output._Formatter().format(told[0])}\n"


def test_lost_ranks_are_one_line_for_all_fronts(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The OpenAI server, whose requests are few, and two stubs, of which one has launched the ranks."""
    told: list[str] = []
    now = [0.0]
    losses = Losses(told.append, lambda: now[0])
    process = OpenAIProcess(tmp_path, "", {}, told.append, losses)
    log = ServerLog(told.append, losses)
    attached: Any = SimpleNamespace(_ranks=SimpleNamespace(has_ended=lambda ready: True))
    found = AttachedLaunch.end_reason(attached, ())
    pipes = [os.pipe() for _ in range(2)]
    log.follow(os.fdopen(pipes[0][0]))
    log.tell_errors()
    os.write(pipes[1][1], f"{loss(found, 0, 0)}another line\n".encode())
    fronts = (loss(KNOWN, 40, 1), loss(found, 2, 0), loss(KNOWN, 3, 0, num_replicas=2), loss(KNOWN, 5, 0, name="b"))
    os.write(pipes[0][1], "".join(fronts).encode())
    for _, writing in pipes:
        os.close(writing)
    process._copy(pipes[1][0])
    log.join(60)
    losses.tell_settled()
    assert told == []
    now[0] = SETTLED
    losses.tell_settled()
    losses.tell_settled()
    assert told == [
        f"the engine llm is lost: {KNOWN}; 42 requests go on, 1 were ended",
        f"replica 1 of the engine llm is lost: {KNOWN}; 3 requests go on, 0 were ended",
        f"the engine b is lost: {KNOWN}; 5 requests go on, 0 were ended",
    ]
    assert capfd.readouterr().err == "another line\n"


@pytest.mark.slow
class TestAlone:
    """Without tritonserver, of which there is none."""

    @pytest.fixture
    def options(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ServeOptions:
        (tmp_path / "played.py").write_text(ALONE)
        monkeypatch.setattr(openai_process, "MODULE", "played")
        monkeypatch.setattr(openai_process, "PERIOD", 0.0)
        (tmp_path / "tmp").mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
        return ServeOptions(
            allow_tritonserver=False,
            tritonserver=tmp_path / "nowhere",
            environment={"PYTHONPATH": str(tmp_path)},
            openai=OpenAIOptions(port=0),
            log_file=tmp_path / "log",
        )

    def test_a_taken_port_is_named_with_its_own_option(
        self, options: ServeOptions, capfd: pytest.CaptureFixture[str]
    ) -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            assert serve(replace(options, openai=OpenAIOptions(port=port))) == 2
        assert (
            "is taken: stop the program that listens there, or choose another with --port\n" in capfd.readouterr().err
        )

    def test_it_is_started_watched_and_drained(
        self, options: ServeOptions, tmp_path: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        seen: list[Endpoints] = []

        def disturb(endpoints: Endpoints) -> None:
            try:
                (pid,) = processes.marked(endpoints.run_directory)
                os.kill(pid, signal.SIGKILL)
                until(lambda: pid not in (now := processes.marked(endpoints.run_directory)) and now)
                until(lambda: answers(endpoints.openai))
                seen.append(endpoints)
            finally:
                os.kill(os.getpid(), signal.SIGTERM)

        assert serve(replace(options, on_ready=disturb)) == 0
        (endpoints,) = seen
        assert (endpoints.grpc, endpoints.http, endpoints.metrics) == ("", "", endpoints.openai)
        assert list((tmp_path / "tmp").iterdir()) == [] and not processes.marked(endpoints.run_directory)
        told = capfd.readouterr().err.splitlines()
        assert told[:2] == ["inflight: starting the OpenAI server", "inflight: engine llm: what it is"]
        assert "inflight: the OpenAI server ended (killed by SIGKILL); starting it again" in told
        assert "rank 0" in (tmp_path / "log").read_text() and not any("rank 0" in line for line in told)

    def test_one_that_does_not_start_ends_with_its_reason(
        self, options: ServeOptions, tmp_path: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        assert serve(replace(options, openai=OpenAIOptions(port=0, served_model_names=["fails"]))) == 2
        assert capfd.readouterr().err.splitlines()[-2:] == [
            "inflight: there is no such model",
            "inflight: the OpenAI server did not start (exit code 1): the line above says why",
        ]
        assert list((tmp_path / "tmp").iterdir()) == []


def answers(address: str) -> bool:
    try:
        return openai_process._health(address) == 200
    except OSError:
        return False
