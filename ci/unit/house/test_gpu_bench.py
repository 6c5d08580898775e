"""The first run on a GPU stays able to run: its dry run, its page, and how it divides the time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from zipfile import ZipFile

import pytest
import torch

from ci.bench.gpu import __main__ as bench
from ci.bench.gpu import schedule
from ci.bench.gpu.expected import expectations
from ci.bench.gpu.figure import Expected, Figure
from ci.bench.gpu.page import PAGE, with_tables
from ci.bench.gpu.part import Given, Outcome, Part
from ci.bench.gpu.parts import PARTS
from ci.bench.gpu.predictions import ASSUMED, ASSUMED_BYTES
from ci.bench.gpu.process import Running
from ci.bench.gpu.report import Report
from ci.bench.gpu.result_folder import keep_files, make_result_folder
from ci.bench.gpu.result_page import result_page
from ci.bench.gpu.schedule import Schedule
from ci.bench.gpu.sizes import FULL, TINY
from ci.bench.gpu.trace import Span, Trace, tracing

ROOT = Path(__file__).resolve().parents[3]
RATES = ("copy", "read", "bf16 product", "fp8 product", "one kernel more in a graph", "replay of a graph of one kernel")
"""Of a GPU, which the dry run does not measure."""
NOT_INSTALLED = {"vllm"}
"""Parts that need a package which is no dependency."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a dry run has kept, and its last line."""
    parent = tmp_path_factory.mktemp("results")
    environment = os.environ | {"PYTHONPATH": ".:backend:kernels:client"}
    command = [sys.executable, "-m", "ci.bench.gpu", "--minutes", "30", "--results", str(parent)]
    done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 0, done.stdout
    (folder,) = parent.iterdir()
    Path(folder, "last-line").write_text(done.stdout.splitlines()[-1])
    return folder


@pytest.fixture(scope="module")
def found(folder: Path) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads(Path(folder, "result.json").read_text())
    return summary


@pytest.mark.slow
def test_a_run_leaves_few_files_and_ends_with_what_it_measured(folder: Path, found: dict[str, Any]) -> None:
    kept = {path.name for path in folder.iterdir()} - {"last-line"}
    assert kept == {"result.json", "report.md", "timeline.png", "failures.txt", "parts.zip"}
    last = json.loads(Path(folder, "last-line").read_text())
    figures = [figure for part in found["parts"].values() for figure in part["figures"]]
    assert last["measured"] == {figure["name"]: figure["measured"] for figure in figures}
    assert (last["wrong"], last["missed"], last["not_done"]) == ([], [], found["not_done"])
    page = Path(folder, "report.md").read_text()
    assert all(f"## {part.name}" in page for part in PARTS) and "| 8B decode step, batch 1, graphs, ms |" in page


@pytest.mark.slow
def test_every_part_runs_without_a_gpu_or_says_why_not(found: dict[str, Any]) -> None:
    statuses = {name: part["status"] for name, part in found["parts"].items()}
    expected = dict.fromkeys((part.name for part in PARTS), "done")
    expected |= dict.fromkeys(NOT_INSTALLED, "skipped")
    assert statuses == expected, found["not_done"]
    assert found["not_done"].keys() == NOT_INSTALLED
    assert all(found["not_done"].values())
    assert found["machine"]["device"].startswith("none") and found["machine"]["date"]


@pytest.mark.slow
def test_what_is_expected_of_a_part_is_measured(found: dict[str, Any]) -> None:
    figures = [figure for part in found["parts"].values() for figure in part["figures"]]
    names = [figure["name"] for figure in figures]
    assert len(set(names)) == len(names)
    missing = expectations(ASSUMED, ASSUMED_BYTES, TINY).keys() - set(names)
    # Of an engine or an attention that this machine lacks.
    others = ("vLLM", "transformers with flash", "8B against transformers with flash")
    assert {name for name in missing if not name.startswith(others)} == set(RATES)


@pytest.mark.slow
def test_tokens_are_right_in_the_dry_run_too(found: dict[str, Any]) -> None:
    figures = [figure for part in found["parts"].values() for figure in part["figures"]]
    exact = [figure for figure in figures if "is_exact" in figure]
    assert len(exact) >= 10
    assert [figure["name"] for figure in exact if not figure["met"]] == []
    assert all("is_exact" in figure for figure in figures if "goal" in figure)


def test_the_page_has_the_parts_and_the_predictions() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert with_tables(page) == page, "python -m ci.bench.gpu.page brings it up to date"
    assert all(f"| `{part.name}` |" in page for part in PARTS) and "| E1 | 8B decode step, batch 1, graphs |" in page


