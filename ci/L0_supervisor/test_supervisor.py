"""Promises of `inflight serve` about processes, with a real tritonserver: it restarts, and leaves nothing behind."""

from __future__ import annotations

import os
import re
import shutil
import signal
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest
from server_process import ServerFailed, ServerProcess
from toy_client import DEADLINE, TOY_REPOSITORY, Stream, is_ready
from tritonclient.utils import InferenceServerException
from waiting import until

from inflight.supervisor import processes

pytestmark = pytest.mark.long

Open = Callable[[ServerProcess], Stream]

BROKEN = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        raise pb_utils.TritonModelException("the checkpoint has no layers")
"""
"""A program that no model can be loaded from."""


def serves(server: ServerProcess, open_stream: Open) -> None:
    stream = open_stream(server)
    stream.ask("hello", 2)
    assert stream.rest() == ["hello", "hello"]


def assert_nothing_left(server: ServerProcess) -> None:
    run_directory = server.ready_endpoints.run_directory
    assert processes.marked(run_directory) == []
    assert server.shared_memory == []
    assert not run_directory.exists()


def test_it_serves_on_loopback_only_and_from_a_private_directory(server: ServerProcess, open_stream: Open) -> None:
    serves(server, open_stream)
    assert server.ready_endpoints.run_directory.stat().st_mode & 0o777 == 0o700
    assert server.shared_memory
    listening = _listening_addresses(server.tritonserver_pid)
    assert len(listening) == 3
    assert all(address.endswith("0100007F") for address in listening)
    assert server.stop() == 0
    assert_nothing_left(server)


def test_sigterm_lets_open_streams_finish_and_refuses_new_requests(server: ServerProcess, open_stream: Open) -> None:
    streams = [open_stream(server) for _ in range(16)]
    for number, stream in enumerate(streams):
        stream.ask(str(number), 100)
    assert [stream.next() for stream in streams] == [str(number) for number in range(16)]
    late = open_stream(server)
    os.kill(_pid(server), signal.SIGTERM)
    until(lambda: not is_ready(server), "the model refuses")
    late.ask("late")
    with pytest.raises(InferenceServerException):
        late.next()
    assert [stream.rest() for stream in streams] == [[str(number)] * 99 for number in range(16)]
    # The streams stay open, as an idle client leaves them; that must not hold the exit.
    assert _exit_code(server) == 0
    assert not re.search(r"[EW]\d{4} ", server.told), "tritonserver's complaints about them are not told"
    assert_nothing_left(server)


def test_a_second_signal_stops_at_once(server: ServerProcess, open_stream: Open) -> None:
    stream = open_stream(server)
    stream.ask("endless", 100_000)
    assert stream.next() == "endless"
    os.kill(_pid(server), signal.SIGINT)
    until(lambda: not is_ready(server), "the model refuses")
    os.kill(_pid(server), signal.SIGINT)
    assert _exit_code(server) == 0
    with pytest.raises(InferenceServerException):
        stream.rest()
    assert_nothing_left(server)


def test_requests_that_do_not_end_in_time_are_cut(open_stream: Open) -> None:
    with ServerProcess(model_repository=TOY_REPOSITORY, drain_timeout=0.5) as server:
        stream = open_stream(server)
        stream.ask("endless", 100_000)
        assert stream.next() == "endless"
        assert server.stop() == 0
        with pytest.raises(InferenceServerException):
            stream.rest()
        assert_nothing_left(server)


@pytest.mark.parametrize("how", ["killed", "exited"])
def test_a_dead_stub_ends_streams_with_an_error_and_is_started_again(
    server: ServerProcess, open_stream: Open, how: str
) -> None:
    streams = [open_stream(server) for _ in range(8)]
    for stream in streams:
        stream.ask("endless", 100_000)
        assert stream.next() == "endless"
    before = server.tritonserver_pid
    memory = server.shared_memory
    if how == "killed":
        (stub,) = server.stub_pids
        os.kill(stub, signal.SIGKILL)
    else:
        open_stream(server).ask("exit")
    for stream in streams:
        with pytest.raises(InferenceServerException):
            stream.rest()
    until(lambda: "serving again" in server.told, "started again")
    assert server.tritonserver_pid != before
    assert not any(region.exists() for region in memory)
    serves(server, open_stream)
    assert server.stop() == 0
    assert_nothing_left(server)


def test_a_dead_tritonserver_is_started_again(server: ServerProcess, open_stream: Open) -> None:
    child = open_stream(server)
    child.ask("child")
    (pid,) = child.rest()
    before = server.pids
    assert int(pid) in before
    os.kill(server.tritonserver_pid, signal.SIGKILL)
    until(lambda: not any(processes.is_alive(each) for each in before), "every process of the old server is gone")
    until(lambda: "serving again" in server.told, "started again")
    serves(server, open_stream)


def test_a_model_that_lost_its_ranks_is_loaded_again(server: ServerProcess, open_stream: Open) -> None:
    (stub,) = server.stub_pids
    stream = open_stream(server)
    stream.ask("lose")
    assert stream.rest() == ["lose"]
    # The old stub stays until the last client that ever asked it has closed its stream.
    until(lambda: "serves again" in server.told, "loaded again")
    assert set(server.stub_pids) - {stub} and "rank 1 was killed" in server.told
    serves(server, open_stream)


def test_a_model_that_somebody_unloaded_is_brought_back(open_stream: Open) -> None:
    with ServerProcess(model_repository=TOY_REPOSITORY, open_apis=True) as server:
        before = server.tritonserver_pid
        (stub,) = server.stub_pids
        assert _post(server, "/v2/repository/models/toy/unload") == 200
        until(lambda: "serves again" in server.told, "loaded again")
        assert set(server.stub_pids) - {stub}
        assert "model toy went down (it was unloaded, and not by this supervisor)" in server.told
        serves(server, open_stream)
        assert server.tritonserver_pid == before


def test_an_operator_may_unload_and_load(open_stream: Open, tmp_path: Path) -> None:
    """With the key that the operator chose; the supervisor stays out of it."""
    key = tmp_path / "key"
    key.write_text("a-key-of-the-operators\n")
    header = {"inflight-api-key": "a-key-of-the-operators"}
    with ServerProcess(model_repository=TOY_REPOSITORY, api_key_file=key) as server:
        before = server.tritonserver_pid
        assert _post(server, "/v2/repository/models/toy/unload") == 403
        assert _post(server, "/v2/repository/models/toy/unload", header) == 200
        assert _post(server, "/v2/repository/models/toy/load", header) == 200
        serves(server, open_stream)
        assert server.tritonserver_pid == before
        assert "again" not in server.told


def test_a_stopped_tritonserver_is_started_again(server: ServerProcess, open_stream: Open) -> None:
    """It still holds its ports, and answers nobody."""
    before = server.tritonserver_pid
    os.kill(before, signal.SIGSTOP)
    until(lambda: "serving again" in server.told, "started again")
    assert "tritonserver does not answer over gRPC; starting it again" in server.told
    assert server.tritonserver_pid != before
    serves(server, open_stream)


def test_a_server_that_does_not_start_again_is_tried_until_it_does(tmp_path: Path, open_stream: Open) -> None:
    repository = tmp_path / "repository"
    shutil.copytree(TOY_REPOSITORY, repository)
    program = repository / "toy" / "1" / "model.py"
    working = program.read_text()
    with ServerProcess(model_repository=repository) as server:
        program.write_text(BROKEN)
        os.kill(server.tritonserver_pid, signal.SIGKILL)
        until(lambda: "starting it again in 2 s" in server.told, "failed again and again")
        assert "the checkpoint has no layers" in server.told
        program.write_text(working)
        until(lambda: "serving again" in server.told, "serves again")
        serves(server, open_stream)


def test_without_http_everything_works_over_grpc(open_stream: Open) -> None:
    with ServerProcess(model_repository=TOY_REPOSITORY, allow_http=False) as server:
        assert server.ready_endpoints.http == ""
        assert len(_listening_addresses(server.tritonserver_pid)) == 2
        (stub,) = server.stub_pids
        stream = open_stream(server)
        stream.ask("lose")
        assert stream.rest() == ["lose"]
        until(lambda: "serves again" in server.told, "loaded again")
        assert set(server.stub_pids) - {stub}
        stream = open_stream(server)
        stream.ask("drained", 50)
        assert stream.next() == "drained"
        os.kill(_pid(server), signal.SIGTERM)
        assert stream.rest() == ["drained"] * 49
        assert _exit_code(server) == 0
        assert_nothing_left(server)


def test_options_of_tritonserver_are_handed_on(tmp_path: Path, open_stream: Open) -> None:
    options = [
        f"--trace-config=triton,file={tmp_path / 'trace.json'}",
        *("--trace-config", "rate=1"),
        "--trace-config=level=TIMESTAMPS",
        # Otherwise tritonserver writes at its end, and loses what it has if that takes too long.
        "--trace-config=triton,log-frequency=1",
    ]
    with ServerProcess(model_repository=TOY_REPOSITORY, server_arguments=options) as server:
        stream = open_stream(server)
        stream.ask("hello")
        assert stream.rest() == ["hello"]
        stream.close()
        until(lambda: '"model_name":"toy"' in _traces(tmp_path), "the request is traced")
        assert server.stop() == 0


def _traces(folder: Path) -> str:
    """All that tritonserver has written, in one file for each trace."""
    return "".join(file.read_text() for file in sorted(folder.glob("trace.json*"))).replace(" ", "")


def test_an_option_that_tritonserver_does_not_know_is_named() -> None:
    server = ServerProcess(model_repository=TOY_REPOSITORY, server_arguments=["--no-such-option"])
    with pytest.raises(ServerFailed, match="unrecognized option '--no-such-option'"), server:
        pass


def test_nothing_outlives_a_killed_supervisor(server: ServerProcess, open_stream: Open) -> None:
    child = open_stream(server)
    child.ask("child")
    (pid,) = child.rest()
    everything = server.pids
    assert int(pid) in everything
    os.kill(_pid(server), signal.SIGKILL)
    assert _exit_code(server) == -signal.SIGKILL
    until(lambda: not any(processes.is_alive(each) for each in everything), "every process is gone")
    until(lambda: not server.shared_memory and not server.ready_endpoints.run_directory.exists(), "all is removed")


def test_a_model_that_cannot_be_loaded_is_one_sentence(tmp_path: os.PathLike[str]) -> None:
    version = tmp_path / "toy" / "1"  # type: ignore[operator]
    version.mkdir(parents=True)
    (version.parent / "config.pbtxt").write_text((TOY_REPOSITORY / "toy" / "config.pbtxt").read_text())
    (version / "model.py").write_text(BROKEN)
    server = ServerProcess(model_repository=tmp_path)
    with pytest.raises(ServerFailed, match="the checkpoint has no layers"), server:
        pass
    assert server.process is not None
    assert server.process.wait() == 2


def _pid(server: ServerProcess) -> int:
    assert server.process is not None
    return server.process.pid


def _exit_code(server: ServerProcess) -> int:
    assert server.process is not None
    return server.process.wait(DEADLINE)


def _post(server: ServerProcess, path: str, headers: dict[str, str] | None = None) -> int:
    request = urllib.request.Request(server.http_url + path, data=b"{}", headers=headers or {}, method="POST")
    try:
        with urllib.request.urlopen(request, timeout=180) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code


def _listening_addresses(pid: int) -> list[str]:
    """Local addresses, in hexadecimal, of the TCP sockets on which the process listens."""
    sockets = set()
    for descriptor in os.listdir(f"/proc/{pid}/fd"):
        try:
            sockets.add(os.readlink(f"/proc/{pid}/fd/{descriptor}"))
        except OSError:
            continue
    found = []
    for family in ("tcp", "tcp6"):
        with open(f"/proc/{pid}/net/{family}") as table:
            for line in list(table)[1:]:
                words = line.split()
                if words[3] == "0A" and f"socket:[{words[9]}]" in sockets:
                    found.append(words[1].partition(":")[0])
    return found
