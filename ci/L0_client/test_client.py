"""The clients against a real tritonserver: streams, ends, errors, deadlines, cancels, many at once.

pytest ci/L0_client/test_client.py
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from server_process import ServerProcess
from waiting import until

from inflight.supervisor.admin import Admin
from inflight_client import (
    AsyncClient,
    Cancelled,
    Client,
    ConnectError,
    ConnectionLost,
    DeadlineExceeded,
    InvalidRequest,
    ModelNotFound,
    RequestRefused,
    ServerFailure,
)
from inflight_client._types import GenerationOptions

ENDLESS = 1_000_000


def count(n: int) -> str:
    return "".join(f"{i} " for i in range(n))


def num_cancelled(client: Client, prompt: str) -> int:
    """Requests with this prompt. Each test has its own: the server may see another test's cancels late."""
    return int(client.generate(f"cancelled {prompt}").text)


def wait_for_cancels(client: Client, prompt: str, wanted: int) -> None:
    """The server learns of a cancel when it next looks; waits until it has, or a generous deadline."""
    deadline = time.monotonic() + 120
    while num_cancelled(client, prompt) < wanted:
        assert time.monotonic() < deadline, "the server was never told to stop"


@pytest.mark.parametrize("attempt", range(2))
@pytest.mark.parametrize("prompt", ["count", "merge"])
def test_streamed_and_whole_answers_agree(client: Client, prompt: str, attempt: int) -> None:
    """Attempts differ in whether the final flag comes with the last tokens or after them."""
    whole = client.generate(prompt, max_tokens=10)
    stream = client.stream(prompt, max_tokens=10)
    chunks = list(stream)
    assert whole == stream.completion
    assert whole.text == count(10)
    assert whole.token_ids == tuple(range(10))
    assert (whole.num_input_tokens, whole.num_output_tokens, whole.finish_reason) == (5, 10, "length")
    assert len(chunks) == (10 if prompt == "count" else 4)
    assert [chunk.finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)


def test_the_model_sees_what_was_asked_for(client: Client) -> None:
    options: GenerationOptions = {
        "max_tokens": 3,
        "min_tokens": 1,
        "temperature": 0.5,
        "top_k": 4,
        "top_p": 0.25,
        "min_p": 0.125,
        "seed": 2**64 - 1,
        "repetition_penalty": 1.5,
        "presence_penalty": -0.5,
        "frequency_penalty": 2.0,
        "stop_words": ["ünd", "", "stop"],
        "bad_words": ["bad"],
        "end_id": -1,
        "pad_id": 0,
        "return_log_probs": True,
    }
    seen = json.loads(client.generate("echo", request_id="77", **options).text)
    assert seen["request_id"] == "77"
    assert seen["text_input"] == ["echo"]
    for name, value in options.items():
        assert seen[name] == (value if isinstance(value, list) else [value]), name


def test_token_ids_as_prompt(client: Client) -> None:
    assert client.generate([1, 2, 3], max_tokens=2).token_ids == (0, 1)


@pytest.mark.parametrize(
    ("prompt", "kind", "code", "words"),
    [
        ("refuse", RequestRefused, "UNAVAILABLE", "Exceeds maximum queue size"),
        ("invalid", InvalidRequest, "INVALID_ARGUMENT", "top_p must be"),
        ("broken", ServerFailure, "INTERNAL", "the forward pass failed"),
    ],
)
def test_errors_of_the_model(client: Client, prompt: str, kind: type[Exception], code: str, words: str) -> None:
    with pytest.raises(kind, match=words) as caught:
        list(client.stream(prompt, request_id="12"))
    assert (caught.value.code, caught.value.request_id) == (code, "12")  # type: ignore[attr-defined]


def test_hundreds_of_errors_at_once_leave_the_server_serving(client: Client, toy_server: ServerProcess) -> None:
    """tritonserver may die of errors that it is asked to tell as statuses of their streams."""
    before = toy_server.tritonserver_pid

    async def fail() -> None:
        async with AsyncClient(toy_server.grpc_url, timeout=180) as remote:

            async def fail_in_turn() -> None:
                for _ in range(250):
                    with pytest.raises(InvalidRequest, match="temperature must not be negative"):
                        await remote.generate("reject")

            await asyncio.gather(*(fail_in_turn() for _ in range(8)))

    asyncio.run(fail())
    assert toy_server.tritonserver_pid == before
    assert client.generate("count", max_tokens=3).text == count(3)


def test_an_error_after_the_first_token_comes_after_it(client: Client) -> None:
    stream = client.stream("invalid")
    assert next(stream).text == "0 "
    with pytest.raises(InvalidRequest):
        next(stream)


def test_no_server_and_no_model(url: str) -> None:
    with Client("127.0.0.1:1") as nowhere, pytest.raises(ConnectError, match="no server answers there"):
        nowhere.generate("count")
    with Client(url, model="nothing") as other, pytest.raises(ModelNotFound):
        other.generate("count")
    with Client("127.0.0.1:1") as nowhere:
        assert not nowhere.is_ready()
    with Client(url, model="nothing") as other:
        assert not other.is_ready()


