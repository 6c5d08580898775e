"""What is told of a call when it has ended: its span is under that of the client, if the request names one."""

from __future__ import annotations

import time

from starlette.types import Scope

from inflight.http.call import Call
from inflight.http.generation import Generation
from inflight.request_spans import EndedRequest, of_output, of_request

PARENT_HEADERS = (b"traceparent", b"tracestate")


def ended_call(call: Call, generation: Generation, scope: Scope, began: float, status: int) -> EndedRequest:
    """`scope`: of its HTTP request. `began`: when that arrived, in seconds of the monotonic clock. `status`: of its
    answer, as metrics count it."""
    headers = scope["headers"]
    return EndedRequest(
        operation="chat" if call.is_chat else "text_completion",
        model=call.model,
        parent={name.decode(): value.decode("latin-1") for name, value in headers if name in PARENT_HEADERS},
        began_ns=round(began * 1e9),
        ended_ns=time.monotonic_ns(),
        perf_metrics=[perf for perf, _ in generation.timings()],
        error="" if status == 200 else str(status),
        attributes={
            **of_request(call.prepared.prompts[0].request),
            **of_output(
                call.num_prompt_tokens,
                generation.num_tokens,
                [choice.finish_reason for choice in generation.choices],
            ),
            "gen_ai.response.id": call.answer_id,
        },
    )
