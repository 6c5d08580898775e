"""The load test without a server: sweeps, prompts, what an export means, what is drawn and written.

pytest ci/unit/client/test_load_test.py
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, ClassVar

import pytest
from load_exports import MS, ONE, RecordingAnalyzer, exported, result_of, two_sweeps, write_export

from inflight_client import Client, ClientError, LoadTestError, MockTransport, UsageError, text_reply
from inflight_client._exceptions import ConnectError, ModelNotFound
from inflight_client.load_test import (
    Level,
    LoadMode,
    LoadTestOptions,
    PromptOptions,
    parse_length,
    parse_sweep,
    run_load_test,
)
from inflight_client.load_test.perf_analyzer import MeasurementsLost, PerfAnalyzer, failure_reason
from inflight_client.load_test.profile import read_level
from inflight_client.load_test.prompts import Prompt, make_prompts
from inflight_client.load_test.results import RequestTimeline, summarise
from inflight_client.load_test.tensor_requests import RequestForm, make_requests


@pytest.mark.parametrize(
    ("text", "values"),
    [("8", [8]), ("1:16:5", [1, 6, 11, 16]), ("1:15:5", [1, 6, 11]), ("1,4,16", [1, 4, 16]), ("3:3:1", [3])],
)
def test_sweeps(text: str, values: list[float]) -> None:
    assert [level.value for level in parse_sweep(text, LoadMode.CONCURRENCY)] == values


def test_rates_may_be_fractions_and_end_where_they_should() -> None:
    levels = parse_sweep("0.1:0.3:0.1", LoadMode.REQUEST_RATE)
    assert [level.value for level in levels] == pytest.approx([0.1, 0.2, 0.3])


@pytest.mark.parametrize("text", ["", "x", "1:2", "1:2:0", "5:1:1", "0", "-1", "1.5", "1:1e9:1", "nan", "1:inf:1"])
def test_sweeps_that_are_none(text: str) -> None:
    with pytest.raises(UsageError):
        parse_sweep(text, LoadMode.CONCURRENCY)


def test_heavier_levels_have_more_requests_unless_told() -> None:
    few, many = parse_sweep("1,100", LoadMode.CONCURRENCY)
    assert few.num_requests < many.num_requests
    told = parse_sweep("1,100", LoadMode.CONCURRENCY, num_requests=7)
    assert [level.num_requests for level in told] == [7, 100]


def test_lengths() -> None:
    assert (parse_length("64"), parse_length("32:256")) == ((64, 64), (32, 256))
    for text in ("", "a", "1:2:3"):
        with pytest.raises(UsageError):
            parse_length(text)
    with pytest.raises(UsageError):
        PromptOptions(input_tokens=(5, 2))


def test_no_prompt_is_sent_twice_and_a_run_can_be_repeated() -> None:
    options = PromptOptions(input_tokens=(16, 32), output_tokens=(4, 8))
    levels = [make_prompts(options, 50, level=str(number)) for number in range(3)]
    prompts = [tuple(prompt.content) for level in levels for prompt in level]
    assert len(set(prompts)) == 150
    assert {len(prompt) for prompt in prompts} <= set(range(16, 33))
    assert levels[1] == make_prompts(options, 50, level="1")
    words = make_prompts(options, 50, level="1", as_text=True)
    assert len({prompt.content for prompt in words}) == 50
    assert all(isinstance(prompt.content, str) and 16 <= len(prompt.content.split()) <= 32 for prompt in words)


@pytest.mark.parametrize(
    ("inputs", "form", "sent"),
    [
        (
            ["text_input", "input_ids", "max_tokens", "end_id"],
            RequestForm.LLM,
            {"input_ids": [1, 2], "max_tokens": [5], "end_id": [-1], "temperature": [0.5], "seed": [7]},
        ),
        (
            ["text_input", "max_tokens", "end_id"],
            RequestForm.TENSORRT_LLM,
            {"text_input": ["a b"], "max_tokens": [5], "end_id": [-1], "temperature": [0.5], "seed": [7]},
        ),
        (
            ["text_input", "stream", "sampling_parameters"],
            RequestForm.VLLM,
            {
                "text_input": ["a b"],
                "sampling_parameters": ['{"max_tokens": 5, "temperature": 0.5, "seed": 7, "ignore_eos": true}'],
                "return_finish_reason": [True],
            },
        ),
    ],
)
def test_requests_have_the_tensors_of_the_model(inputs: list[str], form: RequestForm, sent: dict[str, Any]) -> None:
    assert RequestForm.of("m", inputs) is form
    prompt = Prompt([1, 2] if form.takes_token_ids else "a b", 5, 7)
    (request,) = make_requests([prompt], 0.5, form)
    usual = ("stream", "exclude_input_in_output", "return_num_input_tokens", "return_num_output_tokens")
    assert {name: tensor["content"] for name, tensor in request.items()} == {**{key: [True] for key in usual}, **sent}
    assert form.max_tokens({name: tensor["content"][0] for name, tensor in request.items()}) == 5


def test_a_model_that_takes_no_text_is_refused() -> None:
    with pytest.raises(LoadTestError, match="does not know the inputs of tensorrt_llm"):
        RequestForm.of("tensorrt_llm", ["input_ids", "request_output_len"])


def test_prompts_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "prompts").write_text("one\n\ntwo\n")
    prompts = make_prompts(PromptOptions(prompt_file=tmp_path / "prompts"), 3, level="0")
    assert [prompt.content for prompt in prompts] == ["one", "two", "one"]
    (tmp_path / "prompts").write_text("\n")
    with pytest.raises(UsageError, match="no prompts"):
        make_prompts(PromptOptions(prompt_file=tmp_path / "prompts"), 1, level="0")


def test_latencies_of_single_tokens() -> None:
    result = result_of(exported((10, 1), (15, 1), (25, 1), sent=0))
    assert result.time_to_first_token.p50 == pytest.approx(10)
    assert result.inter_token_latency.mean == pytest.approx(7.5)
    assert result.end_to_end_latency.p50 == pytest.approx(25)
    assert result.output_tokens_per_s == pytest.approx(3 / 0.025)


def test_merged_tokens_share_the_gap_before_them() -> None:
    result = result_of(exported((10, 1), (30, 4), (33, 1)))
    assert result.inter_token_latency.mean == pytest.approx((4 * 5 + 3) / 5)
    assert result.inter_token_latency.p50 == pytest.approx(5)
    assert result.inter_response_latency.mean == pytest.approx((20 + 3) / 2)
    assert result.tokens_per_response == pytest.approx(2)


def test_an_empty_final_response_counts_for_the_end_only() -> None:
    with_it, without = result_of(exported((10, 1), (15, 2), final_at=40)), result_of(exported((10, 1), (15, 2)))
    assert with_it.num_output_tokens == without.num_output_tokens == 3
    assert with_it.num_input_tokens == 5
    assert with_it.inter_token_latency == without.inter_token_latency
    assert (with_it.end_to_end_latency.p50, without.end_to_end_latency.p50) == (pytest.approx(40), pytest.approx(15))


def test_tokens_that_are_only_told_in_sum_share_the_time_behind_the_first_response() -> None:
    one = RequestTimeline(0, (10 * MS, 20 * MS, 40 * MS), None, 7, 50 * MS)
    single = RequestTimeline(0, (10 * MS,), None, 3, 50 * MS)
    result = summarise(ONE, [one, single])
    assert result.num_output_tokens == 10
    assert (result.inter_token_latency.p50, result.inter_token_latency.num_samples) == (pytest.approx(5), 1)
    assert result.inter_response_latency.mean == pytest.approx(15)


@pytest.mark.parametrize(("num_samples", "p90", "p99"), [(9, False, False), (10, True, False), (100, True, True)])
def test_percentiles_that_the_samples_do_not_carry_are_not_stated(num_samples: int, p90: bool, p99: bool) -> None:
    result = result_of(*[exported((number + 1, 8), (number + 2, 8)) for number in range(num_samples)])
    for latency in (result.time_to_first_token, result.inter_token_latency):
        assert not math.isnan(latency.p50)
        assert (not math.isnan(latency.p90), not math.isnan(latency.p99)) == (p90, p99)
    assert result.lacks_samples is not p99


def test_throughput_is_over_the_whole_level() -> None:
    result = result_of(exported((10, 1), sent=0), exported((500, 1), sent=100))
    assert result.requests_per_s == pytest.approx(4)


def test_one_response_a_request_has_no_latency_between() -> None:
    assert math.isnan(result_of(exported((10, 8))).inter_token_latency.p50)


@pytest.mark.parametrize(
    ("requests", "words"),
    [
        ([], "only 0 of 2 requests"),
        ([exported((1, 1))], "only 1 of 2 requests"),
        (
            [exported((1, 1)), {**exported((1, 1)), "response_outputs": [], "response_timestamps": []}],
            "without a token",
        ),
        ([exported((1, 1)), {**exported((1, 1)), "response_outputs": []}], "ended with an error"),
        ([exported((1, 1)), {"timestamp": 1}], "cannot be read"),
    ],
)
def test_an_export_that_lacks_something_is_an_error(tmp_path: Path, requests: list[dict[str, Any]], words: str) -> None:
    with pytest.raises(LoadTestError, match=words):
        read_level(write_export(tmp_path / "e", *requests), Level(LoadMode.CONCURRENCY, 2, 2))


def test_the_reason_of_a_failure_is_found_in_the_output() -> None:
    output = (
        "*** Measurement Settings ***\nFailed to retrieve results\nThread [0] had error: Exceeds maximum queue size\n"
    )
    assert failure_reason(output) == "Exceeds maximum queue size"
    assert failure_reason("x: error while loading shared libraries: libb64.so.0d: cannot open shared object file") == (
        "x: error while loading shared libraries: libb64.so.0d: cannot open shared object file"
    )
    assert failure_reason("Error: request-count is wrong\nUsage: perf_analyzer\n -m: fails on error\n") == (
        "Error: request-count is wrong"
    )
    assert failure_reason("") == "it gave no reason"


def fake_perf_analyzer(folder: Path, script: str) -> None:
    binary = folder / "perf_analyzer"
    binary.write_text(f"#!/bin/sh\n{script}\n")
    binary.chmod(0o755)


@pytest.mark.parametrize(
    ("script", "timeout", "words"),
    [
        ("exit 0", 100, "wrote no measurements"),
        ("echo 'Thread [0] had error: boom'; exit 99", 100, "concurrency 1: boom .perf_analyzer ended with code 99."),
        ("exec sleep 60", 0.2, "not finished after 0.2 s"),
    ],
)
def test_a_run_without_measurements_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, timeout: float, words: str
) -> None:
    fake_perf_analyzer(tmp_path, script)
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
    with pytest.raises(LoadTestError, match=words):
        PerfAnalyzer(tmp_path).run(ONE, url="x", model="llm", inputs=tmp_path / "inputs", timeout=timeout)


@pytest.mark.parametrize("script", ["exit 0", "echo 'failed to find the requested model version'; exit 99"])
def test_a_run_whose_measurements_are_lost_may_be_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str
) -> None:
    fake_perf_analyzer(tmp_path, script)
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
    with pytest.raises(MeasurementsLost):
        PerfAnalyzer(tmp_path).run(ONE, url="x", model="llm", inputs=tmp_path / "inputs")


def test_a_missing_perf_analyzer_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LoadTestError, match="pip install"):
        PerfAnalyzer(tmp_path)


class LosingAnalyzer(RecordingAnalyzer):
    """Loses what it measured until it has run `losses` times more."""

    losses: ClassVar[int] = 0

    def run(self, level: Level, *, url: str, model: str, inputs: Path, timeout: float = 0) -> Path:
        export = super().run(level, url=url, model=model, inputs=inputs)
        LosingAnalyzer.losses -= 1
        if LosingAnalyzer.losses >= 0:
            export.write_text(export.read_text()[:-20])
        return export


def test_a_level_whose_measurements_are_lost_runs_again_with_other_prompts() -> None:
    RecordingAnalyzer.inputs.clear()
    LosingAnalyzer.losses = 2
    client = Client(transport=MockTransport(lambda call: [text_reply("x", final=True)]))
    report = run_load_test(LoadTestOptions(levels=[ONE]), client=client, analyzer=LosingAnalyzer)
    assert len(report.levels) == 1
    first, second, third = (json.dumps(inputs) for inputs in RecordingAnalyzer.inputs)
    assert len({first, second, third}) == 3


def test_a_level_whose_measurements_are_always_lost_fails() -> None:
    LosingAnalyzer.losses = 100
    client = Client(transport=MockTransport(lambda call: [text_reply("x", final=True)]))
    with pytest.raises(LoadTestError, match="cut off"):
        run_load_test(LoadTestOptions(levels=[ONE]), client=client, analyzer=LosingAnalyzer)


def test_every_level_is_measured_with_prompts_of_its_own() -> None:
    RecordingAnalyzer.inputs.clear()
    report = two_sweeps()
    assert [(result.mode, result.value) for result in report.levels] == [
        (LoadMode.CONCURRENCY, 1),
        (LoadMode.CONCURRENCY, 4),
        (LoadMode.REQUEST_RATE, 9),
    ]
    first, second, third = (json.dumps(inputs) for inputs in RecordingAnalyzer.inputs)
    assert len({first, second, third}) == 3


@pytest.mark.parametrize("error", [ConnectError("no server answers there"), ModelNotFound("no such model")])
def test_what_is_not_there_is_not_waited_for(error: ClientError) -> None:
    class Nowhere(MockTransport):
        def model_config(self, model: str, timeout: float) -> dict[str, Any]:
            raise error

        def model_ready(self, model: str, timeout: float) -> bool:
            raise AssertionError("it is waited for")

    with pytest.raises(type(error)):
        run_load_test(LoadTestOptions(levels=[ONE]), client=Client(transport=Nowhere(lambda call: [])))


def test_no_level_is_no_test() -> None:
    with pytest.raises(UsageError, match="no level"):
        run_load_test(LoadTestOptions(levels=[]))
