"""Keys, rates, sizes, and what becomes of clients that leave."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from openai_server import CLIENT, PlayedEngine, Running, checkpoint_folder, openai_server, result, say

from inflight.errors import ConfigurationError
from inflight.openai.api_keys import ApiKeys
from inflight.openai.http import MAX_PIPELINED
from inflight.openai.rate_limit import RateLimit
from inflight.openai.serve import SEND_BUFFER_BYTES, UNREAD_MS, allow_connections, listen

CHATS, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
CHAT = {"messages": [{"role": "user", "content": "hi"}]}
KEY, OTHER = "a-key-of-some-length", "another-key-of-some-length"
ENOUGH = 30


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = checkpoint_folder(tmp_path_factory.mktemp("checkpoint"))
    keys = folder / "keys"
    keys.write_text(f"# ours\n{KEY}\n\nsha256:{hashlib.sha256(OTHER.encode()).hexdigest()}\n")
    engine = PlayedEngine()
    with openai_server(
        engine, folder, api_key_file=str(keys), max_body_bytes=2000, max_open_requests=2, max_requests_per_second=100
    ) as url:
        yield Running(url, engine)


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


PATHS = ["/events", "/v1/responses/resp_1", "/v1/models", "/v1/models/llm", "/metrics", "/nothing"]
POSTS = [
    CHATS,
    COMPLETIONS,
    "/v1/responses",
    "/tokenize",
    "/detokenize",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
]


@pytest.mark.parametrize("headers", [{}, bearer("wrong"), {"Authorization": KEY}, bearer(KEY[:-1]), bearer(KEY + "x")])
def test_every_path_but_health_and_the_page_needs_a_key(guarded: Running, headers: dict[str, str]) -> None:
    for path in PATHS:
        assert guarded.get(path, headers=headers).status_code == 401
    for path in POSTS:
        response = guarded.post(path, {}, headers=headers)
        assert response.status_code == 401
        assert response.json()["error"]["code"] == "invalid_api_key"
    for path in ("/health", "/"):
        assert guarded.get(path, headers=headers).status_code == 200


@pytest.mark.parametrize("key", [KEY, OTHER])
def test_each_key_opens(guarded: Running, key: str) -> None:
    assert guarded.get("/v1/models", headers=bearer(key)).status_code == 200
    assert guarded.post(CHATS, CHAT, headers=bearer(key)).status_code == 200


def test_all_keys_are_compared_whatever_the_first_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import hmac

    compared: list[bytes] = []

    def note(a: bytes, b: bytes) -> bool:
        compared.append(b)
        return real(a, b)

    real = hmac.compare_digest
    monkeypatch.setattr("inflight.openai.api_keys.hmac.compare_digest", note)
    path = tmp_path / "keys"
    path.write_text(f"{KEY}\n{OTHER}\n")
    keys = ApiKeys.load(str(path))
    assert keys.find(f"Bearer {KEY}".encode()) == 0
    assert keys.find(b"Bearer wrong") is None
    assert compared == [hashlib.sha256(key.encode()).digest() for key in (KEY, OTHER)] * 2


def test_a_file_that_changes_is_read_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A wrong one is said, and changes nothing. A key that stays keeps its number, by which its rate is counted."""
    now = [0.0]
    path = tmp_path / "keys"
    path.write_text(KEY)
    keys = ApiKeys.load(str(path), lambda: now[0])

    def replace(text: str | None) -> None:
        if text is None:
            path.unlink()
        else:
            (tmp_path / "next").write_text(text)
            (tmp_path / "next").rename(path)
        now[0] += 1

    def found() -> list[int | None]:
        return [keys.find(f"Bearer {key}".encode()) for key in (KEY, OTHER)]

    assert found() == [0, None]
    replace(f"{OTHER}\n{KEY}\n")
    assert found() == [0, 1]
    for wrong in ("", "short\n", None):
        caplog.clear()
        replace(wrong)
        assert found() == [0, 1]
        assert "the keys from before are kept" in caplog.text and "short" not in caplog.text
    replace(OTHER)
    assert found() == [None, 1]
    path.write_text(KEY + KEY)
    assert found() == [None, 1], "it is looked at once a second"


