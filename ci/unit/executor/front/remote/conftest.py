"""Executors whose ranks are scripted; they and their processes end with the test."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import scripted_leader
from scripted_ranks import Launcher, launched

from inflight import backoff
from inflight.config import EngineConfig
from inflight.executor.front.remote import RemoteFront
from inflight.executor.launchers.processes import ProcessLauncher
from inflight.executor.launchers.spares import SpareLauncher
from inflight.executor.launchers.uniproc import UniProc
from inflight.run_directory import RUN_DIRECTORY


@pytest.fixture
def run_directory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where executors put their folders; the name must be short enough for a socket's address."""
    path = Path(tempfile.mkdtemp(prefix="run-"))
    monkeypatch.setenv(RUN_DIRECTORY, str(path))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def launcher(tmp_path: Path, run_directory: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Launcher]:
    """Makes executors over the scripted leader, and ends them with the test."""
    monkeypatch.setattr(backoff, "LONGEST", 0.0)
    made: list[RemoteFront] = []

    def make(behaviour: str = "serve", config: EngineConfig | None = None, **options: object) -> RemoteFront:
        config = config or EngineConfig()

        def make_one() -> ProcessLauncher:
            return ProcessLauncher(config, UniProc((scripted_leader.__file__, behaviour, str(tmp_path))))

        launcher = SpareLauncher(config, make_one) if config.spare_ranks else make_one()
        executor = RemoteFront(config, launcher, **options)  # type: ignore[arg-type]
        made.append(executor)
        return executor

    yield make
    for executor in made:
        executor.shutdown()
    assert list(run_directory.iterdir()) == []
    assert launched(tmp_path) == []
