"""The statistics of an iteration: TensorRT-LLM's JSON, made only when somebody reads it."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import datetime

import pytest
from harness import Harness, make_request

from inflight.config import SchedulerPolicy

STATS_KEYS = [
    "Timestamp",
    "Iteration Counter",
    "Active Request Count",
    "Max Request Count",
    "Runtime CPU Memory Usage",
    "Runtime GPU Memory Usage",
    "Runtime Pinned Memory Usage",
    "Max KV cache blocks",
    "Free KV cache blocks",
    "Used KV cache blocks",
    "Tokens per KV cache block",
    "Reused KV cache blocks",
    "Fraction used KV cache blocks",
    "Scheduled Requests",
    "Context Requests",
    "Generation Requests",
    "Total Context Tokens",
    "MicroBatch ID",
    "Paused Requests",
    "Waiting Requests",
]


def test_statistics_are_the_batch_managers_json() -> None:
    moment = datetime(2025, 1, 2, 3, 4, 5, 678)
    harness = Harness(block_size=4, num_blocks=40, max_num_tokens=16, wall_clock=lambda: moment)
    harness.submit(make_request(1, 6, 8), make_request(2, 20, 8))
    harness.step()
    harness.step()
    first, second = (json.loads(text) for text in harness.stats)
    assert list(first) == STATS_KEYS
    assert first["Timestamp"] == "01-02-2025 03:04:05.000678"
    assert first["Active Request Count"] == first["Scheduled Requests"] == first["Context Requests"] == 2
    assert first["Total Context Tokens"] == 16
    assert (second["Context Requests"], second["Generation Requests"]) == (1, 1)
    assert second["Total Context Tokens"] == 10
    assert second["Iteration Counter"] == 2
    assert second["Used KV cache blocks"] + second["Free KV cache blocks"] == second["Max KV cache blocks"] == 40
    assert second["Fraction used KV cache blocks"] == second["Used KV cache blocks"] / 40
    assert second["Runtime GPU Memory Usage"] == 2000
    assert second["Max Request Count"] == 4 and second["Tokens per KV cache block"] == 4


def test_statistics_count_who_waits_and_who_is_paused() -> None:
    harness = Harness(policy=SchedulerPolicy.MAX_UTILIZATION, num_blocks=6, max_num_tokens=64)
    harness.submit(make_request(1, 8, 14), make_request(2, 8, 12))
    harness.run_until_idle()
    stats = [json.loads(text) for text in harness.stats]
    assert any(entry["Paused Requests"] == 1 for entry in stats)
    assert all(e["Waiting Requests"] == e["Active Request Count"] - e["Scheduled Requests"] for e in stats)
    assert all(e["Paused Requests"] <= e["Waiting Requests"] for e in stats)


def test_statistics_that_nobody_wants_are_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = Harness()
    answers, made = iter([True, False, False, True]), []
    callbacks = replace(harness.callbacks, wants_batch_manager_stats=lambda: next(answers, False))
    harness.manager._callbacks = callbacks
    make = harness.manager.statistics
    monkeypatch.setattr(harness.manager, "statistics", lambda: made.append(True) or make())
    harness.serve(make_request(1, 4, 8))
    counters = [json.loads(text)["Iteration Counter"] for text in harness.stats]
    assert len(made) == len(counters) == 2 and counters == [1, 4]
