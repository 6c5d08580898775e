"""Keys, rates, sizes, and what becomes of clients that leave."""

from __future__ import annotations

import contextlib
import hashlib
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from openai_server import (
    CHAT,
    CHATS,
    CLIENT,
    COMPLETIONS,
    PlayedEngine,
    Running,
    Script,
    checkpoint_folder,
    numbered,
    openai_server,
    result,
    say,
    wait_until,
)

from inflight.errors import ConfigurationError, EngineUnavailable, QueueFull, RequestTimedOut, StepFailed
from inflight.http.api_keys import ApiKeys
from inflight.http.rate_limit import RateLimit
from inflight.result import Response

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
OF_OLLAMA = ["/api/tags", "/api/ps", "/api/version", "/api/nothing"]


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
    for path in (*PATHS, *OF_OLLAMA):
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
    monkeypatch.setattr("inflight.http.api_keys.hmac.compare_digest", note)
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
    monkeypatch.setattr("inflight.http.guard.BODY_SECONDS", 0.05)
    host, port = guarded.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), ENOUGH) as connection:
        head = f"POST {CHATS} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\ncontent-length: 100\r\n\r\n{{"
        connection.sendall(head.encode())
        assert connection.recv(1000).startswith(b"HTTP/1.1 408")


def test_bodies_that_come_steadily_have_longer(guarded: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inflight.http.guard.BODY_SECONDS", 0.2)
    monkeypatch.setattr("inflight.http.guard.BODY_BYTES_PER_SECOND", 0.01)
    host, port = guarded.url.removeprefix("http://").split(":")
    body = json.dumps(CHAT).encode()
    head = f"POST {CHATS} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\ncontent-length: {len(body)}\r\n\r\n"
    with (
        socket.create_connection((host, int(port)), ENOUGH) as steady,
        socket.create_connection((host, int(port)), ENOUGH) as silent,
    ):
        steady.sendall(head.encode() + body[:5])
        silent.sendall(head.encode())
        assert silent.recv(1000).startswith(b"HTTP/1.1 408")
        steady.sendall(body[5:])
        assert steady.recv(1000).startswith(b"HTTP/1.1 200")


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
    wait_until(lambda: len(guarded.engine.cancelled) == 2)
    guarded.engine.script = say()
    wait_until(lambda: guarded.post(CHATS, CHAT, headers=bearer(KEY)).status_code == 200)


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
            wait_until(lambda: len(set(engine.enqueued) - known) == 2)
    wait_until(lambda: len(engine.cancelled) == 2)
    assert set(engine.cancelled) == set(engine.enqueued) - known


def test_each_accepted_request_has_one_status(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However it ends."""
    engine = PlayedEngine()
    with openai_server(engine, checkpoint_folder(tmp_path)) as url:
        running = Running(url, engine)

        def counted(name: str) -> dict[str, float]:
            """By the label that differs; of chats."""
            lines = running.get("/metrics").text.splitlines()
            chosen = [line for line in lines if line.startswith(f'{name}{{path="{CHATS}"')]
            return {line.partition("}")[0].split('"')[-2]: float(line.rpartition(" ")[2]) for line in chosen}

        def fail_with(error: Exception) -> Script:
            return lambda request: [Response.of_error(request.request_id, error)]

        def explode(request: object) -> list[Response]:
            raise ZeroDivisionError

        assert running.post(CHATS, CHAT).status_code == 200
        assert running.events(CHATS, CHAT)[-1] == "[DONE]"
        statuses = [running.post(CHATS, body).status_code for body in (b"{", {}, {**CHAT, "model": "nobody"})]
        assert [*statuses, running.get(CHATS).status_code] == [400, 400, 404, 405]
        for script, status in (
            (fail_with(RequestTimedOut("too late")), 504),
            (fail_with(QueueFull()), 503),
            (fail_with(EngineUnavailable("the ranks died")), 503),
            (fail_with(StepFailed("the step failed")), 500),
            (explode, 500),
        ):
            engine.script = script
            assert running.post(CHATS, CHAT).status_code == status
        engine.script = lambda request: [result(request, [72])]
        with CLIENT.stream("POST", url + CHATS, json={**CHAT, "stream": True}) as stream:
            engine.push(*fail_with(StepFailed("it failed"))(engine.sent))
            assert stream.status_code == 200 and b'"error"' in stream.read()
        monkeypatch.setattr("inflight.http.guard.BODY_SECONDS", 0.05)
        host, port = url.removeprefix("http://").split(":")
        head = f"POST {CHATS} HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{{".encode()
        with socket.create_connection((host, int(port)), ENOUGH) as slow:
            slow.sendall(head)
            assert slow.recv(12) == b"HTTP/1.1 408"
        monkeypatch.setattr("inflight.http.guard.BODY_SECONDS", 60.0)
        before = counted("inflight_openai_requests_accepted_total")[CHATS]
        with socket.create_connection((host, int(port)), ENOUGH) as abandoned:
            abandoned.sendall(head)
            wait_until(lambda: counted("inflight_openai_requests_accepted_total")[CHATS] > before)
        wait_until(lambda: "499" in counted("inflight_openai_requests_total"))
        assert counted("inflight_openai_requests_total") == {
            "200": 2,
            "400": 2,
            "404": 1,
            "405": 1,
            "408": 1,
            "499": 1,
            "500": 3,
            "503": 2,
            "504": 1,
        }
        assert counted("inflight_openai_requests_accepted_total") == {CHATS: 14}


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
        threading.Timer(0.2, lambda: engine.push(*say()(numbered(engine)))).start()
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
