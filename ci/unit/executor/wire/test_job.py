"""Whether a leader listens, as fronts see it that look for ranks which somebody else started.

Run: pytest ci/unit/executor/wire/test_job.py
"""

from __future__ import annotations

import socket
from pathlib import Path

from inflight.executor.wire.job import is_served


def test_a_leader_is_there_as_long_as_it_listens(tmp_path: Path) -> None:
    path = tmp_path / "engine.sock"
    assert not is_served(path)
    with socket.socket(socket.AF_UNIX) as leader:
        leader.bind(str(path))
        leader.listen()
        assert is_served(path)
    assert not is_served(path), "its file is left"


def test_nobody_waits_for_a_leader_that_is_suspended(tmp_path: Path) -> None:
    path = tmp_path / "engine.sock"
    with socket.socket(socket.AF_UNIX) as leader:
        leader.bind(str(path))
        leader.listen(2)
        assert all(is_served(path) for _ in range(10))
