"""The networks that the tests of sampling share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from sampling_runs import DEVICES, load
from tiny_checkpoints import TinyCheckpoint, make_checkpoint

from inflight.runtime.model_runner import ModelRunner


@pytest.fixture(scope="module", params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> TinyCheckpoint:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"), "llama")


@pytest.fixture(scope="module")
def runner(checkpoint: TinyCheckpoint, device: str) -> Iterator[ModelRunner]:
    runner = load(checkpoint.folder, device)
    yield runner
    runner.close()
