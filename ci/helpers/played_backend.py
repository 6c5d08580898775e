"""A backend whose engine the test plays: what its tests share beside the fixtures of ci/unit/server."""

from __future__ import annotations

import fake_pb_utils as pb
from fake_executor import FakeExecutor, tokens

from inflight.result import FinishReason

LONG = 30.0
"""Seconds after which a wait counts as a hang."""
PROMPT = {"text_input": "hi", "max_tokens": 8}


def finish(executor: FakeExecutor, sender: pb.ResponseSender, text: bytes = b"ok") -> pb.ResponseSender:
    """Let the engine end its newest request."""
    executor.push(tokens(executor.last.request_id, list(text), FinishReason.LENGTH))
    assert sender.finished.wait(LONG)
    return sender


def counted(outcome: str) -> float:
    return pb.MetricFamily.metrics["inflight_requests_total", outcome].value


def counted_accepted() -> float:
    return pb.MetricFamily.metrics["inflight_requests_accepted_total", ""].value
