"""`inflight serve --openai-port` as a whole: real ranks, the supervisor, and what it does when something dies."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

import httpx
import openai
import pytest
from openai_server import CLIENT
from real_engine import listening_addresses
from server_metrics import REQUESTS, Metrics, until
from server_process import MODEL_REPOSITORY, ServerProcess, command_of

from inflight_client import Client

PROMPT = "Once upon a time"
ADAPTERS = MODEL_REPOSITORY / "llm" / "1" / "adapters"


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess(
        parameters={"max_seq_len": "1024", "num_threads": "1"},
        openai={"port": 0, "allow_lora_updates": True},
        drain_timeout=20.0,
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


def test_a_client_that_leaves_frees_its_blocks(server: ServerProcess, client: openai.OpenAI) -> None:
    stream = client.completions.create(
        model="llm", prompt=PROMPT, max_tokens=900, stream=True, extra_body={"ignore_eos": True}
    )
    next(stream)
    until(lambda: Metrics(server).of(REQUESTS, request_type="active") == 1, "it was active")
    stream.close()
    until(lambda: Metrics(server).is_at_rest, "its blocks were free")


def test_it_listens_on_loopback_alone(server: ServerProcess) -> None:
    assert listening_addresses(server.openai_pid) == {"127.0.0.1"}


def test_ranks_that_die_end_streams_with_an_error_and_are_found_again(
    server: ServerProcess, client: openai.OpenAI
) -> None:
    stream = client.completions.create(
        model="llm", prompt=PROMPT, max_tokens=900, stream=True, extra_body={"ignore_eos": True}
    )
    next(stream)
    os.kill(rank_pid(server), signal.SIGKILL)
    with pytest.raises(openai.APIError, match="ranks died"):
        for _ in stream:
            pass
    until(lambda: is_healthy(server), "it found the engine again")
    assert client.completions.create(model="llm", prompt=PROMPT, max_tokens=4).choices[0].text


def rank_pid(server: ServerProcess) -> int:
    return next(pid for pid in server.pids if b"inflight.worker" in command_of(pid))


def test_the_supervisor_starts_it_again(server: ServerProcess, client: openai.OpenAI) -> None:
    before, triton = server.openai_pid, server.tritonserver_pid
    os.kill(before, signal.SIGKILL)
    until(lambda: is_healthy(server) and server.openai_pid != before, "it was started again")
    assert client.completions.create(model="llm", prompt=PROMPT, max_tokens=4).choices[0].text
    assert server.tritonserver_pid == triton
    assert "the OpenAI server ended (killed by SIGKILL); starting it again" in server.told


def test_it_outlives_tritonserver_and_finds_the_next_engine(server: ServerProcess, client: openai.OpenAI) -> None:
    before, own = server.tritonserver_pid, server.openai_pid
    stream = client.completions.create(
        model="llm", prompt=PROMPT, max_tokens=900, stream=True, extra_body={"ignore_eos": True}
    )
    next(stream)
    os.kill(before, signal.SIGKILL)
    with pytest.raises(openai.APIError, match="ranks died"):
        for _ in stream:
            pass
    until(lambda: "serving again" in server.told, "the server was started again")
    assert server.tritonserver_pid != before
    assert server.openai_pid == own
    assert client.completions.create(model="llm", prompt=PROMPT, max_tokens=4).choices[0].text


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
        assert not [pid for pid in pids if os.path.exists(f"/proc/{pid}")]
