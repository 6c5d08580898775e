"""What a load test tells: its table, its page, its JSON, and of which server."""

from __future__ import annotations

import io
import json
import re
from datetime import datetime, timezone
from pathlib import Path

import pytest
from load_exports import ONE, exported, result_of, two_sweeps
from rich.console import Console

from ci.unit.http.page.browser import Browser, find_chromium
from inflight_client import LoadTestError
from inflight_client.load_test import (
    LoadTestOptions,
    LoadTestReport,
    table,
    write_report,
)
from inflight_client.load_test.page import page as html_page
from inflight_client.load_test.profile import timeline
from inflight_client.load_test.results import summarise
from inflight_client.load_test.server_facts import ServerFacts, _engine, usual_metrics_address


def test_the_table_fits_a_terminal() -> None:
    slow = result_of(exported((1234, 1), (2468, 1)))
    drawn = io.StringIO()
    report = LoadTestReport(options=LoadTestOptions(levels=[ONE]), started=datetime.now(timezone.utc), levels=[slow])
    Console(file=drawn, width=80).print(table(report))
    assert "…" not in drawn.getvalue() and drawn.getvalue().count("2468") == 1
    assert "too few samples, it takes 10 for p90 and 100 for p99" in drawn.getvalue()


def test_the_report_is_complete_and_needs_no_network(tmp_path: Path) -> None:
    write_report(two_sweeps(), tmp_path / "made" / "here")
    written = tmp_path / "made" / "here"
    results = json.loads((written / "results.json").read_text())
    assert [level["inter_token_latency"]["p50"] for level in results["levels"]] == [pytest.approx(10 / 3)] * 3
    assert [level["inter_token_latency"]["p99"] for level in results["levels"]] == [None] * 3
    assert results["server"]["engine"] is None and "--metrics-url" in results["server"]["unknown"]
    assert (written / "plot.png").read_bytes().startswith(b"\x89PNG")
    page = (written / "report.html").read_text()
    assert "&lt;llm&gt;" in page and "<llm>" not in page
    assert page.count("<tr>") == 4 and page.count("<svg") == 8
    assert not re.search(r"<script|<link|<img|src=|@import|url\(http", page)


def test_the_report_says_what_was_measured_and_what_failed() -> None:
    engine = {"checkpoint": "tiny", "architecture": "Llama", "dtype": "bfloat16", "layers": "native", "num_ranks": "2"}
    engine |= {"device": "cuda", "device_name": "H100", "inflight_version": "1", "torch_version": "2"}
    levels = [summarise(ONE, [timeline(exported((10, 8)))], {"503: full": 3})]
    report = LoadTestReport(
        options=LoadTestOptions(levels=[ONE]),
        started=datetime.now(timezone.utc),
        levels=levels,
        server=ServerFacts(engine=engine, tritonserver="2.51.0"),
    )
    drawn = io.StringIO()
    Console(file=drawn, width=200).print(table(report))
    assert "tiny (Llama), bfloat16, native layers, 2 ranks on H100; inflight 1, torch 2, tritonserver 2.51.0" in (
        drawn.getvalue()
    )
    assert "concurrency 1: 3 of 4 requests failed, 503: full" in drawn.getvalue()
    page = html_page(report)
    assert "<dd>bfloat16</dd>" in page and "requests, 3 failed" in page


def test_the_report_says_how_ranks_share_the_work() -> None:
    engine = {"device": "cpu", "num_ranks": "8", "pipeline_parallel_size": "2", "data_parallel_size": "4"}
    assert "8 ranks (2 stages, 4 replicas) on cpu" in ServerFacts(engine=engine).sentence()


@pytest.mark.parametrize(
    ("url", "address"),
    [("localhost:8001", "localhost:8002"), ("[::1]:8001", "[::1]:8002"), ("localhost:9001", ""), ("localhost", "")],
)
def test_metrics_are_looked_for_where_they_usually_are(url: str, address: str) -> None:
    assert usual_metrics_address(url) == address


def test_of_several_models_the_engine_of_the_measured_one_is_told() -> None:
    text = "# TYPE inflight_engine_info gauge\n" + "".join(
        f'inflight_engine_info{{checkpoint="{name}",model="{model}",pid="1",version="1"}} 1\n'
        for name, model in (("a", "llm"), ("b", "other"))
    )
    found = _engine(text, "other")
    assert found is not None and found.engine == {"checkpoint": "b"}
    assert _engine("nv_inference_count 1\n", "llm") is None


@pytest.mark.slow
@pytest.mark.skipif(find_chromium() is None, reason="there is no Chromium: name one in INFLIGHT_CHROMIUM")
@pytest.mark.parametrize("is_dark", [False, True])
def test_the_page_fits_a_phone_and_a_screen(tmp_path: Path, is_dark: bool) -> None:
    program = find_chromium()
    assert program is not None
    write_report(two_sweeps(), tmp_path)
    with Browser(program) as browser:
        for width in (390, 1280):
            browser.show(f"file://{tmp_path}/report.html", width=width, is_dark=is_dark)
            assert browser.run("document.documentElement.scrollWidth") == width
            seen = browser.run("[...document.querySelectorAll('svg')].map(svg => svg.getBoundingClientRect().width)")
            assert len(seen) == 8 and all(200 < each < width for each in seen)
        text, paper = (browser.run(f"getComputedStyle(document.body).{name}") for name in ("color", "backgroundColor"))
        assert (_brightness(text) > _brightness(paper)) is is_dark
        assert browser.problems == []


def _brightness(colour: str) -> int:
    return sum(map(int, re.findall(r"\d+", colour)))


def test_figures_that_are_not_numbers_are_null_in_json(tmp_path: Path) -> None:
    report = LoadTestReport(
        options=LoadTestOptions(levels=[ONE]),
        started=datetime.now(timezone.utc),
        levels=[result_of(exported((10, 8)))],
    )
    write_report(report, tmp_path)
    results = json.loads((tmp_path / "results.json").read_text(), parse_constant=lambda name: pytest.fail(name))
    assert results["levels"][0]["inter_token_latency"]["p50"] is None


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(LoadTestError, match="cannot be written"):
        write_report(two_sweeps(), tmp_path / "file")
