"""The load test itself: check the server; then for every level make prompts, generate load, measure, report
progress."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path

from inflight_client._client import Client
from inflight_client._exceptions import LoadTestError, RequestError, Unavailable, UsageError
from inflight_client._protocol import DEFAULT_MODEL
from inflight_client.load_test.perf_analyzer import LEVEL_TIMEOUT, MeasurementsLost, PerfAnalyzer
from inflight_client.load_test.profile import LevelResult, read_level
from inflight_client.load_test.prompts import PromptOptions, make_requests, write_requests
from inflight_client.load_test.sweep import Level

READY_TIMEOUT = 30.0
WARM_UP_TOKENS = 4
ATTEMPTS = 4
"""Maximum number of runs of one level; see MeasurementsLost."""
_WARM_UP_LEVEL = "warm-up"


@dataclass(frozen=True, kw_only=True)
class LoadTestOptions:
    """What is measured, and with what."""

    levels: Sequence[Level]
    url: str = "localhost:8001"
    model: str = DEFAULT_MODEL
    prompts: PromptOptions = field(default_factory=PromptOptions)
    level_timeout: float = LEVEL_TIMEOUT
    """Seconds after which an unfinished level is aborted."""


@dataclass(frozen=True, kw_only=True)
class LoadTestReport:
    """All results, in the order of the levels."""

    options: LoadTestOptions
    started: datetime
    levels: Sequence[LevelResult]


class Progress:
    """Callbacks that report the progress of a test. These do nothing; override as needed."""

    def level_started(self, level: Level) -> None:
        """Called before the load of a level starts."""

    def level_finished(self, level: Level, result: LevelResult) -> None:
        """Called with the result of a level."""


Analyzer = Callable[[Path], PerfAnalyzer]


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
    with tempfile.TemporaryDirectory(prefix="inflight-load-test-") as folder:
        runner = analyzer(Path(folder))
        with client or Client(options.url, model=options.model) as caller:
            warm_up(caller, options.prompts)
        results = []
        for number, level in enumerate(options.levels):
            watcher.level_started(level)
            results.append(_measure(options, runner, Path(folder), level, number))
            watcher.level_finished(level, results[-1])
    return LoadTestReport(options=options, started=started, levels=results)


def _measure(options: LoadTestOptions, runner: PerfAnalyzer, folder: Path, level: Level, number: int) -> LevelResult:
    """Measure one level, again with other prompts if its measurements were lost."""
    inputs = folder / "inputs.json"
    for attempt in range(ATTEMPTS):
        key = f"{number}.{attempt}"
        write_requests(make_requests(options.prompts, level.num_requests, level=key), inputs)
        try:
            export = runner.run(
                level, url=options.url, model=options.model, inputs=inputs, timeout=options.level_timeout
            )
            return read_level(export, level)
        except MeasurementsLost:
            if attempt == ATTEMPTS - 1:
                raise
    raise AssertionError("unreachable")


def warm_up(client: Client, prompts: PromptOptions) -> None:
    """Send one request with the longest prompt, so that the first level does not measure a cold server, and that a
    missing server or one that refuses such requests is reported before any load."""
    with contextlib.suppress(Unavailable):  # a loading model is worth waiting for; a missing server or model is not
        client.model_config()
    client.wait_until_ready(READY_TIMEOUT)
    longest = PromptOptions(
        input_tokens=(prompts.input_tokens[1],) * 2,
        output_tokens=(WARM_UP_TOKENS,) * 2,
        vocabulary=prompts.vocabulary,
        prompt_file=prompts.prompt_file,
    )
    (request,) = make_requests(longest, 1, level=_WARM_UP_LEVEL)
    tensors = {name: tensor["content"] for name, tensor in request.items() if isinstance(tensor, dict)}
    prompt = tensors["text_input"][0] if "text_input" in tensors else tensors["input_ids"]
    try:
        client.generate(prompt, max_tokens=WARM_UP_TOKENS, end_id=-1, timeout=READY_TIMEOUT)
    except RequestError as error:
        raise LoadTestError(f"the server refuses the load test's requests: {error}") from None
