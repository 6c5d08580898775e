"""The page and its events: for whom they are, and that nothing is done for them while nobody watches."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
from openai_server import CLIENT, PlayedEngine, Running, checkpoint_folder, openai_server
from waiting import until

from ci.unit.http.page.played_statistics import PlayedStatistics
from inflight.errors import ConfigurationError
from inflight.executor.front.front import Front
from inflight.http.api_error import APIError
from inflight.http.connection import Connection
from inflight.http.page.feed import MAX_UNREAD_BYTES, MAX_VIEWERS, BatchFeed
from inflight.http.page.index import INDEX
from inflight.stats import IterationStats, RequestStatsPerIteration


class WatchedEngine(PlayedEngine):
    """A step more each time that somebody looks."""

    def __init__(self) -> None:
        super().__init__()
        self._played = PlayedStatistics(seed=1, num_rows=4, begin=datetime(2026, 1, 2))
        self._newest: list[RequestStatsPerIteration] = []

    def get_latest_iteration_stats(self, timeout: float | None = 0.0) -> list[IterationStats]:
        iteration, requests = self._played.step()
        self._newest = [requests]
        return [iteration]

    def get_latest_request_stats(self) -> list[RequestStatsPerIteration]:
        return self._newest


@pytest.fixture(scope="module")
def fronts() -> list[WatchedEngine]:
    """That were made to watch the engine."""
    return []


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory, fronts: list[WatchedEngine]) -> Iterator[Running]:
    def attach() -> Front:
        fronts.append(WatchedEngine())
        return fronts[-1]

    engine = PlayedEngine()
    with openai_server(engine, checkpoint_folder(tmp_path_factory.mktemp("checkpoint")), attach=attach) as url:
        yield Running(url, engine)


@contextlib.contextmanager
def view(server: Running) -> Iterator[Iterator[Any]]:
    with CLIENT.stream("GET", f"{server.url}/events") as response:
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        yield (json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: "))


def test_the_page_has_the_headers_that_it_needs(running: Running) -> None:
    response = running.get("/")
    assert response.content == INDEX
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    policy = response.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert policy.endswith("; frame-ancestors 'none'")
    assert response.headers["x-content-type-options"] == "nosniff"


def test_there_is_a_front_while_somebody_watches(watched: Running, fronts: list[WatchedEngine]) -> None:
    running_before = len(fronts)
    with view(watched) as events, view(watched) as others:
        first, second = next(events), next(events)
        assert second["time_ms"] > first["time_ms"]
        assert second["max_rows"] == 4
        assert next(others)["kv_blocks"]["total"] > 0
        assert len(fronts) == running_before + 1
        assert not fronts[-1].is_shut_down
    until(lambda: fronts[-1].is_shut_down, "nobody watched")
    with view(watched) as events:
        next(events)
        assert len(fronts) == running_before + 2
    until(lambda: fronts[-1].is_shut_down, "nobody watched")


def test_an_engine_that_is_away_is_not_watched(watched: Running, fronts: list[WatchedEngine]) -> None:
    with view(watched) as events:
        next(events)
        fronts[-1].ready = False
        with pytest.raises(httpx.TransportError):
            for _ in events:
                pass
    watched.engine.ready = False
    assert watched.get("/events").status_code == 503
    watched.engine.ready = True


def test_viewers_are_bounded(watched: Running) -> None:
    with (
        httpx.Client(limits=httpx.Limits(max_connections=None), trust_env=False, timeout=100) as client,
        contextlib.ExitStack() as stack,
    ):
        for _ in range(MAX_VIEWERS):
            stack.enter_context(client.stream("GET", f"{watched.url}/events"))
        refused = watched.get("/events")
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert "viewers" in refused.json()["error"]["message"]
        assert watched.get("/v1/models").status_code == 200


def test_the_end_of_the_server_ends_events(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        server = contextlib.ExitStack()
        url = server.enter_context(openai_server(PlayedEngine(), checkpoint_folder(tmp_path), attach=WatchedEngine))
        events = stack.enter_context(view(Running(url, PlayedEngine())))
        next(events)
        server.close()
        with contextlib.suppress(httpx.RemoteProtocolError):  # the stream has no end of its own
            for _ in events:
                pass


class Viewer:
    """A connection whose client reads nothing."""

    def __init__(self) -> None:
        self.num_unsent_bytes = 0
        self.num_chunks = 0
        self.was_aborted = threading.Event()

    def write_chunk(self, chunk: bytes) -> None:
        self.num_chunks += 1
        self.num_unsent_bytes += MAX_UNREAD_BYTES

    def abort(self) -> None:
        self.was_aborted.set()


async def test_who_does_not_read_is_disconnected() -> None:
    feed, viewer = BatchFeed(WatchedEngine), Viewer()
    with feed.viewing() as join:
        join(cast(Connection, viewer))
        await until_set(viewer.was_aborted)
    assert viewer.num_chunks == 2
    with pytest.raises(APIError, match="0 viewers"), BatchFeed(WatchedEngine, max_viewers=0).viewing():
        pass


async def test_viewers_of_an_engine_that_is_not_found_are_sent_away(caplog: pytest.LogCaptureFixture) -> None:
    class Absent(WatchedEngine):
        def __enter__(self) -> Absent:
            raise ConfigurationError("no engine called 'x' serves here")

    feed, viewer = BatchFeed(Absent), Viewer()
    with feed.viewing() as join:
        join(cast(Connection, viewer))
        await until_set(viewer.was_aborted)
    assert "no engine called 'x'" in caplog.text


async def until_set(event: threading.Event) -> None:
    assert await asyncio.to_thread(event.wait, 30)
