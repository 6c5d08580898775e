"""The load test of OpenAI's API, against a real server on a played engine.

pytest ci/unit/client/test_openai_load.py
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from openai_server import PlayedEngine, Running, checkpoint_folder, openai_server, say
from typer.testing import CliRunner

from inflight.request import Request
from inflight.result import Response
from inflight_client import LoadTestError, UsageError
from inflight_client._exceptions import ConnectError
from inflight_client.cli import app
from inflight_client.load_test import (
    Endpoint,
    Level,
    LoadMode,
    LoadTestOptions,
    LoadTestReport,
    PromptOptions,
    parse_endpoint,
    run_load_test,
)
from inflight_client.load_test.openai_load import base_url

FOUR = Level(LoadMode.CONCURRENCY, 4, 30)
FAST = Level(LoadMode.REQUEST_RATE, 500, 30)
KEY = "secret-of-the-test"


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    engine, folder = PlayedEngine(), checkpoint_folder(tmp_path_factory.mktemp("checkpoint"))
    keys = folder / "keys"
    keys.write_text(KEY)
    keys.chmod(0o600)
    with openai_server(engine, folder, api_key_file=str(keys)) as url:
        yield Running(url, engine)


@pytest.fixture(autouse=True)
def usual(running: Running) -> None:
    running.engine.script = say("x" * 200)
    running.engine.requests.clear()


def measure(running: Running, *levels: Level, endpoint: Endpoint = Endpoint.CHAT, key: str = KEY) -> LoadTestReport:
    prompts = PromptOptions(input_tokens=(5, 9), output_tokens=(3, 6))
    options = LoadTestOptions(levels=levels, url=running.url, prompts=prompts, endpoint=endpoint, api_key=key)
    return run_load_test(options)


@pytest.mark.parametrize("endpoint", list(Endpoint))
def test_closed_and_open_loop_send_what_they_say(running: Running, endpoint: Endpoint) -> None:
    report = measure(running, FOUR, FAST, endpoint=endpoint)
    _, *sent = running.engine.requests  # the first warmed up
    assert len(sent) == 60
    assert all(request.streaming and 3 <= request.max_tokens <= 6 for request in sent)
    assert len({tuple(request.input_token_ids) for request in sent}) == 60
    if endpoint is Endpoint.COMPLETIONS:
        assert {len(request.input_token_ids) for request in sent} <= set(range(5, 10))
    for result, own in zip(report.levels, (sent[:30], sent[30:]), strict=True):
        assert (result.num_requests, result.errors) == (30, {})
        assert result.num_output_tokens == sum(request.max_tokens for request in own)
        assert result.num_input_tokens == sum(len(request.input_token_ids) for request in own)
        assert 0 < result.time_to_first_token.p50 <= result.end_to_end_latency.p90
    assert report.server.engine["device"] == "cuda"


def test_failures_are_counted_by_kind_and_stop_nothing(running: Running) -> None:
    answer = say("x" * 200)

    def play(request: Request) -> list[Response]:
        if request.max_tokens == 5:
            return [Response(request_id=request.request_id, error_msg="the step failed", error_code="INTERNAL")]
        return answer(request)

    running.engine.script = play
    (level,) = measure(running, Level(LoadMode.CONCURRENCY, 4, 40)).levels
    (kind,) = level.errors
    assert kind.startswith("500: ")
    assert level.num_errors == sum(request.max_tokens == 5 for request in running.engine.requests[1:])
    assert level.num_requests == 40 - level.num_errors > 0


def test_a_server_that_refuses_says_why(running: Running) -> None:
    with pytest.raises(LoadTestError, match="refuses the load test's requests: 401: "):
        measure(running, FOUR, key="wrong")


def test_a_server_that_is_not_there() -> None:
    with pytest.raises(ConnectError, match=r"no server answers at http://127\.0\.0\.1:9"):
        run_load_test(LoadTestOptions(levels=[FOUR], url="127.0.0.1:9", endpoint=Endpoint.CHAT))


@pytest.mark.parametrize("url", ["localhost:9000", "http://localhost:9000/", "http://localhost:9000/v1"])
def test_urls(url: str) -> None:
    assert base_url(url) == "http://localhost:9000"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--openai", "localhost:1", "--metrics-url", "localhost:2"], "--metrics-url is for tritonserver"),
        (["--endpoint", "chat"], "--endpoint is of an OpenAI server"),
        (["--openai", "localhost:1", "--endpoint", "images"], "write chat or completions"),
    ],
)
def test_options_of_the_other_kind_of_server_are_refused(options: list[str], words: str) -> None:
    result = CliRunner().invoke(app, ["load-test", *options])
    assert result.exit_code == 2 and words in result.output


def test_an_unknown_endpoint() -> None:
    with pytest.raises(UsageError, match="chat or completions"):
        parse_endpoint("images")


def test_the_command_writes_the_report_and_no_key(running: Running, tmp_path: Path) -> None:
    arguments = ["load-test", "--openai", running.url, "-c", "2", "--requests", "12", "--output-tokens", "4"]
    result = CliRunner().invoke(app, [*arguments, "-o", str(tmp_path)], env={"OPENAI_API_KEY": KEY})
    assert result.exit_code == 0, result.output
    assert "engine" not in result.stdout and "1 rank on cuda" in result.stdout
    results = json.loads((tmp_path / "results.json").read_text())
    assert (results["endpoint"], results["server"]["engine"]["num_ranks"]) == ("/v1/chat/completions", "1")
    assert results["levels"][0]["end_to_end_latency"]["p99"] is None
    assert all(KEY.encode() not in path.read_bytes() for path in tmp_path.iterdir())
