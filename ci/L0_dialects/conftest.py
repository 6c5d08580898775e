"""A stream to the tritonserver that all folders share, and a server whose models may be unloaded.

The tests send what other backends' clients send, tensor by tensor, and compare the tokens with those of `llm`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from raw_stream import RawStream
from server_process import MODEL_REPOSITORY, ServerProcess

from . import ensemble
from .ensemble import OF_STEPS

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "default_model.json").read_text())[0]
"""A prompt as text and as token ids, and its greedy tokens."""


@pytest.fixture(scope="session")
def second_server(shared_servers: ExitStack, tmp_path_factory: pytest.TempPathFactory) -> ServerProcess:
    """One whose models may be unloaded by everybody, for tests that do so and bring them back. The models of
    TensorRT-LLM's API are not decoupled here; in an operator's own repository stand that of llmapi, with another name,
    and an ensemble of theirs."""
    repository = tmp_path_factory.mktemp("repository")
    (repository / "llm").symlink_to(MODEL_REPOSITORY / "llm")
    (repository / "llmapi" / "1").mkdir(parents=True)
    config = MODEL_REPOSITORY.parent / "backend" / "apis" / "llmapi" / "tensorrt_llm" / "config.pbtxt"
    (repository / "llmapi" / "config.pbtxt").write_text(
        config.read_text().replace('name: "tensorrt_llm"', 'name: "llmapi"')
    )
    apis = ["vllm", "tensorrtllm-unary"]
    (repository / OF_STEPS / "1").mkdir(parents=True)
    (repository / OF_STEPS / "config.pbtxt").write_text(ensemble.config())
    return shared_servers.enter_context(ServerProcess(model_repository=repository, apis=apis, open_apis=True))


@pytest.fixture
def wire(server: ServerProcess) -> Iterator[RawStream]:
    with RawStream(server.grpc_url) as opened:
        yield opened


def text(value: str, *shape: int) -> np.ndarray:
    """A text as a tensor of this shape."""
    return np.array([value.encode()], dtype=object).reshape(shape)


def number(value: Any, kind: type, *shape: int) -> np.ndarray:
    return np.array([value], dtype=kind).reshape(shape)
