"""`inflight serve --openai-port` as a whole: real ranks, the supervisor, and what it does when something dies."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai_server import CLIENT
from real_engine import listening_addresses
from server_metrics import REQUESTS, Metrics
from server_process import MODEL_REPOSITORY, ServerProcess
from waiting import until

from ci.unit.http.page.browser import Browser, find_chromium
from inflight_client import Client

pytestmark = pytest.mark.long

PROMPT = "Once upon a time"
ADAPTERS = MODEL_REPOSITORY / "llm" / "1" / "adapters"


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess(
        parameters={"num_threads": "1"},
        openai={"port": 0, "allow_lora_updates": True},
        drain_timeout=60.0,
    ) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.openai_url}/v1", api_key="none", max_retries=0) as client:
        yield client


def is_healthy(server: ServerProcess) -> bool:
    try:
        return CLIENT.get(f"{server.openai_url}/health").status_code == 200
    except httpx.TransportError:  # nobody listens
        return False


@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"temperature": 0.9, "seed": 7}, {"stop": [" and"]}])
def test_its_text_is_tritons(server: ServerProcess, client: openai.OpenAI, options: dict[str, object]) -> None:
    sampling = {"temperature": 0.0, **options}
    answer = client.completions.create(model="llm", prompt=PROMPT, max_tokens=32, **sampling)
    stream = client.completions.create(model="llm", prompt=PROMPT, max_tokens=32, stream=True, **sampling)
    pieces = [chunk.choices[0].text for chunk in stream]
    triton = {("stop_words" if name == "stop" else name): value for name, value in sampling.items()}
    with Client(server.grpc_url) as theirs:
        expected = theirs.generate(PROMPT, max_tokens=32, **triton)
    assert answer.choices[0].text == "".join(pieces) == expected.text
    assert answer.choices[0].finish_reason == expected.finish_reason


def test_a_chat_of_the_default_model_follows_a_schema(client: openai.OpenAI) -> None:
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    answer = client.chat.completions.create(
        model="llm",
        messages=[{"role": "user", "content": "Tell a story."}],
        max_tokens=200,
        temperature=0,
        response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
    )
    assert answer.choices[0].message.content.replace(" ", "").replace("\n", "").startswith('{"ok":')


def test_a_wrong_grammar_has_the_status_of_a_wrong_request_in_a_stream_too(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model="llm", prompt="a", stream=True, extra_body={"guided_grammar": "root ::= ("})


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "feed",
            "parameters": {
                "type": "object",
                "properties": {
                    "animal": {"enum": ["cat", "dog", "fox"]},
                    "count": {"type": "integer", "minimum": 1, "maximum": 9},
                },
                "required": ["animal", "count"],
                "additionalProperties": False,
            },
        },
    },
    {"type": "function", "function": {"name": "go_home"}},
]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "feed"}}])
@pytest.mark.parametrize("temperature", [0.0, 2.0])
def test_forced_calls_always_parse(client: openai.OpenAI, choice: object, temperature: float) -> None:
    """The default model knows nothing of tools; its calls are whole unless they are cut."""
    messages = [{"role": "user", "content": "Feed the dog."}]
    options = {"temperature": temperature, "seed": 7, "max_tokens": 300, "tools": TOOLS, "tool_choice": choice, "n": 2}
    whole = client.chat.completions.create(model="llm", messages=messages, **options)
    streamed = joined_calls(client.chat.completions.create(model="llm", messages=messages, stream=True, **options))
    for found in whole.choices:
        assert found.message.content is None
        calls = [(call.function.name, call.function.arguments) for call in found.message.tool_calls]
        assert streamed[found.index] == (calls, found.finish_reason)
        assert calls
        for name, text in calls[: len(calls) - (found.finish_reason == "length")]:
            arguments = json.loads(text)
            if name == "feed":
                assert set(arguments) == {"animal", "count"}
                assert arguments["animal"] in ("cat", "dog", "fox")
                assert 1 <= arguments["count"] <= 9
            else:
                assert (name, type(arguments)) == ("go_home", dict)
        if choice != "required":
            assert (len(calls), calls[0][0], found.finish_reason) == (1, "feed", "stop")


def joined_calls(stream: openai.Stream[Any]) -> dict[int, tuple[list[tuple[str, str]], str | None]]:
    """Calls and finish reason of each choice."""
    names: dict[tuple[int, int], str] = {}
    arguments: dict[tuple[int, int], str] = {}
    reasons: dict[int, str | None] = {}
    for chunk in stream:
        (choice,) = chunk.choices
        reasons[choice.index] = choice.finish_reason
        for call in choice.delta.tool_calls or ():
            key = (choice.index, call.index)
            if key not in names:
                names[key], arguments[key] = call.function.name, ""
            arguments[key] += call.function.arguments
    return {
        index: ([(names[key], arguments[key]) for key in sorted(names) if key[0] == index], reason)
        for index, reason in reasons.items()
    }


def test_a_model_that_may_choose_must_be_told_of_the_tools(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="chat template tells the model of no tools"):
        client.chat.completions.create(model="llm", messages=[{"role": "user", "content": "Hi."}], tools=TOOLS)


def test_log_probabilities_and_scores_are_one_models(client: openai.OpenAI) -> None:
    """What it says of its own output is what it says of the same text as a prompt."""
    answer = client.completions.create(model="llm", prompt=PROMPT, max_tokens=6, temperature=0, logprobs=2)
    tokens = answer.choices[0].logprobs
    whole = PROMPT + answer.choices[0].text
    scored = client.completions.create(model="llm", prompt=whole, max_tokens=0, echo=True, logprobs=2)
    found = scored.choices[0].logprobs
    assert scored.choices[0].text == whole
    assert "".join(found.tokens[1:]) == whole  # the first is the beginning of the text
    assert found.token_logprobs[-6:] == pytest.approx(tokens.token_logprobs, abs=1e-3)


def test_a_response_is_the_chats_text_whole_and_as_a_stream(client: openai.OpenAI) -> None:
    options = {"model": "llm", "temperature": 0}
    chat = client.chat.completions.create(
        messages=[{"role": "user", "content": "Tell a story."}], max_tokens=32, **options
    )
    answer = client.responses.create(input="Tell a story.", max_output_tokens=32, **options)
    events = list(client.responses.create(input="Tell a story.", max_output_tokens=32, stream=True, **options))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert answer.output_text == "".join(deltas) == chat.choices[0].message.content
    assert (answer.status, events[-1].type) == ("incomplete", "response.incomplete")
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (chat.usage.prompt_tokens, 32)


def test_a_conversation_that_the_server_keeps_finds_its_blocks_cached(client: openai.OpenAI) -> None:
    options = {"model": "llm", "max_output_tokens": 40, "temperature": 0, "extra_body": {"ignore_eos": True}}
    first = client.responses.create(input="Tell a story of a fox and a dog. " * 4, **options)
    second = client.responses.create(input="And then?", previous_response_id=first.id, **options)
    assert second.usage.input_tokens > first.usage.total_tokens
    assert second.usage.input_tokens_details.cached_tokens >= first.usage.input_tokens // 16 * 16 > 0
    assert client.responses.retrieve(second.id).output_text == second.output_text


def test_the_example_of_responses(server: ServerProcess) -> None:
    example = Path(__file__).resolve().parents[2] / "client" / "examples" / "responses.py"
    finished = subprocess.run(
        [sys.executable, str(example), server.openai_url], capture_output=True, text=True, timeout=300, check=False
    )
    assert finished.returncode == 0, finished.stderr
    shown = dict(line.split(": ", 1) for line in finished.stdout.splitlines() if ": " in line)
    assert shown["story"] and shown["another"]
    assert shown["call"].startswith("Feed with {'animal': ")
    assert shown["object"].startswith("Feed(animal='")


def test_adapters_are_models(server: ServerProcess, client: openai.OpenAI) -> None:
    assert {"llm", "pirate", "bullets"} <= {model.id for model in client.models.list()}
    plain = client.completions.create(model="llm", prompt=PROMPT, max_tokens=24, temperature=0)
    pirate = client.completions.create(model="pirate", prompt=PROMPT, max_tokens=24, temperature=0)
    assert pirate.model == "pirate"
    assert pirate.choices[0].text != plain.choices[0].text
    url = f"{server.openai_url}/v1"
    order = {"lora_name": "mine", "lora_path": str(ADAPTERS / "pirate")}
    assert CLIENT.post(f"{url}/load_lora_adapter", json=order).text.startswith("Success")
    assert CLIENT.post(f"{url}/load_lora_adapter", json=order).status_code == 400
    mine = client.completions.create(model="mine", prompt=PROMPT, max_tokens=24, temperature=0)
    assert mine.choices[0].text == pirate.choices[0].text
    assert CLIENT.post(f"{url}/unload_lora_adapter", json={"lora_name": "mine"}).status_code == 200
    assert CLIENT.post(f"{url}/unload_lora_adapter", json={"lora_name": "mine"}).status_code == 404
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="mine", prompt=PROMPT)
    assert CLIENT.post(f"{url}/load_lora_adapter", json={**order, "lora_path": "/nowhere"}).status_code == 404


def test_embeddings_are_the_networks_hidden_states(server: ServerProcess, client: openai.OpenAI) -> None:
    one, same, other = client.embeddings.create(model="llm", input=[PROMPT, PROMPT, "The dog ran."]).data
    assert one.embedding == pytest.approx(same.embedding, abs=1e-5)
    assert sum(a * a for a in one.embedding) == pytest.approx(1)
    assert sum(a * b for a, b in zip(one.embedding, other.embedding, strict=True)) < 0.999


@contextlib.contextmanager
def watched(server: ServerProcess, client: openai.OpenAI) -> Iterator[Iterator[Any]]:
    """The page's events, from the first one on. It comes once the server has found the ranks, for which nothing waits:
    so something is asked until it is there."""
    seen = threading.Event()

    def keep_asking() -> None:
        while not seen.is_set():
            client.completions.create(model="llm", prompt=PROMPT, max_tokens=4, extra_body={"ignore_eos": True})

    with CLIENT.stream("GET", f"{server.openai_url}/events") as response:
        events = (json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: "))
        asking = threading.Thread(target=keep_asking)
        asking.start()
        try:
            next(events)
        finally:
            seen.set()
            asking.join()
        yield events


def test_events_tell_of_the_batch_as_long_as_somebody_watches(server: ServerProcess, client: openai.OpenAI) -> None:
    assert b"<title>inflight</title>" in CLIENT.get(f"{server.openai_url}/").content
    with watched(server, client) as events:
        client.completions.create(model="llm", prompt=PROMPT, max_tokens=40, extra_body={"ignore_eos": True})
        rows = itertools.chain.from_iterable(event["rows"] or () for event in events)
        done = next(row for row in rows if row["num_generated_tokens"] > 4 and row["state"] == "done")
    assert done["num_generated_tokens"] == 40


@pytest.mark.skipif(find_chromium() is None, reason="there is no Chromium: name one in INFLIGHT_CHROMIUM")
def test_the_page_shows_an_answer_and_the_batch_that_it_is_in(server: ServerProcess) -> None:
    program = find_chromium()
    assert program is not None
    with Browser(program) as browser:
        browser.show(f"{server.openai_url}/")
        browser.wait("document.querySelector('#link').textContent === 'live'")
        browser.run("document.querySelector('#empty button').click()")
        browser.wait("document.querySelector('#said').textContent.startsWith('Answer complete')")
        browser.wait("document.querySelector('#counts').value.startsWith('0 of ')")
        assert browser.run("document.querySelector('.answer p').textContent").strip()
        assert browser.run("document.querySelector('#device output').value").startswith("0 used")
        assert browser.problems == []


def test_a_client_that_leaves_frees_its_blocks(server: ServerProcess, client: openai.OpenAI) -> None:
    stream = client.completions.create(
        model="llm", prompt=PROMPT, max_tokens=2000, stream=True, extra_body={"ignore_eos": True}
    )
    next(stream)
    until(lambda: Metrics(server).of(REQUESTS, request_type="active") == 1, "it was active")
    stream.close()
    until(lambda: Metrics(server).is_at_rest, "its blocks were free")


def test_it_listens_on_loopback_alone(server: ServerProcess) -> None:
    assert listening_addresses(server.openai_pid) == {"127.0.0.1"}


ENDLESS = {"model": "llm", "prompt": PROMPT, "max_tokens": 300, "temperature": 0.0, "extra_body": {"ignore_eos": True}}


def test_streams_pause_when_ranks_die_and_go_on(server: ServerProcess, client: openai.OpenAI) -> None:
    whole = client.completions.create(**ENDLESS).choices[0].text
    with watched(server, client) as events:
        (rank,) = server.ranks
        stream = client.completions.create(**ENDLESS, stream=True, stream_options={"include_usage": True})
        first = next(stream)
        os.kill(rank, signal.SIGKILL)
        chunks = [first, *stream]
        with pytest.raises(httpx.RemoteProtocolError):  # whoever watches the ranks has to look for the new ones
            for _ in events:
                pass
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == whole
    assert chunks[-1].usage.completion_tokens == 300
    until(lambda: is_healthy(server), "it found the engine again")


def test_the_supervisor_starts_it_again(server: ServerProcess, client: openai.OpenAI) -> None:
    before, triton = server.openai_pid, server.tritonserver_pid
    os.kill(before, signal.SIGKILL)
    until(lambda: before not in server.pids and is_healthy(server), "it was started again")
    assert server.openai_pid != before
    assert client.completions.create(model="llm", prompt=PROMPT, max_tokens=4).choices[0].text
    assert server.tritonserver_pid == triton
    assert "the OpenAI server ended (killed by SIGKILL); starting it again" in server.told


def test_it_outlives_tritonserver_and_finds_the_next_engine(server: ServerProcess, client: openai.OpenAI) -> None:
    before, own = server.tritonserver_pid, server.openai_pid
    whole = client.completions.create(**ENDLESS).choices[0].text
    stream = client.completions.create(**ENDLESS, stream=True)
    first = next(stream)
    os.kill(before, signal.SIGKILL)
    assert "".join(chunk.choices[0].text for chunk in (first, *stream)) == whole, "its stream goes on"
    until(lambda: "serving again" in server.told, "the server was started again")
    assert server.tritonserver_pid != before
    assert server.openai_pid == own


def test_a_stream_in_flight_ends_before_the_server_does() -> None:
    with ServerProcess(openai={"port": 0}, drain_timeout=60.0, parameters={"num_threads": "1"}) as server:
        with openai.OpenAI(base_url=f"{server.openai_url}/v1", api_key="none") as client:
            options = {"stream": True, "stream_options": {"include_usage": True}, "extra_body": {"ignore_eos": True}}
            stream = client.completions.create(model="llm", prompt=PROMPT, max_tokens=100, **options)
            next(stream)
            pids = server.pids
            stopping = threading.Thread(target=server.stop)
            stopping.start()
            chunks = list(stream)
            stopping.join()
        assert chunks[-1].usage.completion_tokens == 100
        assert server.process is not None
        assert server.process.returncode == 0
        until(lambda: not [pid for pid in pids if os.path.exists(f"/proc/{pid}")], "no process is left")
