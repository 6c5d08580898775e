"""A tritonserver with a small batch and cache, a model that loads at once, and streams to the shared server."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from google.protobuf import text_format
from raw_stream import RawStream
from server_process import MODEL_REPOSITORY, ServerProcess

from inflight.supervisor import repository

FAKE_ENGINE = Path(__file__).with_name("fake_engine")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--reloads", type=int, default=6, help="how often the model is loaded in place of itself")


@pytest.fixture
def fake_engine(tmp_path: Path) -> Path:
    """A repository whose `llm` has all tensors of the real one, and a rank without a network."""
    config = repository.read(MODEL_REPOSITORY)["llm"]
    config.backend = "python"
    repository.replace_parameters(config, {"gpt_model_path": str(MODEL_REPOSITORY / "llm" / "1" / "checkpoint")})
    (tmp_path / "llm").mkdir()
    (tmp_path / "llm" / "1").symlink_to(FAKE_ENGINE / "1")
    (tmp_path / "llm" / repository.CONFIG).write_text(text_format.MessageToString(config, as_utf8=True))
    return tmp_path


@pytest.fixture(scope="session")
def narrow_server(shared_servers: ExitStack) -> ServerProcess:
    """One request at a time, one waiting, and a small KV cache."""
    parameters = {
        "max_batch_size": "1",
        "max_queue_size": "1",
        "max_tokens_in_paged_kv_cache": "512",
        "worker_heartbeat_timeout_ms": "600000",  # a test holds its ranks
    }
    return shared_servers.enter_context(ServerProcess(parameters=parameters))


@pytest.fixture
def stream(server: ServerProcess) -> Iterator[RawStream]:
    with RawStream(server.grpc_url) as opened:
        yield opened


@pytest.fixture
def other_stream(server: ServerProcess) -> Iterator[RawStream]:
    with RawStream(server.grpc_url) as opened:
        yield opened
