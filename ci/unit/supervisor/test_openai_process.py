"""The supervisor's side of the OpenAI server, with a program that plays it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from free_ports import free_port
from waiting import until

from inflight.errors import ConfigurationError
from inflight.supervisor import openai_process, output_pipe
from inflight.supervisor.openai_process import OpenAIProcess
from inflight.supervisor.output_pipe import OutputPipe

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
        process = OpenAIProcess(tmp_path, f"127.0.0.1:{port}", environment, told.append)
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
    adopted = OpenAIProcess(tmp_path, first._address, first._environment, told.append)
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
