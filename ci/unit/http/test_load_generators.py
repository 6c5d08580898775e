"""What NVIDIA's load generators send to an OpenAI server, and they themselves where they are installed.

pytest ci/unit/http/test_load_generators.py
"""

from __future__ import annotations

import json
import threading
from pathlib import Path

import load_generators
import pytest
from load_generators import MAX_TOKENS, NUM_REQUESTS, find_program
from openai_server import CLIENT, Running, say

from inflight.request import Request
from inflight.result import Response

pytestmark = pytest.mark.slow

ENDPOINTS = ["chat", "completions"]
needs_genai_perf = pytest.mark.skipif(
    find_program("genai-perf") is None, reason="there is no genai-perf: name it in INFLIGHT_GENAI_PERF"
)
needs_aiperf = pytest.mark.skipif(
    find_program("aiperf") is None, reason="there is no aiperf: name it in INFLIGHT_AIPERF"
)


@pytest.fixture
def stepping(running: Running) -> Running:
    """Its answers come in two steps: perf_analyzer does not count an answer that arrives as one piece."""
    answer = say("x" * 100)

    def play(request: Request) -> list[Response]:
        first, *rest = answer(request)
        threading.Timer(0.05, running.engine.push, rest).start()
        return [first]

    running.engine.script = play
    return running


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_requests_of_genai_perf_are_answered(stepping: Running, tmp_path: Path, endpoint: str) -> None:
    running = stepping
    running.engine.requests.clear()
    requests = load_generators.perf_analyzer(tmp_path, endpoint, "llm", running.url.removeprefix("http://"))
    assert len(requests) >= NUM_REQUESTS
    assert all("[DONE]" in str(request["response_outputs"][-1]) for request in requests)
    assert {request.max_tokens for request in running.engine.requests} == {MAX_TOKENS}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": " Be not obdurate"}], "max_completion_tokens": MAX_TOKENS},
        ),
        ("/v1/completions", {"prompt": " a brave father PIRITH", "max_tokens": MAX_TOKENS}),
    ],
)
def test_requests_of_aiperf_are_answered(running: Running, path: str, body: dict[str, object]) -> None:
    """As version 0.13.0 sends them, after a look at /metrics."""
    assert CLIENT.head(f"{running.url}/metrics").status_code == 200
    usual = {"model": "llm", "stream": True, "stream_options": {"include_usage": True}}
    ids = dict.fromkeys(
        ("X-Request-ID", "X-Correlation-ID", "X-Session-Affinity"), "eaea70e4-79eb-4629-b94f-3f88418e8b"
    )
    response = running.post(path, {**body, **usual}, headers={"Accept": "text/event-stream", **ids})
    *frames, done, end = response.text.split("\n\n")
    assert (response.status_code, done, end) == (200, "data: [DONE]", "")
    assert json.loads(frames[-1][6:])["usage"]["completion_tokens"] == MAX_TOKENS


@needs_genai_perf
@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_genai_perf(stepping: Running, tmp_path: Path, endpoint: str) -> None:
    program = find_program("genai-perf")
    assert program is not None
    options = ("-m", "llm", "--endpoint-type", endpoint, "-u", stepping.url.removeprefix("http://"))
    results = load_generators.profile(program, tmp_path, *options, "--num-dataset-entries", "6")
    assert load_generators.num_requests(results) == NUM_REQUESTS


@needs_aiperf
@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_aiperf(stepping: Running, tmp_path: Path, endpoint: str) -> None:
    program = find_program("aiperf")
    assert program is not None
    options = ("-m", "llm", "--endpoint-type", endpoint, "--url", stepping.url, "--ui", "none")
    results = load_generators.profile(program, tmp_path, *options)
    assert load_generators.num_requests(results) == NUM_REQUESTS
