"""What remains of a server notices that nobody supervises it. (`supervisor/test_janitor.py` says what then happens.)

pytest ci/unit/test_abandonment.py
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import fake_pb_utils as pb
import pytest
from waiting import until

from inflight.abandonment import Supervised, end_when_abandoned
from inflight.errors import ConfigurationError
from inflight.http.serve import serve
from inflight.openai_options import OpenAIOptions
from inflight.run_directory import RUN_DIRECTORY
from inflight.server.processing import PROCESSES
from inflight.server.start import start_server


def start_stub() -> None:
    """As far as its configuration, which is wrong."""
    arguments = {"model_config": "{}", "model_name": next(iter(PROCESSES)), "model_repository": "", "model_version": ""}
    with pytest.raises(ConfigurationError, match="needs the parameter engine"):
        start_server(pb, arguments)


def start_openai_server() -> None:
    with pytest.raises(ConfigurationError, match="max_seq_len"):
        serve(OpenAIOptions(parameters={"max_seq_len": "wrong"}))


@pytest.mark.parametrize("start", [start_stub, start_openai_server])
def test_the_end_is_begun_once_the_last_supervisor_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: Callable[[], None]
) -> None:
    monkeypatch.setenv(RUN_DIRECTORY, str(tmp_path))
    for program in ("server.start", "http.engine_front"):  # later tests of this process read its log
        monkeypatch.setattr(f"inflight.{program}.start_logging", lambda *libraries: None)
    supervisor, janitor = (Supervised(tmp_path, ["touch", "ended"]) for _ in range(2))
    start()
    supervisor.release()
    supervisor = Supervised(tmp_path, ["touch", "ended"])  # the next one
    janitor.release()
    assert not (tmp_path / "ended").exists()
    supervisor.release()
    until((tmp_path / "ended").exists)


def test_without_a_supervisor_nothing_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RUN_DIRECTORY, str(tmp_path))
    end_when_abandoned()
    assert list(tmp_path.iterdir()) == []
