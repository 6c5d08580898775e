"""A stub that hangs: tritonserver still reports it as ready; the supervisor ends its streams and restarts the server.

pytest ci/L0_backend/test_frozen_stub.py
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

from raw_stream import RawStream
from server_process import ServerProcess
from waiting import until

from inflight.run_directory import SIGNS
from inflight.supervisor import processes

PROMPT = {"input_ids": [5, 6, 7], "max_tokens": 20, "end_id": -1}
ENDLESS = {**PROMPT, "max_tokens": 15_000, "stream": True}


def test_a_stub_that_stands_still_is_an_error_and_then_forgotten(fake_engine: Path) -> None:
    with ServerProcess(model_repository=fake_engine) as server:
        signs = server.ready_endpoints.run_directory / SIGNS
        with RawStream(server.grpc_url) as stream:
            before = stream.ask(PROMPT).token_ids
        (stub,) = server.stub_pids
        until(lambda: list(signs.iterdir()) == [signs / f"llm_0_0.{stub}"], "the stub gives signs")
        others = [RawStream(server.grpc_url) for _ in range(3)]
        running = [other.send(ENDLESS) for other in others]
        for other in others:
            other.take()
        os.kill(stub, signal.SIGSTOP)
        for other, answer in zip(others, running, strict=True):
            other.collect(answer)
            other.close()
            assert answer.error and answer.num_finals == 1
        until(lambda: "serving again" in server.told, "the supervisor has started the server again")
        assert "the stub process llm_0_0 hangs" in server.told
        assert not processes.is_alive(stub)
        with RawStream(server.grpc_url) as stream:
            assert stream.ask(PROMPT).token_ids == before
        assert server.stop() == 0
