"""Streams that go on when their server ends, against a model that is a function and loses its connections.

pytest ci/unit/client/test_resume.py
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from inflight_client import (
    AsyncClient,
    AsyncMockTransport,
    Call,
    Cancelled,
    Chunk,
    Client,
    ClientError,
    ConnectError,
    ConnectionLost,
    DeadlineExceeded,
    InvalidRequest,
    MockTransport,
    Reply,
    RequestRefused,
    ServerFailure,
    Unavailable,
    _resume,
    text_reply,
)
from inflight_client._transport import strings

LETTERS = "abcdefgh"
LOST = ConnectionLost("Socket closed", code="UNAVAILABLE")
NO_SERVER = ConnectError("no server answers there", code="UNAVAILABLE")
FULL = RequestRefused("Exceeds maximum queue size", code="UNAVAILABLE")
IN_FLIGHT = InvalidRequest("a request with this id is in flight", code="ALREADY_EXISTS")
ENDING = Unavailable("the engine was shut down", code="UNAVAILABLE")
POISON = Unavailable("the engine's ranks died, 3 times in a row (journal_max_deaths)", code="UNAVAILABLE")


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_resume, "FIRST_PAUSE", 0.001)
    monkeypatch.setattr(_resume, "LONGEST_PAUSE", 0.001)


class Server:
    """Says LETTERS, one a reply, behind those that the call's resume token names. Dies as `deaths` says: (replies that
    it sends before, the error), one for each call."""

    def __init__(self, *deaths: tuple[int, ClientError]) -> None:
        self.deaths = list(deaths)
        self.calls: list[Call] = []

    def __call__(self, call: Call) -> Iterator[Reply]:
        self.calls.append(call)
        most, error = self.deaths.pop(0) if self.deaths else (len(LETTERS), None)
        had = call.inputs["resume_token"][0].decode() if "resume_token" in call.inputs else ""
        for number, letter in enumerate(LETTERS.removeprefix(had)):
            if number == most:
                break
            is_last = letter == LETTERS[-1]
            reply = text_reply(letter, token_ids=(ord(letter),), finish_reason="length" if is_last else "")
            yield replace(reply, outputs={**reply.outputs, "resume_token": strings((letter,))})
        if error is not None:
            raise error
        yield Reply(final=True)


def in_both_ways(*deaths: tuple[int, ClientError]) -> Iterator[tuple[list[Chunk], int]]:
    """Chunks and number of resumptions of a stream, synchronous and not."""
    with Client(transport=MockTransport(Server(*deaths))).stream("x", resume=True) as stream:
        yield list(stream), stream.num_resumes

    async def read() -> tuple[list[Chunk], int]:
        client = AsyncClient(transport=AsyncMockTransport(Server(*deaths)))
        async with client.stream("x", resume=True) as stream:
            return [chunk async for chunk in stream], stream.num_resumes

    yield asyncio.run(read())


@pytest.mark.parametrize("num_before", range(len(LETTERS)))
def test_each_piece_comes_once_wherever_the_connection_breaks(num_before: int) -> None:
    for chunks, num_resumes in in_both_ways((num_before, LOST), (1, LOST)):
        assert [chunk.text for chunk in chunks] == list(LETTERS)
        assert num_resumes == (2 if num_before < len(LETTERS) - 1 else 1)


def test_the_same_request_is_sent_again_with_what_has_come() -> None:
    server = Server((3, LOST))
    stream = Client(transport=MockTransport(server), resume=True).stream("x", temperature=0.5, request_id="17")
    assert "".join(chunk.text for chunk in stream) == LETTERS == stream.completion.text
    first, second = server.calls
    assert first.request_id == second.request_id == "17"
    assert "resume_token" not in first.inputs and second.inputs["resume_token"].tolist() == [b"abc"]
    assert {name: value.tolist() for name, value in second.inputs.items() if name != "resume_token"} == {
        name: value.tolist() for name, value in first.inputs.items()
    }
    assert first.inputs["return_resume_token"].tolist() == [True]


def test_without_being_asked_nothing_is_sent_again() -> None:
    transport = MockTransport(Server((3, LOST), (3, LOST)))
    with pytest.raises(ConnectionLost):
        list(Client(transport=transport).stream("x"))
    with pytest.raises(ConnectionLost):
        list(Client(transport=transport, resume=True).stream("x", resume=False))
    assert all("return_resume_token" not in call.inputs for call in transport.calls)


def test_a_whole_answer_goes_on_too() -> None:
    server = Server((3, LOST))
    assert Client(transport=MockTransport(server), resume=True).generate("x").text == LETTERS
    assert [call.inputs["stream"].tolist() for call in server.calls] == [[True], [True]]
    client = AsyncClient(transport=AsyncMockTransport(Server((3, LOST))), resume=True)
    assert asyncio.run(client.generate("x")).text == LETTERS


def test_a_whole_answer_with_its_prompt_is_not_streamed() -> None:
    server = Server((0, LOST))
    Client(transport=MockTransport(server), resume=True).generate("x", exclude_input_in_output=False)
    assert [call.inputs["stream"].tolist() for call in server.calls] == [[False], [False]]


def test_an_answer_is_whole_when_only_its_empty_end_is_missing() -> None:
    for chunks, num_resumes in in_both_ways((len(LETTERS), LOST)):
        assert ("".join(chunk.text for chunk in chunks), num_resumes) == (LETTERS, 0)


@pytest.mark.parametrize("last", [LOST, ENDING])
def test_refusals_of_a_server_that_is_back_are_waited_out(last: ClientError) -> None:
    deaths = [(2, last), *[(0, ENDING)] * 5, (0, NO_SERVER), (0, FULL), (0, FULL), (0, FULL), (0, FULL), (0, IN_FLIGHT)]
    for chunks, num_resumes in in_both_ways(*deaths):
        assert ("".join(chunk.text for chunk in chunks), num_resumes) == (LETTERS, 1)


@pytest.mark.parametrize("error", [NO_SERVER, FULL, IN_FLIGHT])
def test_a_request_that_has_not_begun_is_refused_as_ever(error: ClientError) -> None:
    server = Server((0, error))
    with pytest.raises(type(error)):
        list(Client(transport=MockTransport(server)).stream("x", resume=True))
    assert len(server.calls) == 1


@pytest.mark.parametrize("error", [POISON, ServerFailure("the step failed", code="INTERNAL")])
def test_what_the_server_says_of_the_request_itself_is_final(error: ClientError) -> None:
    server = Server((2, error))
    with pytest.raises(type(error), match=error.message.split(",")[0]):
        list(Client(transport=MockTransport(server)).stream("x", resume=True))
    assert len(server.calls) == 1


def test_what_it_says_of_the_request_after_a_resumption_is_final_too() -> None:
    server = Server((2, LOST), (0, POISON))
    with pytest.raises(Unavailable, match="journal_max_deaths"):
        list(Client(transport=MockTransport(server)).stream("x", resume=True))
    assert len(server.calls) == 2


def test_a_request_that_ends_every_server_is_given_up() -> None:
    server = Server((2, LOST), *[(0, LOST)] * 9)
    with pytest.raises(ConnectionLost):
        list(Client(transport=MockTransport(server)).stream("x", resume=True))
    assert len(server.calls) == 1 + _resume.MAX_VAIN_RESUMES


def test_a_server_that_does_not_come_back_in_time_is_an_error() -> None:
    transport = MockTransport(Server((2, LOST)))
    client = Client(transport=transport, resume=True, resume_timeout=0.05)
    stream = client.stream("x")
    transport.ready = False
    assert [next(stream).text, next(stream).text] == ["a", "b"]
    with pytest.raises(ConnectionLost, match=r"the server ended, and was not back within 0\.05 s"):
        next(stream)
    assert stream.completion.text == "ab"


def test_the_deadline_runs_on_while_the_server_is_away() -> None:
    transport = MockTransport(Server((2, LOST)))
    stream = Client(transport=transport).stream("x", resume=True, timeout=0.1)
    transport.ready = False
    with pytest.raises(DeadlineExceeded):
        list(stream)
    server = Server((2, LOST))
    list(Client(transport=MockTransport(server)).stream("x", resume=True, timeout=60))
    first, second = (call.timeout for call in server.calls)
    assert first is not None and second is not None and second < first <= 60


def test_closing_a_stream_wakes_a_reader_that_waits_for_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    waits = threading.Event()

    class Away(MockTransport):
        def model_ready(self, model: str, timeout: float) -> bool:
            waits.set()
            return False

    monkeypatch.setattr(_resume, "LONGEST_PAUSE", 60.0)
    stream = Client(transport=Away(Server((2, LOST)))).stream("x", resume=True)
    errors: list[BaseException] = []

    def read() -> None:
        try:
            list(stream)
        except ClientError as error:
            errors.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    assert waits.wait(60)
    stream.close()
    reader.join(60)
    assert [type(error) for error in errors] == [Cancelled]


async def test_an_asyncio_task_is_cancelled_while_it_waits_for_the_server() -> None:
    waits = asyncio.Event()

    class Away(AsyncMockTransport):
        async def model_ready(self, model: str, timeout: float) -> bool:
            waits.set()
            return False

    stream = AsyncClient(transport=Away(Server((2, LOST), (2, LOST)))).stream("x", resume=True)

    async def read() -> list[Chunk]:
        return [chunk async for chunk in stream]

    task = asyncio.create_task(read())
    await waits.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    waits.clear()
    stream = AsyncClient(transport=Away(Server((2, LOST)))).stream("x", resume=True)
    task = asyncio.create_task(read())
    await waits.wait()
    await stream.close()
    with pytest.raises(Cancelled):
        await task


def test_beams_begin_anew_and_repeat_nothing() -> None:
    texts = ["a", "ab", "abc", "abcd"]
    lost = [LOST, LOST]

    def search(call: Call) -> Iterator[Reply]:
        assert "resume_token" not in call.inputs
        for text in texts:
            is_last = text == texts[-1]
            yield text_reply(text, token_ids=list(text.encode()), finish_reason="length" if is_last else "")
            if text == "ab" and lost:
                raise lost.pop()
        yield Reply(final=True)

    with Client(transport=MockTransport(search)).stream("x", resume=True, beam_width=2) as stream:
        assert [chunk.text for chunk in stream] == texts
    assert stream.num_resumes == 2 and stream.completion.text == "abcd"


def test_every_sequence_is_waited_for() -> None:
    def two(call: Call) -> Iterator[Reply]:
        assert np.array_equal(call.inputs["num_return_sequences"], [2])
        if "resume_token" not in call.inputs:
            reply = text_reply("a", finish_reason="stop", sequence_index=0)
            yield replace(reply, outputs={**reply.outputs, "resume_token": strings(("t",))})
            raise LOST
        yield text_reply("b", finish_reason="stop", sequence_index=1, final=True)

    completion = Client(transport=MockTransport(two), resume=True).generate("x", num_return_sequences=2)
    assert [sequence.text for sequence in completion.sequences] == ["a", "b"]


async def test_closing_the_client_ends_a_wait_for_the_server() -> None:
    """gRPC has no status for a channel that was closed."""
    here, there = Client("localhost:1"), AsyncClient("localhost:1")
    assert not here.is_ready() and not await there.is_ready()
    here.close()
    await there.close()
    with pytest.raises(Cancelled, match="the client was closed"):
        here.is_ready()
    with pytest.raises(Cancelled, match="the client was closed"):
        await there.is_ready()
