"""Spans of requests: what they tell, whose they are under, and what happens without OpenTelemetry or a receiver."""

from __future__ import annotations

import sys
import time

import pytest
from otlp_receiver import OtlpReceiver

from inflight import request_spans
from inflight.config import EngineConfig
from inflight.errors import ConfigurationError
from inflight.request import Request
from inflight.request_spans import EndedRequest, RequestSpans, of_output, of_request, open_spans
from inflight.result import PerfMetrics
from inflight.sampling_config import SamplingConfig

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PARENT = {"traceparent": f"00-{TRACE}-{SPAN}-01"}
MS = 1_000_000


@pytest.fixture(scope="module")
def receiver():
    with OtlpReceiver() as running:
        yield running


def ended(**values: object) -> EndedRequest:
    now = time.monotonic_ns()
    usual = {
        "operation": "chat",
        "model": "llm",
        "parent": PARENT,
        "began_ns": now - 100 * MS,
        "ended_ns": now,
        "perf_metrics": [
            PerfMetrics(
                arrival_time_ns=now - 90 * MS,
                first_scheduled_time_ns=now - 80 * MS,
                first_token_time_ns=now - 50 * MS,
                last_token_time_ns=now - 10 * MS,
                kv_cache_reused_blocks=3,
            )
        ],
        "attributes": {
            **of_request(Request(input_token_ids=[1], max_tokens=7, sampling_config=SamplingConfig(top_k=5))),
            **of_output(1, 7, ["length", ""]),
        },
    }
    return EndedRequest(**{**usual, **values})  # type: ignore[arg-type]


def export(receiver: OtlpReceiver, *requests: EndedRequest) -> None:
    spans = RequestSpans(receiver.endpoint, is_outermost=True)
    for request in requests:
        spans.record(request)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(request_spans, "CLOSE_SECONDS", 100.0)
        spans.close()


def test_a_request_and_its_phases_are_under_the_clients_span(receiver: OtlpReceiver) -> None:
    export(receiver, ended())
    found = {span.name: span for span in receiver.spans(TRACE)}
    assert sorted(found) == ["chat llm", "decode", "prefill", "queue"]
    request = found["chat llm"]
    assert request.parent_id == SPAN and not request.is_error and request.service == "inflight"
    assert {found[name].parent_id for name in ("queue", "prefill", "decode")} == {request.span_id}
    assert [found[name].end - found[name].start for name in ("queue", "prefill", "decode")] == [
        10 * MS,
        30 * MS,
        40 * MS,
    ]
    assert request.end - request.start == 100 * MS and abs(request.end - time.time_ns()) < 60_000 * MS
    assert request.events == {"first_token": found["prefill"].end}
    assert request.attributes["gen_ai.request.max_tokens"] == 7 and request.attributes["gen_ai.request.top_k"] == 5
    assert request.attributes["gen_ai.usage.output_tokens"] == 7
    assert request.attributes["gen_ai.response.finish_reasons"] == ["length"]
    assert request.attributes["inflight.prefix_cache.reused_blocks"] == 3


@pytest.mark.parametrize("parent", [{}, {"traceparent": "nonsense"}])
def test_without_a_parent_a_request_begins_a_trace(receiver: OtlpReceiver, parent: dict[str, str]) -> None:
    model = f"alone-{len(parent)}"
    export(receiver, ended(parent=parent, model=model, error="503", perf_metrics=[]))
    (span,) = receiver.wait_for(f"chat {model}")
    assert span.parent_id == "" and span.trace_id != TRACE
    assert span.is_error and span.attributes["error.type"] == "503"


def test_what_a_client_does_not_sample_is_not_exported(receiver: OtlpReceiver) -> None:
    other = "1" * 32
    export(receiver, ended(parent={"traceparent": f"00-{other}-{SPAN}-00"}))
    assert receiver.spans(other) == []


def test_a_request_that_never_ran_has_no_phases(receiver: OtlpReceiver) -> None:
    trace = "2" * 32
    export(
        receiver, ended(parent={"traceparent": f"00-{trace}-{SPAN}-01"}, perf_metrics=[PerfMetrics(arrival_time_ns=5)])
    )
    assert [span.name for span in receiver.spans(trace)] == ["chat llm"]


def test_a_receiver_that_is_away_holds_nobody(caplog: pytest.LogCaptureFixture) -> None:
    spans = RequestSpans("http://127.0.0.1:9/v1/traces", is_outermost=False)
    spans.record(ended())
    spans.close()


def test_without_opentelemetry_a_sentence_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'inflight\[otel\]'"):
        open_spans("http://localhost:4318/v1/traces", is_outermost=True)


def test_without_an_endpoint_nothing_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    assert open_spans("", is_outermost=True) is None


def test_an_endpoint_is_a_url() -> None:
    with pytest.raises(ConfigurationError, match="begins with http"):
        EngineConfig(otlp_traces_endpoint="localhost:4318")
