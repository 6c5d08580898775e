"""The `openai` package at a server whose model thinks."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest
from openai_server import Running


@pytest.fixture(scope="module")
def client(thinking_server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{thinking_server.url}/v1", api_key="none", max_retries=0) as client:
        yield client
