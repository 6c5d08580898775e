"""Connections: heads, offers of other protocols, how many there may be and for how long."""

from __future__ import annotations

import contextlib
import json
import re
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from openai_server import (
    CHAT,
    CHATS,
    CLIENT,
    PlayedEngine,
    Running,
    checkpoint_folder,
    numbered,
    openai_server,
    result,
    say,
    wait_until,
)

from inflight.errors import ConfigurationError
from inflight.http.connection import MAX_PIPELINED
from inflight.http.connections import address_of
from inflight.http.engine_front import allow_connections
from inflight.http.serve import SEND_BUFFER_BYTES, UNREAD_MS, listen

ENOUGH = 30


def test_endless_heads_are_refused(running: Running) -> None:
    host, port = running.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), ENOUGH) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nx: ")
        answer = b""
        try:
            for _ in range(100):
                connection.sendall(b"y" * 10_000)
            answer = connection.recv(1000)
        except ConnectionError:
            answer = answer or b"HTTP/1.1 431 and closed"
    assert answer.startswith(b"HTTP/1.1 431")


OFFER = b"connection: Upgrade, HTTP2-Settings\r\nhttp2-settings: AAEAAEAAAAIAAAAB\r\nupgrade: h2c\r\n"


HEALTH = b"GET /health HTTP/1.1\r\nhost: x\r\n"


@pytest.mark.parametrize("size", [1, 7, 100_000], ids=["byte by byte", "in pieces", "at once"])
def test_a_request_that_offers_http_2_is_answered_with_its_body(running: Running, size: int) -> None:
    """As Java's client sends its first one. Another one may follow on the connection, whatever it offers."""
    body = json.dumps(CHAT).encode()
    head = b"POST %b HTTP/1.1\r\nhost: x\r\n%b" % (CHATS.encode(), OFFER)
    whole = head + b"content-length: %d\r\n\r\n%b" % (len(body), body)
    chunked = head + b"transfer-encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    websocket = HEALTH + b"connection: close, upgrade\r\nupgrade: websocket\r\n\r\n"
    sent = whole + HEALTH + OFFER + b"\r\n" + chunked + websocket
    answer = exchange(running, *(sent[start : start + size] for start in range(0, len(sent), size)))
    statuses = re.findall(rb"HTTP/1.1 (\d+) ", answer)
    assert statuses == [b"200"] * 4
    assert answer.count(b'"content":"Hello, world"') == 2


@pytest.mark.parametrize(
    "head",
    [
        b"CONNECT x:443 HTTP/1.1\r\nhost: x\r\n\r\n",
        b"CONNECT x:443 HTTP/1.1\r\nhost: x\r\n" + OFFER + b"\r\n",
        HEALTH + OFFER + b"content-length: 1\r\ncontent-length: 2\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01",
    ],
)
def test_what_is_no_request_is_refused(running: Running, head: bytes) -> None:
    assert exchange(running, head).startswith(b"HTTP/1.1 400 ")
    assert running.get("/health").status_code == 200


def exchange(running: Running, *sent: bytes) -> bytes:
    """All that comes until the server closes the connection."""
    host, port = running.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), ENOUGH) as connection:
        for piece in sent:
            connection.sendall(piece)
        received = []
        while piece := connection.recv(65536):
            received.append(piece)
    return b"".join(received)


@pytest.fixture
def narrow(tmp_path: Path) -> Iterator[tuple[PlayedEngine, Callable[[], socket.socket]]]:
    """A server of three connections, whose model never ends its answers, and what opens a connection to it."""
    engine = PlayedEngine(say(ends=False))
    with openai_server(engine, checkpoint_folder(tmp_path), max_connections=3) as url, contextlib.ExitStack() as stack:
        CLIENT.get(f"{url}/health", headers={"connection": "close"})
        host, port = url.removeprefix("http://").split(":")
        yield engine, lambda: stack.enter_context(socket.create_connection((host, int(port)), ENOUGH))


def test_a_connection_too_many_takes_the_place_of_the_one_idle_longest(
    narrow: tuple[PlayedEngine, Callable[[], socket.socket]],
) -> None:
    """Whether that has sent nothing, the beginning of a head, or whole requests."""
    _, connect = narrow
    silent, begun, used = connect(), connect(), connect()
    begun.sendall(HEALTH)
    for make in (lambda: used, connect, connect, connect):
        connection = make()
        connection.sendall(HEALTH + b"\r\n")
        assert connection.recv(1000).startswith(b"HTTP/1.1 200")
    for connection in (silent, begun, used):
        with contextlib.suppress(ConnectionResetError):  # where bytes came that nobody has read
            assert connection.recv(1000) == b""


