"""The load test with the real perf_analyzer against a real tritonserver, and the console command on it.

pytest ci/L0_client/test_load_test.py
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from inflight_client import LoadTestError
from inflight_client.cli import app
from inflight_client.load_test import LoadMode, LoadTestOptions, PromptOptions, parse_sweep, run_load_test


def test_two_sweeps_are_measured_written_and_drawn(url: str, tmp_path: Path) -> None:
    arguments = ["load-test", "--url", url, "--concurrency", "1,3", "--request-rate", "10", "--requests", "12"]
    result = CliRunner().invoke(app, [*arguments, "--output-tokens", "6", "--output", str(tmp_path)])
    assert result.exit_code == 0, result.output
    levels = json.loads((tmp_path / "results.json").read_text())["levels"]
    assert [(level["mode"], level["value"]) for level in levels] == [
        ("concurrency", 1),
        ("concurrency", 3),
        ("request_rate", 10),
    ]
    for level in levels:
        assert level["num_requests"] == 12
        assert level["num_output_tokens"] == 12 * 6
        assert level["requests_per_s"] > 0 and level["output_tokens_per_s"] > 0
        assert 0 < level["time_to_first_token"]["p50"] <= level["end_to_end_latency"]["p50"]
        assert level["inter_token_latency"]["p50"] > 0
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize(("word", "reason"), [("refuse", "Exceeds maximum queue size"), ("broken", "forward pass")])
def test_a_server_that_refuses_says_why(url: str, tmp_path: Path, word: str, reason: str) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text(word)
    options = LoadTestOptions(
        levels=parse_sweep("2", LoadMode.CONCURRENCY), url=url, prompts=PromptOptions(prompt_file=prompts)
    )
    with pytest.raises(LoadTestError, match=reason):
        run_load_test(options)


def test_an_error_under_load_fails_the_level(url: str, tmp_path: Path) -> None:
    """The first prompt, that of the warm-up, is answered; a later one is not."""
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("count\nbroken\n")
    options = LoadTestOptions(
        levels=parse_sweep("2", LoadMode.CONCURRENCY), url=url, prompts=PromptOptions(prompt_file=prompts)
    )
    with pytest.raises(LoadTestError, match="concurrency 2: the forward pass failed"):
        run_load_test(options)


def test_prompts_go_on_from_the_command_line(url: str) -> None:
    result = CliRunner().invoke(app, ["generate", "count", "--max-tokens", "4", "--url", url])
    assert (result.exit_code, result.output) == (0, "0 1 2 3 \n")
