"""A server whose model thinks as Qwen 3 does and calls tools as Hermes does."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest
from openai_server import PlayedEngine, Running, checkpoint_folder, openai_server, say


@pytest.fixture(scope="module")
def thinking_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    engine = PlayedEngine()
    folder = checkpoint_folder(tmp_path_factory.mktemp("checkpoint"))
    settings = {"tool_parser": "hermes", "reasoning_parser": "qwen3", "chat_template_kwargs": ["think"]}
    with openai_server(engine, folder, **settings) as url:
        yield Running(url, engine)


@pytest.fixture
def thinking(thinking_server: Running) -> Running:
    """It says TEXT until a test has it do otherwise."""
    thinking_server.engine.script = say()
    return thinking_server


@pytest.fixture(scope="module")
def client(thinking_server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{thinking_server.url}/v1", api_key="none", max_retries=0) as client:
        yield client
