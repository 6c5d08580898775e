"""A killed rank: errors at once, a model that is not ready, and then the same answers as before.

pytest ci/L0_backend/test_recovery.py
"""

from __future__ import annotations

import os
import signal
import threading
import urllib.error
import urllib.request
from pathlib import Path

from raw_stream import RawStream
from server_process import ServerProcess

PROMPT = {"text_input": "Once upon a time", "max_tokens": 20, "end_id": -1}
ENDLESS = {**PROMPT, "max_tokens": 1500, "stream": True}


def is_ready(server: ServerProcess) -> bool:
    try:
        with urllib.request.urlopen(f"{server.http_url}/v2/models/llm/ready") as response:
            return response.status == 200
    except urllib.error.HTTPError:
        return False


def wait_until_ready(server: ServerProcess, wanted: bool) -> None:
    pause = threading.Event()
    for _ in range(1200):
        if is_ready(server) is wanted:
            return
        pause.wait(0.05)
    raise AssertionError(f"the model never became {'ready' if wanted else 'unready'}")


def ranks(server: ServerProcess) -> list[int]:
    return [pid for pid in server.pids if b"inflight.worker" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def test_a_killed_rank_is_an_error_and_then_forgotten() -> None:
    with ServerProcess() as server, RawStream(server.grpc_url) as stream:
        before = stream.ask(PROMPT).token_ids
        others = [RawStream(server.grpc_url) for _ in range(3)]
        running = [other.send(ENDLESS) for other in others]
        for other in others:
            other.take()
        os.kill(ranks(server)[0], signal.SIGKILL)
        for other, answer in zip(others, running, strict=True):
            other.collect(answer)
            assert "ranks" in answer.error and answer.num_finals == 1
        wait_until_ready(server, False)
        wait_until_ready(server, True)
        assert stream.ask(PROMPT).token_ids == before
        assert len(ranks(server)) == 1
        for other in others:
            other.close()
