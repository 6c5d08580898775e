"""Options that are handed on to tritonserver, and those that the supervisor keeps to itself.

pytest ci/unit/supervisor/test_server_arguments.py
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from inflight.errors import ConfigurationError
from inflight.supervisor import server_arguments
from inflight.supervisor.options import ServeOptions
from inflight_client.cli import app


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--trace-config=mode=opentelemetry", "--trace-config", "opentelemetry,url=localhost:4318/v1/traces"],
        ["--trace-config", "triton,file=/tmp/trace.json", "--trace-config", "rate=1"],
        ["--rate-limit=execution_count", "--rate-limit-resource=R1:4:0"],
        ["--backend-config=python,stub-timeout-seconds=60", "--log-verbose", "1"],
        ["--model-load-thread-count=2", "--http-thread-count", "4"],
    ],
)
def test_what_the_supervisor_does_not_rely_on_is_handed_on(arguments: list[str]) -> None:
    server_arguments.check(arguments)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--http-port=1"], "tritonserver's --http-port is inflight's own: use --host, --http-port"),
        (["--rate-limit=off", "--grpc-port", "1"], "tritonserver's --grpc-port is inflight's own: .* --grpc-port"),
        (["--model-repository", "/x"], "use --model-repository of inflight serve"),
        (["--http-restricted-api=health:a=b"], "use --api-key-file or --open-apis"),
        (["--model-control-mode=poll"], "--open-apis or --api-key-file lets a client"),
        (["--exit-timeout-secs=1"], "use --drain-timeout"),
        (["--log-file=/x"], "use --verbose or --log-file"),
        (["--allow-sagemaker=true"], "pass by the API key"),
        (["--backend-config=python,shm-region-prefix-name=x"], "shm-region-prefix-name is inflight's own"),
        (["--trace-config=triton,file=trace.json"], "the trace file trace.json needs a full path"),
        (["--trace-config", "triton,file=trace.json"], "the trace file trace.json needs a full path"),
        (["--help"], "ask tritonserver itself"),
        (["model"], "'model' is no option of tritonserver"),
        (["--rate-limit=off", "model"], "'model' is no option of tritonserver"),
        (["-v"], "'-v' is no option of tritonserver"),
    ],
)
def test_what_it_relies_on_is_refused_in_one_sentence(arguments: list[str], sentence: str) -> None:
    with pytest.raises(ConfigurationError, match=sentence) as refused:
        server_arguments.check(arguments)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("words", "checkpoint", "handed_on"),
    [
        (["--"], None, ()),
        (["--", "--rate-limit=off", "--log-verbose", "1"], None, ("--rate-limit=off", "--log-verbose", "1")),
        (["folder", "--no-demo", "--", "--id=x"], Path("folder"), ("--id=x",)),
    ],
)
def test_the_command_line_hands_on_what_stands_behind_two_dashes(
    monkeypatch: pytest.MonkeyPatch, words: list[str], checkpoint: Path | None, handed_on: tuple[str, ...]
) -> None:
    seen: list[ServeOptions] = []
    monkeypatch.setattr("inflight.supervisor.serve.serve", lambda options: seen.append(options) or 0)
    result = CliRunner().invoke(app, ["serve", *words])
    assert result.exit_code == 0, result.output
    assert [(options.checkpoint, options.server_arguments) for options in seen] == [(checkpoint, handed_on)]


def test_what_is_refused_is_one_line_and_exit_code_2() -> None:
    result = CliRunner().invoke(app, ["serve", "--", "--http-port=1"])
    assert result.exit_code == 2 and result.stderr.startswith("inflight: tritonserver's --http-port is inflight's own")
    assert CliRunner().invoke(app, ["serve", "--help"]).stdout.count("[-- TRITON_OPTIONS]") == 1


def test_the_options_that_are_named_instead_are_ours() -> None:
    (command,) = [each for name, each in get_command(app).commands.items() if name == "serve"]  # type: ignore[attr-defined]
    ours = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    for sentence in server_arguments.OWNED.values():
        assert set(re.findall(r"--[a-z-]+[a-z]", sentence)) <= ours
