"""Retention and cold blocks through a real server, whose KV cache is small.

pytest ci/L0_llm/test_retention.py
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from raw_stream import RawStream
from server_process import ServerProcess

LIBRARY_PAGE = Path(__file__).resolve().parents[2] / "backend" / "inflight" / "README.md"
PROMPT = [(position * 37) % 500 + 20 for position in range(64)]
RETENTION: dict[str, Any] = {
    "retention_token_range_starts": np.array([0, 32], np.int32),
    "retention_token_range_ends": np.array([32, -1], np.int32),
    "retention_token_range_priorities": np.array([100, 0], np.int32),
    "retention_token_range_durations_ms": np.array([-1, 1000], np.int32),
    "retention_decode_priority": np.array([0], np.int32),
    "retention_decode_duration_ms": np.array([-1], np.int32),
}


@pytest.fixture(scope="module")
def small_server() -> Iterator[ServerProcess]:
    parameters = {
        "max_tokens_in_paged_kv_cache": "256",
        "max_seq_len": "128",
        "enable_partial_reuse": "true",
        "kv_cache_host_memory_bytes": str(32 * 2**20),
        "event_buffer_max_size": "1000",
    }
    with ServerProcess(parameters=parameters) as running:
        yield running


def request(prompt: list[int], **options: Any) -> dict[str, Any]:
    return {"input_ids": np.array(prompt, np.int32), "max_tokens": 12, "end_id": -1, **options}


def test_tokens_are_the_same_with_retention_and_after_others(small_server: ServerProcess) -> None:
    with RawStream(small_server.grpc_url) as stream:
        first = stream.ask(request(PROMPT, **RETENTION))
        for number in range(6):
            others = [*PROMPT[: 10 * number], *((number * 91 + position * 7) % 500 + 20 for position in range(60))]
            stream.ask(request(others))
        again = stream.ask(request(PROMPT))
    assert len(first.token_ids) == 64 + 12
    assert again.token_ids == first.token_ids


def test_a_program_beside_the_server_gets_the_events_of_its_cache(small_server: ServerProcess) -> None:
    """The program of the library's page, which nothing but the server's run directory leads to the engine."""
    *_, program = re.findall(r"```python\n(.*?)```", LIBRARY_PAGE.read_text(encoding="utf-8"), re.DOTALL)
    with RawStream(small_server.grpc_url) as stream:
        answer = stream.ask(request(PROMPT))
    done = subprocess.run(
        [sys.executable, "-c", program, str(small_server.ready_endpoints.run_directory)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "KVCacheCreatedData" in done.stdout and f"tokens={answer.token_ids[:4]}"[:-1] in done.stdout


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"retention_token_range_priorities": np.array([1], np.int32)}, "must have an entry for each range"),
        ({"retention_decode_priority": np.array([101], np.int32)}, "must be between 0 and 100, got 101"),
        ({"retention_token_range_ends": np.array([-1, -1], np.int32)}, "must not overlap"),
    ],
)
def test_a_wrong_retention_is_refused(small_server: ServerProcess, changes: dict[str, Any], sentence: str) -> None:
    with RawStream(small_server.grpc_url) as stream:
        answer = stream.ask(request(PROMPT, **{**RETENTION, **changes}))
    assert sentence in answer.error and "[INVALID_ARGUMENT]" in answer.error
