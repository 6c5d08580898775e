"""What a stub has not answered can be read when it is gone."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from inflight.open_requests import Left, OpenRequests, take_left
from inflight.run_directory import OPEN_REQUESTS, RUN_DIRECTORY


@pytest.fixture
def requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> OpenRequests:
    monkeypatch.setenv(RUN_DIRECTORY, str(tmp_path))
    return OpenRequests("vllm_model_0_0")


@pytest.mark.parametrize("num_ended", [0, 1, 2])
def test_a_killed_stub_leaves_the_number_of_its_open_requests(
    requests: OpenRequests, tmp_path: Path, num_ended: int
) -> None:
    for _ in range(2):
        requests.begin()
    for _ in range(num_ended):
        requests.end()
    left = take_left(tmp_path, os.getpid())
    assert left == Left("vllm_model_0_0", 2 - num_ended)
    assert left is not None and left.model == "vllm_model"
    assert take_left(tmp_path, os.getpid()) is None, "a later stub may get the same pid"


def test_a_stub_that_ends_by_itself_leaves_nothing(requests: OpenRequests, tmp_path: Path) -> None:
    requests.close()
    assert take_left(tmp_path, os.getpid()) is None


def test_a_file_that_was_never_filled_says_nothing(tmp_path: Path) -> None:
    (tmp_path / OPEN_REQUESTS).mkdir()
    (tmp_path / OPEN_REQUESTS / "llm_0_0.7").touch()
    assert take_left(tmp_path, 7) is None


def test_without_a_supervisor_nothing_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(RUN_DIRECTORY, raising=False)
    requests = OpenRequests("llm_0_0")
    requests.begin()
    requests.close()
