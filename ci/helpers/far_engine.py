"""An engine for one request: goes on from the ContextPhaseParams on standard input, and prints what it generated.

python far_engine.py '{"dtype": "float32", …}' < params
"""

from __future__ import annotations

import json
import sys

from outer_jobs import MODEL

from inflight.context_phase import ContextPhaseParams, RequestType
from inflight.executor.in_process import InProcessExecutor
from inflight.model_config import read_engine_config
from inflight.request import Request

PROMPT, NUM_TOKENS = list(range(100, 150)), 12


def request(kind: RequestType, params: ContextPhaseParams | None = None) -> Request:
    return Request(input_token_ids=PROMPT, max_tokens=NUM_TOKENS, request_type=kind, context_phase_params=params)


def main() -> None:
    params = ContextPhaseParams.deserialize(sys.stdin.buffer.read())
    _, config = read_engine_config(MODEL, json.loads(sys.argv[1]))
    with InProcessExecutor(config) as executor:
        request_id = executor.enqueue_request(request(RequestType.GENERATION_ONLY, params))
        (response,) = executor.await_responses(request_id)
    assert response.result is not None and response.result.request_perf_metrics is not None, response.error_msg
    num_cached = response.result.request_perf_metrics.num_cached_tokens
    print(json.dumps({"tokens": response.result.output_token_ids, "num_cached": num_cached}))


if __name__ == "__main__":
    main()