def test_every_goal_has_a_figure() -> None:
    goals = {each.goal_of for each in expectations(ASSUMED, ASSUMED_BYTES, FULL).values()}
    assert goals - {""} == {f"E{number}" for number in range(1, 14)} - {"E10"}


# -- the time ----------------------------------------------------------------------------------------------------------


class FakeRunning:
    """Stands for Running: a part that takes all of its time, of a clock that only it moves."""

    now = 0.0
    begun: list[tuple[str, float, float]]

    def __init__(self, part: Part, given: Given) -> None:
        self.part = part
        self._end = self.now + given.seconds
        self.begun.append((part.name, self.now, given.seconds))

    def poll(self) -> Outcome | None:
        return Outcome(status="done") if self.now >= self._end else None

    def end(self) -> None:
        return None

    @classmethod
    def sleep(cls, seconds: float) -> None:
        """At least a second, so that times are whole."""
        cls.now += 1


def made_part(name: str, most: float, least: float = 1, **options: Any) -> Part:
    return Part(name=name, text="", run="nowhere:nothing", most=most, least=least, **options)


def run_schedule(
    parts: list[Part], seconds: float, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[tuple[str, float, float]], dict[str, Outcome]]:
    """(name, beginning, seconds given) of the parts that began, and all outcomes."""
    monkeypatch.setattr(FakeRunning, "now", 0.0)
    monkeypatch.setattr(FakeRunning, "begun", [], raising=False)
    monkeypatch.setattr(schedule, "Running", FakeRunning)
    clock = SimpleNamespace(monotonic=lambda: FakeRunning.now, sleep=FakeRunning.sleep)
    monkeypatch.setattr(schedule, "time", clock)
    outcomes: dict[str, Outcome] = {}
    given = Given(is_dry=False, seconds=seconds, folder=folder)
    Schedule(given, lambda part, outcome: outcomes.update({part.name: outcome})).run(parts)
    return FakeRunning.begun, outcomes


def test_parts_that_are_not_timed_run_beside_each_other_and_the_others_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = [
        made_part("a", 30, is_timed=False),
        made_part("b", 50, is_timed=False),
        made_part("c", 10),
        made_part("d", 5),
    ]
    begun, _ = run_schedule(parts, 100, tmp_path, monkeypatch)
    assert begun == [("a", 0, 30), ("b", 0, 50), ("c", 50, 10), ("d", 60, 5)]


def test_what_has_no_time_left_is_skipped_and_a_shorter_part_still_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = [made_part("a", 60), made_part("b", 60, least=45), made_part("c", 60, least=20), made_part("d", 60)]
    begun, outcomes = run_schedule(parts, 100, tmp_path, monkeypatch)
    assert begun == [("a", 0, 60), ("c", 60, 40)]
    assert (outcomes["b"].status, outcomes["b"].why) == ("skipped", "40 s were left, and it needs 45")
    assert outcomes["d"].status == "skipped"


def test_a_part_whose_peer_is_missing_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = [made_part("a", 60, peer="no_such_module_anywhere"), made_part("b", 5, peer="json")]
    begun, outcomes = run_schedule(parts, 100, tmp_path, monkeypatch)
    assert [name for name, *_ in begun] == ["b"]
    assert outcomes["a"].why == "no_such_module_anywhere is not installed"


def test_packages_that_are_missing_are_named_at_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "find_spec", lambda module: None if module in ("msgspec", "zmq") else module)
    monkeypatch.setattr(sys, "argv", ["gpu-bench"])
    with pytest.raises(SystemExit):
        bench.main()
    told = capsys.readouterr().err
    assert "msgspec and pyzmq are not installed: pip install --target build/peers msgspec pyzmq, or" in told
    assert bench.missing_packages([part for part in PARTS if part.name == "kernels"]) == []


def test_every_test_for_a_gpu_is_where_they_are_collected() -> None:
    """By `make test-gpu`, and by the part `tests`."""
    marked = [path for path in Path(ROOT, "ci/unit").rglob("test_*.py") if "mark.gpu" in path.read_text()]
    marked += [path for path in Path(ROOT, "ci/unit").rglob("test_*.py") if "sampling_runs import" in path.read_text()]
    rooms = {path.relative_to(ROOT / "ci/unit").parts[0] for path in marked} - {"house"}
    assert rooms == {"models", "runtime"}


