"""Servers on played engines, shared by the tests of a module."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from openai_server import PlayedEngine, Running, checkpoint_folder, openai_server, say


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    engine = PlayedEngine()
    folder = checkpoint_folder(tmp_path_factory.mktemp("checkpoint"))
    with openai_server(engine, folder, chat_template_kwargs=["mood"]) as url:
        yield Running(url, engine)


@pytest.fixture
def running(shared: Running) -> Running:
    """It says TEXT until a test has it do otherwise."""
    shared.engine.script = say()
    shared.engine.ready = True
    shared.engine.refusal = None
    return shared


@pytest.fixture(scope="module")
def thinking_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Its model thinks as Qwen 3 does and calls tools as Hermes does."""
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
