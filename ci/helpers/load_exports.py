"""What perf_analyzer exports of requests, and a load test that it plays, for tests of the load test."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

from inflight_client import Client, MockTransport, text_reply
from inflight_client.load_test import (
    Level,
    LoadMode,
    LoadTestOptions,
    LoadTestReport,
    run_load_test,
)
from inflight_client.load_test.perf_analyzer import PerfAnalyzer
from inflight_client.load_test.profile import timeline
from inflight_client.load_test.results import LevelResult, summarise

MS = 1_000_000


ONE = Level(LoadMode.CONCURRENCY, 1, 1)


def exported(*responses: tuple[int, int], sent: int = 0, final_at: int | None = None) -> dict[str, Any]:
    """A request as perf_analyzer exports it. `responses`: when each came, in ms, and its tokens."""
    stamps = [stamp * MS for stamp, _ in responses]
    outputs: list[dict[str, Any]] = [
        {"sequence_length": tokens, "num_input_tokens": 5, "finish_reason": "", "text_output": "x"}
        for _, tokens in responses
    ]
    outputs[-1]["finish_reason"] = "length"
    if final_at is not None:
        stamps.append(final_at * MS)
        outputs.append({"sequence_length": 230523952, "num_input_tokens": -7, "finish_reason": "", "text_output": ""})
    return {
        "timestamp": sent * MS,
        "request_inputs": {"max_tokens": sum(tokens for _, tokens in responses)},
        "response_timestamps": stamps,
        "response_outputs": outputs,
    }


def result_of(*requests: dict[str, Any]) -> LevelResult:
    return summarise(ONE, [timeline(request) for request in requests])


def write_export(path: Path, *requests: dict[str, Any]) -> Path:
    path.write_text(json.dumps({"experiments": [{"requests": list(requests)}]}))
    return path


class RecordingAnalyzer(PerfAnalyzer):
    """Answers each level with an export of its own; keeps the inputs that it was given."""

    inputs: ClassVar[list[dict[str, Any]]] = []

    def __init__(self, scratch: Path) -> None:
        self._folder = scratch

    def run(self, level: Level, *, url: str, model: str, inputs: Path, timeout: float = 0) -> Path:
        self.inputs.append(json.loads(inputs.read_text()))
        return write_export(self._folder / "export", *[exported((10, 1), (20, 3))] * level.num_requests)


def two_sweeps() -> LoadTestReport:
    levels = [Level(LoadMode.CONCURRENCY, 1, 2), Level(LoadMode.CONCURRENCY, 4, 2), Level(LoadMode.REQUEST_RATE, 9, 2)]
    client = Client(transport=MockTransport(lambda call: [text_reply("x", final=True)]))
    return run_load_test(
        LoadTestOptions(levels=levels, url="localhost:1", model="<llm>"), client=client, analyzer=RecordingAnalyzer
    )
