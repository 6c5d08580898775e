"""HTTP/1.1 as the server speaks it, held against h11, which is another implementation, and against what attackers send.

pytest ci/unit/http/test_http_server.py
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
from collections.abc import AsyncIterator
from typing import Any

import h11
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.types import Receive, Scope, Send

from inflight.http.chunks import chunk_writer
from inflight.http.connection import MAX_FIELDS, MAX_HEAD_BYTES
from inflight.http.http_server import HttpServer

ENOUGH = 30.0
LAST = b"GET /last HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"


class Echo:
    """An application that tells what it was asked."""

    def __init__(self) -> None:
        self.paths: list[str] = []
        self.num_gone = 0
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.paths.append(scope["path"])
        if scope["path"] == "/unread":
            await self.answer(send, b"", 413)
            return
        if scope["path"] == "/held":
            await self.may_answer.wait()
        body = bytearray()
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                self.num_gone += 1
                return
            body += message["body"]
            if not message["more_body"]:
                break
        if scope["path"] == "/stream":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            write = chunk_writer(scope)
            for piece in (b"one", b"", b"two"):
                write(piece)
            await send({"type": "http.response.body", "body": b"three"})
        elif scope["path"] == "/split":
            await send({"type": "http.response.start", "status": 200, "headers": [(b"x", b"a\r\nset-cookie: b")]})
        elif scope["path"] == "/until-gone":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            while (await receive())["type"] != "http.disconnect":
                pass
            self.num_gone += 1
            await send({"type": "http.response.body", "body": b"nobody reads this"})
        else:
            names = [name.decode() for name, _ in scope["headers"]]
            told = {"method": scope["method"], "path": scope["path"], "names": names, "body": body.decode("latin-1")}
            await self.answer(send, json.dumps(told).encode())

    async def answer(self, send: Send, body: bytes, status: int = 200) -> None:
        headers = [(b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})


class Served:
    """A server of `Echo`, and clients of it."""

    def __init__(self, echo: Echo, server: HttpServer, port: int) -> None:
        self.echo, self.server, self.port = echo, server, port

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.port)

    async def exchange(self, *pieces: bytes) -> bytes:
        """All that comes until the server closes the connection."""
        reader, writer = await self.connect()
        received = b""
        with contextlib.suppress(ConnectionError):  # where it is closed while bytes still come
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0)
            received = await asyncio.wait_for(reader.read(), ENOUGH)
        writer.close()
        return received

    async def drain(self, seconds: float = 0.2, hurry: asyncio.Event | None = None) -> None:
        await self.server.drain(seconds, hurry or asyncio.Event())


@contextlib.asynccontextmanager
async def serving(most: int = 100, most_of_address: int = 100) -> AsyncIterator[Served]:
    echo = Echo()
    server = HttpServer(echo, max_connections=most, max_connections_per_address=most_of_address)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        await server.listen(listener)
        yield Served(echo, server, listener.getsockname()[1])
        await server.drain(0.2, asyncio.Event())


def statuses(answer: bytes) -> list[int]:
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d+) ", answer)]


TEXT = st.binary(max_size=300)
REQUEST = st.tuples(st.sampled_from(["POST", "PUT"]), TEXT, st.booleans(), st.lists(st.text("abz-", min_size=1)))


@settings(deadline=None, max_examples=60)
@given(requests=st.lists(REQUEST, min_size=1, max_size=4), size=st.integers(1, 400))
def test_any_requests_in_any_pieces_are_what_h11_wrote_and_h11_reads_the_answers(
    requests: list[tuple[str, bytes, bool, list[str]]], size: int
) -> None:
    async def ask() -> None:
        async with serving() as served:
            reader, writer = await served.connect()
            client = h11.Connection(h11.CLIENT)
            for number, (method, body, is_chunked, names) in enumerate(requests):
                framing = ("transfer-encoding", "chunked") if is_chunked else ("content-length", str(len(body)))
                headers = [("host", "x"), framing, *((f"x-{name}", name) for name in names)]
                sent = client.send(h11.Request(method=method, target=f"/{number}", headers=headers)) or b""
                sent += client.send(h11.Data(data=body)) or b""
                sent += client.send(h11.EndOfMessage()) or b""
                for start in range(0, len(sent), size):
                    writer.write(sent[start : start + size])
                    await asyncio.sleep(0)
                told = b""
                while not isinstance(event := client.next_event(), h11.EndOfMessage):
                    if event is h11.NEED_DATA:
                        client.receive_data(await asyncio.wait_for(reader.read(65536), ENOUGH))
                    elif isinstance(event, h11.Data):
                        told += event.data
                client.start_next_cycle()
                answer = json.loads(told)
                assert (answer["method"], answer["path"]) == (method, f"/{number}")
                assert answer["body"].encode("latin-1") == body
                assert answer["names"] == [name for name, _ in headers]
            writer.close()

    asyncio.run(ask())


POST = b"POST /first HTTP/1.1\r\nhost: x\r\n"
CHUNKED = POST + b"transfer-encoding: chunked\r\n\r\n"
HIDDEN = b"GET /hidden HTTP/1.1\r\nhost: x\r\n\r\n"


@pytest.mark.parametrize(
    "sent",
    [
        POST + b"content-length: 6\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\nG",
        POST + b"transfer-encoding: chunked\r\ncontent-length: 6\r\n\r\n0\r\n\r\nG",
        POST + b"transfer-encoding: xchunked\r\n\r\n0\r\n\r\n",
        POST + b"transfer-encoding: chunked, identity\r\n\r\n0\r\n\r\n",
        POST + b"transfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        POST + b"transfer-encoding : chunked\r\n\r\n0\r\n\r\n",
        POST + b"transfer-encoding:\r\n chunked\r\n\r\n0\r\n\r\n",
        b"POST /first HTTP/1.0\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        POST + b"content-length: 0\r\ncontent-length: 5\r\n\r\n",
        POST + b"content-length: 0, 5\r\n\r\n",
        POST + b"content-length: +5\r\n\r\n",
        POST + b"content-length: -5\r\n\r\n",
        POST + b"content-length: 0x5\r\n\r\n",
        POST + b"content-length: 99999999999999999999999\r\n\r\n",
        POST + b"content-length:\r\n\r\n",
        CHUNKED + b"zz\r\n",
        CHUNKED + b"-1\r\n",
        CHUNKED + b"0x1\r\na\r\n0\r\n\r\n",
        CHUNKED + b"1 \r\na\r\n0\r\n\r\n",
        CHUNKED + b"1\na\r\n0\r\n\r\n",
        CHUNKED + b"1;a=b\nxx\r\na\r\n0\r\n\r\n",
        CHUNKED + b"1\r\nab0\r\n\r\n",
        CHUNKED + b"fffffffffffffffff\r\n",
        CHUNKED + b"0\r\nx y: z\r\n\r\n",
        POST + b"x: a\x00b\r\n\r\n",
        POST + b"x\x00: ab\r\n\r\n",
        POST + b"x: a\rb\r\n\r\n",
        POST + b"x: a\n\r\n",
        POST + b"x: a\r\n b\r\n\r\n",
        POST + b": a\r\n\r\n",
        b"POST /first HTTP/1.1\nhost: x\n\n",
        b"POST /a b HTTP/1.1\r\n\r\n",
        b"POST /\xc3\xa9 HTTP/1.1\r\n\r\n",
        b"POST http://x HTTP/1.1\r\n\r\n",
        b"POST /first HTTP/0.9\r\n\r\n",
        b"POST /first HTTP/1.2\r\n\r\n",
        b"POST /first HTTP/2.0\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"CONNECT x:443 HTTP/1.1\r\nhost: x\r\n\r\n",
        b"MAKE /first HTTP/1.1\r\n\r\n",
        b"\x00\x00",
    ],
)
@pytest.mark.parametrize("size", [1, 100_000], ids=["byte by byte", "at once"])
async def test_what_could_hide_a_request_ends_the_connection(sent: bytes, size: int) -> None:
    """Requests before it are answered, and what stands behind it is never read as one."""
    sent = HIDDEN.replace(b"hidden", b"before") + sent + HIDDEN
    async with serving() as served:
        answer = await served.exchange(*(sent[start : start + size] for start in range(0, len(sent), size)))
        assert statuses(answer) == [200, 400]
        assert answer.endswith(b"Invalid HTTP request received.")
        assert set(served.echo.paths) <= {"/before", "/first"}
        assert statuses(await served.exchange(LAST)) == [200]


async def test_a_body_that_breaks_off_ends_whoever_waits_for_it() -> None:
    async with serving() as served:
        assert statuses(await served.exchange(CHUNKED + b"1\r\na\r\n", b"zz\r\n")) == [400]
        assert served.echo.num_gone == 1


async def test_an_answer_in_progress_is_not_mixed_with_a_refusal() -> None:
    async with serving() as served:
        served.echo.may_answer.clear()
        reader, writer = await served.connect()
        writer.write(b"GET /held HTTP/1.1\r\nhost: x\r\n\r\n" + HIDDEN.replace(b"hidden", b"next") + b"\x00\x00")
        while served.echo.paths != ["/held"]:
            await asyncio.sleep(0)
        served.echo.may_answer.set()
        assert statuses(await asyncio.wait_for(reader.read(), ENOUGH)) == [200, 200, 400]
        writer.close()


async def test_trailers_are_no_headers_and_have_an_end() -> None:
    async with serving() as served:
        answer = await served.exchange(CHUNKED + b"1\r\na\r\n0\r\nauthorization: Bearer x\r\n\r\n" + LAST)
        first, last = map(json.loads, re.findall(rb"{.*?}", answer))
        assert first["names"] == ["host", "transfer-encoding"]
        assert first["body"] == "a"
        assert last["names"] == ["host", "connection"]
        flood = (b"x-%d: y\r\n" % number for number in range(MAX_FIELDS + 2))
        assert statuses(await served.exchange(CHUNKED + b"0\r\n", *flood)) == [431]
        long = [b"x: "] + [b"y" * 1000] * (MAX_HEAD_BYTES // 1000 + 1)
        assert statuses(await served.exchange(CHUNKED + b"0\r\n", *long)) == [431]
        extension = [b"1;x="] + [b"y" * 1000] * (MAX_HEAD_BYTES // 1000 + 1)
        assert statuses(await served.exchange(CHUNKED, *extension)) == [431]


@pytest.mark.parametrize("size", [1000, 10_000_000], ids=["in pieces", "at once"])
async def test_a_flood_of_headers_is_refused(size: int) -> None:
    many = POST + b"".join(b"a%d:\r\n" % number for number in range(MAX_FIELDS)) + b"\r\n"
    long = POST + b"a: " + b"y" * MAX_HEAD_BYTES + b"\r\n\r\n"
    path = b"GET /" + b"y" * MAX_HEAD_BYTES + b" HTTP/1.1\r\nhost: x\r\n\r\n"
    async with serving() as served:
        for sent in (many, long, path):
            pieces = (sent[start : start + size] for start in range(0, len(sent), size))
            assert statuses(await served.exchange(*pieces)) == [431]
        assert not served.echo.paths


async def test_a_client_of_http_1_0_gets_no_chunks() -> None:
    async with serving() as served:
        answer = await served.exchange(b"GET /stream HTTP/1.0\r\nconnection: keep-alive\r\n\r\n" + HIDDEN)
        head, _, body = answer.partition(b"\r\n\r\n")
        assert body == b"onetwothree"
        assert b"connection: close" in head
        assert b"transfer-encoding" not in head
        assert served.echo.paths == ["/stream"]
        chunked = await served.exchange(LAST.replace(b"/last", b"/stream"))
        assert chunked.endswith(b"\r\n\r\n3\r\none\r\n3\r\ntwo\r\n5\r\nthree\r\n0\r\n\r\n")


async def test_a_body_is_asked_for_once_somebody_wants_it() -> None:
    expecting = b"content-length: 2\r\nexpect: 100-continue\r\n\r\n"
    async with serving() as served:
        reader, writer = await served.connect()
        writer.write(POST + expecting)
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(b"ab" + LAST)
        assert statuses(answer := await asyncio.wait_for(reader.read(), ENOUGH)) == [200, 200]
        assert b'"body": "ab"' in answer
        writer.close()
        unread = await served.exchange(POST.replace(b"first", b"unread") + expecting + b"ab" + LAST)
        assert statuses(unread) == [413, 200]
        old = await served.exchange(POST.replace(b"/1.1", b"/1.0") + expecting + b"ab")
        assert statuses(old) == [200]


async def test_an_answer_to_head_has_the_length_and_no_body() -> None:
    async with serving() as served:
        answer = await served.exchange(LAST.replace(b"GET", b"HEAD"))
        length = re.search(rb"content-length: (\d+)", answer)
        assert length is not None
        assert int(length[1]) > 0
        assert answer.endswith(b"\r\n\r\n")
        assert re.search(rb"\r\ndate: \w{3}, \d\d \w{3} \d{4} \d\d:\d\d:\d\d GMT\r\n", answer)


async def test_no_header_of_an_answer_ends_it() -> None:
    async with serving() as served:
        answer = await served.exchange(LAST.replace(b"/last", b"/split"))
    assert statuses(answer) == [500]
    assert b"set-cookie" not in answer


@pytest.mark.parametrize("how", ["half", "whole", "reset"])
async def test_a_client_that_closes_its_connection_is_gone(how: str) -> None:
    """Also one that closes its half: a whole close looks the same until something is sent."""
    async with serving() as served:
        _, writer = await served.connect()
        writer.write(LAST.replace(b"/last", b"/until-gone"))
        while not served.echo.paths:
            await asyncio.sleep(0.001)
        if how == "half":
            writer.write_eof()
        elif how == "reset":
            writer.transport.abort()
        else:
            writer.close()
        while not served.echo.num_gone:
            await asyncio.sleep(0.001)
        assert statuses(await served.exchange(LAST)) == [200]
        writer.close()


async def test_a_body_that_nobody_reads_is_not_taken_from_the_socket() -> None:
    async with serving() as served:
        served.echo.may_answer.clear()
        reader, writer = await served.connect()
        length = 20_000_000
        writer.write(b"POST /held HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % length)
        writer.write(b"x" * length)
        while not served.echo.paths:
            await asyncio.sleep(0.001)
        unsent = -1
        while unsent != (unsent := writer.transport.get_write_buffer_size()):
            await asyncio.sleep(0.05)
        assert unsent > length // 2
        served.echo.may_answer.set()
        assert (await asyncio.wait_for(reader.readline(), ENOUGH)) == b"HTTP/1.1 200 OK\r\n"
        writer.close()


async def test_a_thousand_silent_connections_leave_places_for_others() -> None:
    async with serving(most=50) as served:
        silent = [await served.connect() for _ in range(300)]
        assert statuses(await served.exchange(LAST)) == [200]
        for _, writer in silent:
            writer.close()


async def test_the_end_waits_for_answers_and_for_nobody_else() -> None:
    async with serving() as served:
        served.echo.may_answer.clear()
        idle, _ = await served.connect()
        reader, writer = await served.connect()
        writer.write(b"GET /held HTTP/1.1\r\nhost: x\r\n\r\n" + HIDDEN.replace(b"hidden", b"next"))
        while not served.echo.paths:
            await asyncio.sleep(0.001)
        draining = asyncio.create_task(served.drain(ENOUGH))
        assert await asyncio.wait_for(idle.read(), ENOUGH) == b""
        with pytest.raises(ConnectionError):
            await served.connect()
        assert not draining.done()
        served.echo.may_answer.set()
        answer = await asyncio.wait_for(reader.read(), ENOUGH)
        await asyncio.wait_for(draining, ENOUGH)
    assert statuses(answer) == [200, 200]
    assert answer.count(b"connection: close") == 1


async def test_an_end_in_a_hurry_cancels() -> None:
    async with serving() as served:
        served.echo.may_answer.clear()
        reader, writer = await served.connect()
        writer.write(LAST.replace(b"/last", b"/held"))
        while not served.echo.paths:
            await asyncio.sleep(0.001)
        hurry = asyncio.Event()
        draining: asyncio.Task[Any] = asyncio.create_task(served.drain(1000.0, hurry))
        hurry.set()
        await asyncio.wait_for(draining, ENOUGH)
        assert await asyncio.wait_for(reader.read(), ENOUGH) == b""