def test_a_deadline_ends_the_answer_on_both_sides(client: Client) -> None:
    def is_cancelled() -> bool:
        with pytest.raises(DeadlineExceeded):
            client.generate("slow until its deadline", max_tokens=ENDLESS, timeout=0.2)
        return num_cancelled(client, "slow until its deadline") > 0

    until(is_cancelled, "a request has reached the server before its deadline, and been cancelled there")


def test_leaving_a_stream_cancels_it_and_no_other(client: Client) -> None:
    neighbour = client.stream("slow beside one that is left", max_tokens=20)
    with client.stream("slow and left", max_tokens=ENDLESS) as stream:
        next(stream)
    wait_for_cancels(client, "slow and left", 1)
    assert "".join(chunk.text for chunk in neighbour) == count(20)
    assert num_cancelled(client, "slow and left") == 1
    assert num_cancelled(client, "slow beside one that is left") == 0


def test_closing_a_stream_from_another_thread_wakes_its_reader(client: Client) -> None:
    stream = client.stream("slow", max_tokens=ENDLESS)
    next(stream)
    closer = threading.Thread(target=stream.close)
    closer.start()
    with pytest.raises((Cancelled, StopIteration)):
        while True:
            next(stream)
    closer.join()


def test_closing_the_client_ends_its_streams(url: str) -> None:
    client = Client(url)
    stream = client.stream("slow", max_tokens=ENDLESS)
    next(stream)
    client.close()
    with pytest.raises((Cancelled, ConnectionLost)):
        list(stream)


def test_64_streams_over_one_client(client: Client) -> None:
    def run(number: int) -> bool:
        stream = client.stream("count" if number % 2 else "merge", max_tokens=number + 1)
        return "".join(chunk.text for chunk in stream) == count(number + 1)

    with ThreadPoolExecutor(64) as threads:
        assert all(threads.map(run, [number % 64 for number in range(512)]))


def test_a_storm_of_cancels_leaves_the_server_serving(client: Client, toy_server: ServerProcess) -> None:
    """Of answers that do not end meanwhile: tritonserver may die of a cancel that coincides with the last response."""
    before = toy_server.tritonserver_pid

    def leave_early(number: int) -> None:
        with client.stream("slow in a storm", max_tokens=ENDLESS) as stream:
            for _ in range(number % 5):
                next(stream)

    with ThreadPoolExecutor(16) as threads:
        list(threads.map(leave_early, range(200)))
    assert toy_server.tritonserver_pid == before
    assert client.generate("count", max_tokens=3).text == count(3)


def test_streams_left_at_their_last_chunk_do_not_keep_the_model_loaded(toy_server: ServerProcess) -> None:
    """tritonserver dies of such a stream, or never lets the model go, if leaving it cancels it."""
    with ServerProcess(model_repository=toy_server.options["model_repository"], open_apis=True) as server:
        with Client(server.grpc_url, timeout=180) as leaving:
            for _ in range(60):
                with leaving.stream("count", max_tokens=3) as stream:
                    while next(stream).finish_reason is None:
                        pass
        admin = Admin(server.grpc_url, {}, timeout=180)
        assert admin.unload("llm") == ""
        until(lambda: admin.states()["llm"] == {"UNAVAILABLE"}, "the model is unloaded")


def test_the_configuration_of_the_model(client: Client) -> None:
    assert client.model_config()["parameters"]["gpt_model_path"]["string_value"] == "checkpoint"


def test_asyncio(url: str, client: Client) -> None:
    async def use() -> None:
        async with AsyncClient(url, timeout=180) as remote:
            await remote.wait_until_ready(180)
            whole = await remote.generate("merge", max_tokens=10)
            assert whole == client.generate("merge", max_tokens=10)
            answers = await asyncio.gather(*(remote.generate("count", max_tokens=n + 1) for n in range(64)))
            assert [answer.text for answer in answers] == [count(n + 1) for n in range(64)]
            with pytest.raises(RequestRefused):
                await remote.generate("refuse")
            with pytest.raises(DeadlineExceeded):
                await remote.generate("slow", max_tokens=ENDLESS, timeout=0.2)

    asyncio.run(use())


def test_cancelling_an_asyncio_task_cancels_its_request(url: str, client: Client) -> None:
    async def give_up() -> None:
        async with AsyncClient(url) as remote:
            stream = remote.stream("slow and given up", max_tokens=ENDLESS)
            await stream.__anext__()
            reader = asyncio.ensure_future(stream.__anext__())
            reader.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reader

    asyncio.run(give_up())
    wait_for_cancels(client, "slow and given up", 1)


def test_closing_an_asyncio_stream_wakes_its_reader(url: str) -> None:
    async def close_while_reading() -> None:
        async with AsyncClient(url) as remote:
            stream = remote.stream("stuck", max_tokens=ENDLESS)
            await stream.__anext__()  # the only token: none arrives as the stream is closed

            async def read_on() -> None:
                async for _ in stream:
                    pass

            reader = asyncio.ensure_future(read_on())
            await asyncio.sleep(0)  # lets the reader reach its wait
            await stream.close()
            with pytest.raises(Cancelled):
                await reader

    asyncio.run(close_while_reading())
