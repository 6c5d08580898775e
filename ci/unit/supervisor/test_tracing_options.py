"""One parameter of the engine switches tritonserver's tracing on, too, unless the operator sends traces elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from inflight.config import EngineConfig
from inflight.supervisor.options import ServeOptions
from inflight.supervisor.plan import _tracing
from inflight.supervisor.repository import ServedRepository

ENDPOINT = "http://localhost:4318/v1/traces"


def served(endpoint: str) -> ServedRepository:
    config = EngineConfig(otlp_traces_endpoint=endpoint)
    return ServedRepository(
        path=Path("models"), models=("llm",), attached={}, engine="llm", answering=("llm",), config=config
    )


def test_its_spans_go_where_ours_go() -> None:
    assert f"--trace-config=opentelemetry,url={ENDPOINT}" in _tracing(ServeOptions(), served(ENDPOINT))


@pytest.mark.parametrize("arguments", [("--trace-config=rate=100",), ("--trace-config", "rate=100")])
def test_an_operators_setting_counts_before_ours(arguments: tuple[str, ...]) -> None:
    ours = _tracing(ServeOptions(server_arguments=arguments), served(ENDPOINT))
    assert not any("rate" in argument for argument in ours)
    assert {"--trace-config=mode=opentelemetry", "--trace-config=level=TIMESTAMPS"} < set(ours)


@pytest.mark.parametrize(
    ("arguments", "endpoint"),
    [
        ((), ""),
        (("--trace-config=mode=triton",), ENDPOINT),
        (("--trace-config", "triton,file=/tmp/trace.json"), ENDPOINT),
    ],
)
def test_otherwise_nothing_is_added(arguments: tuple[str, ...], endpoint: str) -> None:
    assert _tracing(ServeOptions(server_arguments=arguments), served(endpoint)) == ()