@pytest.mark.parametrize("text", ["", "# nothing\n", "short\n", "sha256:12\n"])
def test_a_file_without_good_keys_is_a_wrong_configuration(tmp_path: Path, text: str) -> None:
    path = tmp_path / "keys"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match="key"):
        ApiKeys.load(str(path))
    with pytest.raises(ConfigurationError, match="cannot be read"):
        ApiKeys.load(str(tmp_path / "none"))


def test_long_bodies_are_refused_announced_or_not(guarded: Running) -> None:
    body = json.dumps({**CHAT, "user": "x" * 3000}).encode()
    response = guarded.post(CHATS, body, headers=bearer(KEY))
    assert (response.status_code, response.json()["error"]["code"]) == (413, "content_too_large")

    def pieces() -> Iterator[bytes]:
        for start in range(0, len(body), 100):
            yield body[start : start + 100]

    response = CLIENT.post(guarded.url + CHATS, content=pieces(), headers=bearer(KEY))
    assert response.status_code == 413


def test_slow_bodies_are_refused(guarded: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inflight.openai.guard.BODY_SECONDS", 0.05)
    host, port = guarded.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), ENOUGH) as connection:
        head = f"POST {CHATS} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\ncontent-length: 100\r\n\r\n{{"
        connection.sendall(head.encode())
        assert connection.recv(1000).startswith(b"HTTP/1.1 408")


def test_endless_heads_are_refused(guarded: Running) -> None:
    host, port = guarded.url.removeprefix("http://").split(":")
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
    narrow: tuple[PlayedEngine, Callable[[], socket.socket]], caplog: pytest.LogCaptureFixture
) -> None:
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


def connect_and_ask(connect: Callable[[], socket.socket]) -> bool:
    """Whether a new connection is served."""
    connection = connect()
    connection.sendall(HEALTH + b"connection: close\r\n\r\n")
    return connection.recv(1000).startswith(b"HTTP/1.1 200")


def test_a_process_that_may_not_open_so_many_files_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = [(1024, 4096)]
    monkeypatch.setattr("inflight.openai.serve.resource.getrlimit", lambda which: limits[-1])
    monkeypatch.setattr("inflight.openai.serve.resource.setrlimit", lambda which, new: limits.append(new))
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


@pytest.mark.parametrize("sent", [b"", BEGUN, BEGUN + b"\r\n" + BEGUN, REFUSED])
def test_connections_without_a_whole_request_are_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    """Also behind an answer, and while a body comes that was refused already."""
    monkeypatch.setattr("inflight.openai.serve.KEEP_ALIVE_SECONDS", 0.2)
    with openai_server(PlayedEngine(), checkpoint_folder(tmp_path)) as url:
        host, port = url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), ENOUGH) as connection:
            connection.sendall(sent)
            while connection.recv(1000):
                continue


def test_an_answer_may_take_longer_than_the_next_head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inflight.openai.serve.KEEP_ALIVE_SECONDS", 0.1)
    engine = PlayedEngine(lambda request: [])
    with openai_server(engine, checkpoint_folder(tmp_path)) as url:
        host, port = url.removeprefix("http://").split(":")
        body = json.dumps(CHAT).encode()
        head = f"POST {CHATS} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode()
        with socket.create_connection((host, int(port)), ENOUGH) as connection:
            connection.sendall(head + body + BEGUN)
            _wait_until(lambda: bool(engine.requests))
            connection.settimeout(0.5)
            with pytest.raises(TimeoutError):
                connection.recv(1)
            connection.settimeout(ENOUGH)
            engine.push(*say()(_numbered(engine)))
            assert connection.recv(12) == b"HTTP/1.1 200"


def test_no_more_requests_than_allowed_are_open(guarded: Running) -> None:
    def start_only(request: object) -> list[object]:
        return [result(request, [72])]  # type: ignore[arg-type]

    guarded.engine.script = start_only  # type: ignore[assignment]
    body = {**CHAT, "stream": True}
    with (
        CLIENT.stream("POST", guarded.url + CHATS, json=body, headers=bearer(KEY)) as one,
        CLIENT.stream("POST", guarded.url + CHATS, json=body, headers=bearer(KEY)) as two,
    ):
        assert one.status_code == two.status_code == 200
        response = guarded.post(CHATS, CHAT, headers=bearer(KEY))
        assert (response.status_code, response.headers["retry-after"]) == (503, "1")
    _wait_until(lambda: len(guarded.engine.cancelled) == 2)
    guarded.engine.script = say()
    _wait_until(lambda: guarded.post(CHATS, CHAT, headers=bearer(KEY)).status_code == 200)