def test_connections_in_use_are_kept_and_others_are_told(
    narrow: tuple[PlayedEngine, Callable[[], socket.socket]],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("inflight.http.connection.REFUSED_SECONDS", 60.0)
    engine, connect = narrow
    body = json.dumps({**CHAT, "stream": True}).encode()
    head = b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % (CHATS.encode(), len(body))
    streams = [connect() for _ in range(3)]
    for stream in streams:
        stream.sendall(head + body)
        assert stream.recv(1000).startswith(b"HTTP/1.1 200")
    late = connect()
    late.sendall(HEALTH + b"\r\n")
    assert late.recv(1000).startswith(b"HTTP/1.1 503")
    assert late.recv(1000) == b""
    assert "3 connections are in use" in caplog.text
    engine.push(*(result(request, [72]) for request in engine.requests))
    for stream in streams:
        while b'"content":"H"' not in stream.recv(4000):
            pass
    streams[0].close()
    while not connect_and_ask(connect):
        pass


def test_one_address_does_not_take_all_connections(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Of those that it has in use none is ended, and another gets the place of one that is idle."""
    engine = PlayedEngine(say(ends=False))
    options = {"max_connections": 10, "max_connections_per_address": 2}
    with openai_server(engine, checkpoint_folder(tmp_path), **options) as url, contextlib.ExitStack() as stack:
        CLIENT.get(f"{url}/health", headers={"connection": "close"})
        host, port = url.removeprefix("http://").split(":")

        def connect(own: str = "127.0.0.1") -> socket.socket:
            return stack.enter_context(socket.create_connection((host, int(port)), ENOUGH, source_address=(own, 0)))

        body = json.dumps({**CHAT, "stream": True}).encode()
        head = b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % (CHATS.encode(), len(body))
        stream, idle = connect(), connect()
        stream.sendall(head + body)
        assert stream.recv(1000).startswith(b"HTTP/1.1 200")
        idle.sendall(HEALTH + b"\r\n")
        assert idle.recv(1000).startswith(b"HTTP/1.1 200")
        another = connect()
        another.sendall(head + body)
        assert another.recv(1000).startswith(b"HTTP/1.1 200")
        assert idle.recv(1000) == b""
        late = connect()
        late.sendall(HEALTH + b"\r\n")
        assert late.recv(1000).startswith(b"HTTP/1.1 503")
        assert "2 connections of 127.0.0.1 are in use, max_connections_per_address: another is refused" in caplog.text
        assert connect_and_ask(lambda: connect("127.0.0.2"))
        another.close()
        while not connect_and_ask(connect):
            pass
        engine.push(*(result(request, [72]) for request in engine.requests[:1]))
        while b'"content":"H"' not in stream.recv(4000):
            pass


def test_a_place_of_ones_own_costs_no_neighbour_one(tmp_path: Path) -> None:
    """Where an address has all that it may have, and all connections are taken."""
    options = {"max_connections": 3, "max_connections_per_address": 2}
    engine = PlayedEngine(say())
    with openai_server(engine, checkpoint_folder(tmp_path), **options) as url, contextlib.ExitStack() as stack:
        CLIENT.get(f"{url}/health", headers={"connection": "close"})
        host, port = url.removeprefix("http://").split(":")
        used = []
        for own in ("127.0.0.2", "127.0.0.1", "127.0.0.1", "127.0.0.1"):
            connection = socket.create_connection((host, int(port)), ENOUGH, source_address=(own, 0))
            used.append(stack.enter_context(connection))
            connection.sendall(HEALTH + b"\r\n")
            assert connection.recv(1000).startswith(b"HTTP/1.1 200")
        neighbour, idle, *_ = used
        assert idle.recv(1000) == b""
        neighbour.sendall(HEALTH + b"\r\n")
        assert neighbour.recv(1000).startswith(b"HTTP/1.1 200")


def test_neighbours_in_ipv6_are_one_address() -> None:
    of = [address_of((host, 1, 0, 0)) for host in ("2001:db8::1", "2001:db8::2:1", "2001:db8:0:1::1", "fe80::1%eth0")]
    assert of == ["2001:db8::/64", "2001:db8::/64", "2001:db8:0:1::/64", "fe80::/64"]
    assert [address_of(peer) for peer in (("10.0.0.1", 1), ("::ffff:10.0.0.1", 1, 0, 0), "")] == ["10.0.0.1"] * 2 + [""]


def connect_and_ask(connect: Callable[[], socket.socket]) -> bool:
    """Whether a new connection is served."""
    connection = connect()
    connection.sendall(HEALTH + b"connection: close\r\n\r\n")
    return connection.recv(1000).startswith(b"HTTP/1.1 200")


def test_a_process_that_may_not_open_so_many_files_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = [(1024, 4096)]
    monkeypatch.setattr("inflight.http.engine_front.resource.getrlimit", lambda which: limits[-1])
    monkeypatch.setattr("inflight.http.engine_front.resource.setrlimit", lambda which, new: limits.append(new))
    allow_connections(500)
    assert limits == [(1024, 4096)]
    allow_connections(2048)
    assert limits[-1] == (2304, 4096)
    with pytest.raises(ConfigurationError, match=r"max_connections 4096 .* needs 4352 files, .* 4096: raise its limit"):
        allow_connections(4096)


def test_a_client_that_does_not_read_holds_little_and_not_for_ever() -> None:
    with listen("127.0.0.1", 0) as listener:
        listener.listen()
        with socket.create_connection(listener.getsockname()), listener.accept()[0] as accepted:
            assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) <= 2 * SEND_BUFFER_BYTES
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == UNREAD_MS


def test_more_pipelined_requests_than_may_wait_are_refused(running: Running) -> None:
    whole = HEALTH + b"\r\n"
    last = HEALTH + b"connection: close\r\n\r\n"
    assert exchange(running, whole * MAX_PIPELINED + last).count(b"HTTP/1.1 200") == MAX_PIPELINED + 1
    assert b"HTTP/1.1 400" in exchange(running, whole * (MAX_PIPELINED + 2))
    assert running.get("/health").status_code == 200


BEGUN = b"GET /health HTTP/1.1\r\nhost: x\r\n"


REFUSED = b"POST /health HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{"


@pytest.fixture
def hasty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], socket.socket]]:
    """What opens a connection to a server that waits long between requests, and a moment for a head that has begun."""
    monkeypatch.setattr("inflight.http.connection.KEEP_ALIVE_SECONDS", 1000)
    monkeypatch.setattr("inflight.http.connection.HEAD_SECONDS", 0.2)
    with openai_server(PlayedEngine(), checkpoint_folder(tmp_path)) as url, contextlib.ExitStack() as stack:
        host, port = url.removeprefix("http://").split(":")
        yield lambda: stack.enter_context(socket.create_connection((host, int(port)), ENOUGH))


def read_to_end(connection: socket.socket) -> None:
    with contextlib.suppress(ConnectionResetError, BrokenPipeError):  # where nobody has read what was sent
        while connection.recv(1000):
            continue


@pytest.mark.parametrize("sent", [b"", BEGUN, BEGUN + b"\r\n" + BEGUN, REFUSED])
def test_connections_without_a_whole_request_are_closed(hasty: Callable[[], socket.socket], sent: bytes) -> None:
    """Also behind an answer, and while a body comes that was refused already."""
    connection = hasty()
    connection.sendall(sent)
    read_to_end(connection)


def test_a_head_that_trickles_is_not_waited_for_longer(hasty: Callable[[], socket.socket]) -> None:
    connection = hasty()
    connection.sendall(BEGUN + b"x: ")
    connection.settimeout(0.05)
    with contextlib.suppress(ConnectionError):
        while True:
            connection.sendall(b"y")
            with contextlib.suppress(TimeoutError):
                if not connection.recv(1):
                    break


def test_the_next_head_may_begin_later(hasty: Callable[[], socket.socket]) -> None:
    patient, slow = hasty(), hasty()
    patient.sendall(BEGUN + b"\r\n")
    assert patient.recv(1000).startswith(b"HTTP/1.1 200")
    slow.sendall(BEGUN)
    read_to_end(slow)
    patient.sendall(BEGUN + b"connection: close\r\n\r\n")
    assert patient.recv(1000).startswith(b"HTTP/1.1 200")


def test_a_connection_that_no_request_came_back_on_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inflight.http.connection.KEEP_ALIVE_SECONDS", 0.2)
    with openai_server(PlayedEngine(), checkpoint_folder(tmp_path)) as url:
        host, port = url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), ENOUGH) as connection:
            connection.sendall(BEGUN + b"\r\n")
            read_to_end(connection)


def test_an_answer_may_take_longer_than_the_next_head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inflight.http.connection.KEEP_ALIVE_SECONDS", 1.5)
    engine = PlayedEngine(lambda request: [])
    with openai_server(engine, checkpoint_folder(tmp_path)) as url:
        host, port = url.removeprefix("http://").split(":")
        body = json.dumps(CHAT).encode()
        head = f"POST {CHATS} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode()
        with socket.create_connection((host, int(port)), ENOUGH) as connection:
            connection.sendall(head + body + BEGUN)
            wait_until(lambda: bool(engine.requests))
            connection.settimeout(2.0)
            with pytest.raises(TimeoutError):
                connection.recv(1)
            connection.settimeout(ENOUGH)
            engine.push(*say()(numbered(engine)))
            assert connection.recv(12) == b"HTTP/1.1 200"
