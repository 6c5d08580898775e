"""OpenTelemetry: a request's spans are under tritonserver's or the client's, in one trace, and have no text."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest
import tritonclient.grpc as grpcclient
from otlp_receiver import OtlpReceiver, Span
from raw_stream import RawStream, tensors
from server_process import ServerProcess

PHASES = ["queue", "prefill", "decode"]
CLIENTS_SPAN = "b7ad6b7169203331"


@pytest.fixture(scope="module")
def receiver() -> Iterator[OtlpReceiver]:
    with OtlpReceiver() as running:
        yield running


@pytest.fixture(scope="module")
def server(receiver: OtlpReceiver) -> Iterator[ServerProcess]:
    with ServerProcess(
        apis=["unary"],
        openai={"port": 0},
        parameters={"num_threads": "1", "otlp_traces_endpoint": receiver.endpoint},
        environment={"OTEL_BSP_SCHEDULE_DELAY": "200"},
    ) as running:
        yield running


def headers(trace_id: str) -> dict[str, str]:
    return {"traceparent": f"00-{trace_id}-{CLIENTS_SPAN}-01"}


def check_phases(receiver: OtlpReceiver, request: Span) -> None:
    """One behind the other, within the request, and under its span."""
    phases = [span for span in receiver.spans(request.trace_id) if span.parent_id == request.span_id]
    phases.sort(key=lambda span: span.start)
    assert [span.name for span in phases] == PHASES
    assert [span.end for span in phases[:-1]] == [span.start for span in phases[1:]]
    assert request.start <= phases[0].start and phases[-1].end <= request.end
    assert request.events == {"first_token": phases[1].end}


def test_a_request_is_under_tritonservers_span_and_that_under_the_clients(
    server: ServerProcess, receiver: OtlpReceiver
) -> None:
    trace_id = "a" * 32
    with grpcclient.InferenceServerClient(server.grpc_url) as client:
        client.infer(
            "llm_unary",
            tensors({"text_input": "Once", "max_tokens": 8, "end_id": -1, "top_k": 3}),
            headers=headers(trace_id),
        )
    (request,) = receiver.wait_for("text_completion llm_unary")
    (theirs,) = receiver.wait_for("llm_unary")
    (call,) = receiver.wait_for("InferRequest")
    assert {span.trace_id for span in (request, theirs, call)} == {trace_id}
    assert (request.parent_id, theirs.parent_id, call.parent_id) == (theirs.span_id, call.span_id, CLIENTS_SPAN)
    check_phases(receiver, request)
    assert request.attributes["gen_ai.usage.output_tokens"] == 8
    assert request.attributes["gen_ai.request.top_k"] == 3
    assert request.attributes["gen_ai.response.finish_reasons"] == ["length"]
    assert "Once" not in str(request)


def test_a_request_that_is_refused_says_so(server: ServerProcess, receiver: OtlpReceiver) -> None:
    with RawStream(server.grpc_url) as stream:
        refused = stream.ask({"text_input": "Once " * 3000, "max_tokens": 8})
    assert "INVALID_ARGUMENT" in refused.error
    (request,) = receiver.wait_for("text_completion llm")
    assert request.is_error and request.attributes["error.type"] == "INVALID_ARGUMENT"
    assert [span for span in receiver.spans(request.trace_id) if span.parent_id == request.span_id] == []


@pytest.mark.parametrize("is_streamed", [True, False])
def test_an_openai_call_is_under_the_clients_span(
    server: ServerProcess, receiver: OtlpReceiver, is_streamed: bool
) -> None:
    trace_id = "b" * 31 + str(int(is_streamed))
    with openai.OpenAI(base_url=f"{server.openai_url}/v1", api_key="none", max_retries=0) as client:
        answer = client.chat.completions.create(
            model="llm",
            messages=[{"role": "user", "content": "Hello"}],
            max_tokens=8,
            extra_body={"ignore_eos": True},
            stream=is_streamed,
            extra_headers=headers(trace_id),
        )
        if is_streamed:
            for _ in answer:
                pass
    receiver.wait_for("chat llm", 1 + (not is_streamed))
    (request,) = (span for span in receiver.spans(trace_id) if span.name == "chat llm")
    assert request.parent_id == CLIENTS_SPAN and not request.is_error
    check_phases(receiver, request)
    assert request.attributes["gen_ai.operation.name"] == "chat"
    assert request.attributes["gen_ai.usage.output_tokens"] == 8
