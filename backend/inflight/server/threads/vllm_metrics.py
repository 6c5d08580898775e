"""vLLM's metric families, for the model of its dialect: its names and buckets for what our families count too.

Knows nothing of pb_utils.
"""

from __future__ import annotations

from collections.abc import Mapping

from inflight import metric_families as mf
from inflight.metric_families import Family

# fmt: off
FIRST_TOKEN_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
)
PER_TOKEN_BUCKETS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
LATENCY_BUCKETS = (1.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0)
# fmt: on


def vllm_families(max_seq_len: int) -> Mapping[str, tuple[Family, ...]]:
    """The name of a family of ours -> vLLM's families to which its values go as well. `max_seq_len`: in tokens."""
    tokens = length_buckets(max_seq_len)
    return {
        mf.INPUT_TOKENS.name: (
            _counter("prompt_tokens_total", "Prompt tokens of all requests"),
            _histogram("request_prompt_tokens", "Prompt tokens of a request", tokens),
        ),
        mf.OUTPUT_TOKENS.name: (
            _counter("generation_tokens_total", "Generated tokens of all requests"),
            _histogram("request_generation_tokens", "Generated tokens of a request", tokens),
        ),
        mf.TIME_TO_FIRST_TOKEN.name: (
            _histogram("time_to_first_token_seconds", mf.TIME_TO_FIRST_TOKEN.description, FIRST_TOKEN_BUCKETS),
        ),
        mf.TIME_PER_OUTPUT_TOKEN.name: (
            _histogram("time_per_output_token_seconds", mf.TIME_PER_OUTPUT_TOKEN.description, PER_TOKEN_BUCKETS),
        ),
        mf.END_TO_END.name: (_histogram("e2e_request_latency_seconds", mf.END_TO_END.description, LATENCY_BUCKETS),),
        mf.SEQUENCES: (_histogram("request_params_n", "Sequences of a request", (1.0, 2.0, 5.0, 10.0, 20.0)),),
    }


def length_buckets(longest: int) -> tuple[float, ...]:
    """1, 2, 5, 10, 20, 50, … up to `longest`."""
    buckets: list[float] = []
    power = 1
    while True:
        for digit in (1, 2, 5):
            if digit * power > longest:
                return tuple(buckets)
            buckets.append(float(digit * power))
        power *= 10


def _counter(name: str, description: str) -> Family:
    return Family(name=f"vllm:{name}", description=description, kind="COUNTER")


def _histogram(name: str, description: str, buckets: tuple[float, ...]) -> Family:
    return Family(name=f"vllm:{name}", description=description, kind="HISTOGRAM", buckets=buckets)