@pytest.mark.slow
def test_a_part_is_ended_when_its_time_is_over(tmp_path: Path) -> None:
    """No Python imports torch and runs tests in this time."""
    given = Given(is_dry=True, seconds=0.1, folder=tmp_path)
    running = Running(replace(PARTS[0], most=0.1), given)
    while (outcome := running.poll()) is None:
        time.sleep(0.01)
    assert (outcome.status, outcome.figures) == ("out of time", [])
    assert running._process.returncode is not None


# -- what is told ------------------------------------------------------------------------------------------------------


def test_a_figure_is_judged_and_told_beside_its_prediction(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    step = Figure(expected=Expected(name="a step", unit="ms", goal_of="E1", predicted=6.0, goal=6.5), measured=7.12345)
    rate = Figure(expected=Expected(name="a rate", unit="tokens/s", goal=10, is_least=True), measured=12.0)
    assert (step.met, rate.met) == (False, True)
    assert Figure.of_json(rate.as_json()) == rate
    report = Report({"device": "none"}, tmp_path)
    report.tell(made_part("one", 1), Outcome(status="out of time", why="it was slow", figures=[step, rate]))
    printed = capsys.readouterr().out
    for words in ("a step, ms", "7.123", "<= 6.5", "MISSED", ">= 10", "it was slow"):
        assert words in printed
    kept = json.loads((tmp_path / "result.json").read_text())
    assert kept == report.summary()
    assert kept["not_done"] == {"one": "it was slow"} and kept["parts"]["one"]["figures"][0]["measured"] == 7.123
    assert report.has_failed


def test_the_page_says_first_what_is_wrong() -> None:
    wrong = Figure(expected=Expected(name="rows", unit="rows", goal=3, is_least=True, is_exact=True), measured=2.0)
    slow = Figure(expected=Expected(name="a step", unit="ms", goal=6.5), measured=7.0, note="paged|sdpa")
    outcomes = {
        made_part("one", 1): Outcome(status="done", figures=[wrong, slow]),
        made_part("two", 1): Outcome(status="failed", why="it fell"),
    }
    head, *parts = result_page({"device": "a GPU"}, outcomes).split("\n## ")
    assert all(text in head for text in ("0 of 1 goals are met", "Wrong: rows", "Missed: a step", "Not done: two"))
    assert "paged\\|sdpa" in parts[0] and "it fell" in parts[1]


def test_what_is_wrong_is_a_fault_and_what_is_slow_is_not(tmp_path: Path) -> None:
    report = Report({"device": "none"}, tmp_path)
    slow = Expected(name="a step", unit="ms", goal=6.5)
    report.tell(made_part("one", 1), Outcome(status="done", figures=[Figure(expected=slow, measured=7.0)]))
    assert not report.has_failed
    wrong = replace(slow, name="rows", is_exact=True)
    report.tell(made_part("two", 1), Outcome(status="done", figures=[Figure(expected=wrong, measured=7.0)]))
    assert report.has_failed


def test_what_is_kept_is_few_files(tmp_path: Path) -> None:
    work = tmp_path / "work"
    for name in ("timeline.png", "tuned/h100.json", "decode.log", "kernels.json", "network-8B/config.json"):
        work.joinpath(name).parent.mkdir(parents=True, exist_ok=True)
        work.joinpath(name).write_text(name)
    folder = make_result_folder(tmp_path / "results", {"device": "NVIDIA H100 80GB", "date": "2026-01-02 03:04"})
    assert folder.name == "gpu-nvidia-h100-80gb-2026-01-02-0304"
    keep_files(work, folder)
    kept = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert kept == {"timeline.png", "tuned/h100.json", "parts.zip"}
    assert set(ZipFile(folder / "parts.zip").namelist()) == {"decode.log", "kernels.json"}


CLOCK = 0.1
"""Microseconds: more than the rounding of sums of times as large as the trace's clock."""


def test_a_trace_has_what_ran_meanwhile(tmp_path: Path) -> None:
    with tracing("cpu", tmp_path) as trace:
        torch.ones(3).add_(1)
    assert any("add_" in span.name for span in trace.kernels)
    # Operations of torch run within each other: the last to begin is not the last to end.
    assert 0 < trace.busy_us <= max(span.end for span in trace.kernels) - trace.kernels[0].start + CLOCK
    assert list(tmp_path.iterdir()) == []


def test_kernels_that_run_beside_each_other_are_counted_once(tmp_path: Path) -> None:
    spans = [Span(0.0, 10.0, "a"), Span(5.0, 2.0, "b"), Span(8.0, 6.0, "c"), Span(20.0, 1.0, "d")]
    trace = Trace(spans)
    assert trace.busy_us == 15.0
    trace.write(tmp_path / "trace.json")
    assert Trace.read(tmp_path / "trace.json") == trace
