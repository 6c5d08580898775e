"""The load test itself: check the server, ask what it is, then measure level by level and report progress."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path

from inflight_client._client import Client
from inflight_client._exceptions import UsageError
from inflight_client._protocol import DEFAULT_MODEL
from inflight_client.load_test.grpc_load import Analyzer, GrpcLoad
from inflight_client.load_test.load import Load, Progress
from inflight_client.load_test.openai_load import Endpoint, OpenAILoad
from inflight_client.load_test.perf_analyzer import LEVEL_TIMEOUT, PerfAnalyzer
from inflight_client.load_test.prompts import PromptOptions
from inflight_client.load_test.results import LevelResult
from inflight_client.load_test.server_facts import ServerFacts
from inflight_client.load_test.sweep import Level


@dataclass(frozen=True, kw_only=True)
class LoadTestOptions:
    """What is measured, and with what."""

    levels: Sequence[Level]
    url: str = "localhost:8001"
    """gRPC address of tritonserver, or the URL of an OpenAI server."""
    model: str = DEFAULT_MODEL
    prompts: PromptOptions = field(default_factory=PromptOptions)
    level_timeout: float = LEVEL_TIMEOUT
    """Seconds after which an unfinished level is aborted."""
    endpoint: Endpoint | None = None
    """Of an OpenAI server; None = tritonserver is measured."""
    api_key: str = field(default="", repr=False)
    """For an OpenAI server; "" = none."""
    metrics_url: str = ""
    """Where tritonserver tells its metrics, host:port; "" = port 8002 beside port 8001, else unknown."""


@dataclass(frozen=True, kw_only=True)
class LoadTestReport:
    """All results, in the order of the levels."""

    options: LoadTestOptions
    started: datetime
    levels: Sequence[LevelResult]
    server: ServerFacts = field(default_factory=ServerFacts)


def run_load_test(
    options: LoadTestOptions,
    *,
    progress: Progress | None = None,
    client: Client | None = None,
    analyzer: Analyzer = PerfAnalyzer,
) -> LoadTestReport:
    """Measure every level in turn. Raises UsageError for wrong options, LoadTestError, or another ClientError if the
    server cannot be reached or refuses.

    Tests pass `client` and `analyzer` to replace the connections to a server.
    """
    if not options.levels:
        raise UsageError("there is no level to measure: give a concurrency or a request rate")
    started = datetime.now(timezone.utc)
    watcher = progress or Progress()
    with _load(options, watcher, client, analyzer) as load:
        load.warm_up()
        server = load.server_facts()
        results = []
        for number, level in enumerate(options.levels):
            watcher.level_started(level)
            results.append(load.measure(level, number))
            watcher.level_finished(level, results[-1])
    return LoadTestReport(options=options, started=started, levels=results, server=server)


@contextlib.contextmanager
def _load(options: LoadTestOptions, progress: Progress, client: Client | None, analyzer: Analyzer) -> Iterator[Load]:
    if options.endpoint is not None:
        yield OpenAILoad(
            url=options.url,
            model=options.model,
            endpoint=options.endpoint,
            api_key=options.api_key,
            prompts=options.prompts,
            level_timeout=options.level_timeout,
            request_ended=progress.request_ended,
        )
        return
    with (
        tempfile.TemporaryDirectory(prefix="inflight-load-test-") as folder,
        client or Client(options.url, model=options.model) as caller,
    ):
        yield GrpcLoad(
            url=options.url,
            model=options.model,
            prompts=options.prompts,
            level_timeout=options.level_timeout,
            metrics_url=options.metrics_url,
            scratch=Path(folder),
            client=caller,
            analyzer=analyzer,
        )
