"""A model that its operator unloads and loads again and again: it serves each time, and nothing accumulates.

pytest ci/L0_backend/test_reload.py
"""

from __future__ import annotations

import os

import pytest
from raw_stream import RawStream
from server_metrics import OUTCOMES, Metrics
from server_process import ServerProcess
from waiting import until

from inflight.supervisor.admin import Admin

pytestmark = pytest.mark.long

TIMES = 3
PATIENCE = 200
"""Seconds after which an unload or a load counts as never ending."""
PROMPT = {"text_input": "Once upon a time", "max_tokens": 60, "end_id": -1, "stream": True}


def left_by_the_engine(server: ServerProcess) -> list[str]:
    """What of the model is still there while it is unloaded: processes beside the server's own, files, shared memory
    of the stub."""
    processes = [str(pid) for pid in server.pids if pid != server.tritonserver_pid]
    folder = server.ready_endpoints.run_directory
    files = [path.name for path in folder.iterdir() if path.name.startswith("engine-")]
    return [*processes, *files, *(path.name for path in server.shared_memory)]


def open_descriptors(server: ServerProcess) -> int:
    return len(os.listdir(f"/proc/{server.tritonserver_pid}/fd"))


def test_reloads_finish_what_is_in_flight_and_leave_nothing_behind() -> None:
    with ServerProcess(open_apis=True) as server:
        admin = Admin(server.grpc_url, {}, timeout=PATIENCE)
        first = server.tritonserver_pid
        expected: list[int] = []
        descriptors: list[int] = []
        for _ in range(TIMES):
            with RawStream(server.grpc_url) as stream:
                answer = stream.send(PROMPT)
                stream.take()
                assert admin.unload("llm") == ""
                stream.collect(answer)
            assert not answer.error and len(answer.token_ids) == PROMPT["max_tokens"]
            expected = expected or answer.token_ids
            assert answer.token_ids == expected
            until(lambda: not left_by_the_engine(server), "nothing of the model is left")
            if len(descriptors) > 1:  # tritonserver opens some of its own when it first needs them
                until(lambda: open_descriptors(server) <= max(descriptors), "no descriptor is left either")
            descriptors.append(open_descriptors(server))
            assert admin.load("llm", timeout=PATIENCE) == ""
        until(lambda: admin.is_model_ready("llm"), "the model is ready")
        assert server.tritonserver_pid == first and "again" not in server.told


def test_the_stub_of_before_takes_no_metrics_of_the_next_one_along() -> None:
    """It stays until the last client that ever asked it has disconnected, beside the stub that serves by then."""
    with ServerProcess(open_apis=True) as server:
        late = RawStream(server.grpc_url)
        admin = Admin(server.grpc_url, {}, timeout=PATIENCE)
        first = server.tritonserver_pid
        late.ask(PROMPT)
        before = set(server.stub_pids)
        assert (admin.unload("llm"), admin.load("llm", timeout=PATIENCE)) == ("", "")
        assert before < set(server.stub_pids)
        late.close()
        until(lambda: not before & set(server.stub_pids), "the stub of before has ended")
        with RawStream(server.grpc_url) as stream:
            for _ in range(3):
                stream.ask(PROMPT)
        until(lambda: Metrics(server).of(OUTCOMES, outcome="completed") == 3, "all of the new stub are counted")
        assert server.tritonserver_pid == first and "again" not in server.told