def test_the_engine_tells_clients_apart_by_their_keys(guarded: Running) -> None:
    tenants = []
    for key, user in ((KEY, "one"), (OTHER, "one"), (KEY, "two")):
        assert guarded.post(CHATS, {**CHAT, "user": user}, headers=bearer(key)).status_code == 200
        tenants.append(guarded.engine.sent.tenant)
    assert tenants == [1, 2, 1]


def test_without_keys_all_clients_are_one(running: Running) -> None:
    for user in ("one", "two"):
        assert running.post(CHATS, {**CHAT, "user": user}, headers={"x-user": user}).status_code == 200
        assert running.engine.sent.tenant == 0


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_cancels_its_requests(running: Running, stream: bool) -> None:
    """Without a stream it waits for the headers."""
    engine = running.engine
    engine.script = lambda request: [result(request, [72])] if stream else []
    engine.cancelled.clear()
    host, port = running.url.removeprefix("http://").split(":")
    body = json.dumps({"prompt": ["a", "b"], "stream": stream}).encode()
    known = set(engine.enqueued)
    with socket.create_connection((host, int(port)), ENOUGH) as connection:
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        if stream:
            assert connection.recv(12) == b"HTTP/1.1 200"
        else:
            _wait_until(lambda: len(set(engine.enqueued) - known) == 2)
    _wait_until(lambda: len(engine.cancelled) == 2)
    assert set(engine.cancelled) == set(engine.enqueued) - known


def test_a_request_in_flight_gets_its_end_when_the_server_stops(tmp_path: Path) -> None:
    engine = PlayedEngine(lambda request: [result(request, [72])])
    texts: list[str] = []
    with openai_server(engine, checkpoint_folder(tmp_path)) as url:

        def read() -> None:
            with CLIENT.stream("POST", url + CHATS, json={**CHAT, "stream": True}) as response:
                for text in response.iter_text():
                    texts.append(text)
                    has_begun.set()

        has_begun = threading.Event()
        reader = threading.Thread(target=read)
        reader.start()
        assert has_begun.wait(ENOUGH)
        # It ends while the server drains.
        threading.Timer(0.2, lambda: engine.push(*say()(_numbered(engine)))).start()
    reader.join(ENOUGH)
    assert "".join(texts).endswith("data: [DONE]\n\n")


def test_a_stream_that_does_not_end_in_time_is_told(tmp_path: Path) -> None:
    engine = PlayedEngine(lambda request: [result(request, [72])])
    with contextlib.ExitStack() as stack:
        with openai_server(engine, checkpoint_folder(tmp_path)) as url:
            stream = CLIENT.stream("POST", url + CHATS, json={**CHAT, "stream": True})
            pieces = stack.enter_context(stream).iter_text()
            seen = [next(pieces)]
        seen += pieces
    *_, error, done, _ = "".join(seen).split("\n\n")
    assert json.loads(error[6:])["error"]["message"] == "the engine was shut down"
    assert done == "data: [DONE]"
    assert engine.cancelled


def _numbered(engine: PlayedEngine) -> object:
    return next(iter(engine.enqueued.values()))


def test_the_rate_of_one_client_is_not_anothers() -> None:
    now = [0.0]
    limit = RateLimit(2.0, clock=lambda: now[0])
    assert [limit.take(0) for _ in range(3)] == [0, 0, 1]
    assert limit.take(1) == 0
    now[0] = 0.5
    assert [limit.take(0) for _ in range(2)] == [0, 1]
    assert RateLimit(0.0).take(None) == 0


def test_a_rate_above_the_limit_says_when_to_come_again(tmp_path: Path) -> None:
    with openai_server(PlayedEngine(), checkpoint_folder(tmp_path), max_requests_per_second=0.01) as url:
        assert CLIENT.post(url + CHATS, json=CHAT).status_code == 200
        response = CLIENT.post(url + CHATS, json=CHAT)
    assert response.status_code == 429
    assert 90 <= int(response.headers["retry-after"]) <= 100
    assert response.json()["error"]["code"] == "rate_limit_exceeded"


def _wait_until(holds: Callable[[], bool]) -> None:
    pause = threading.Event()
    for _ in range(ENOUGH * 100):
        if holds():
            return
        pause.wait(0.01)
    raise AssertionError("it never happened")
