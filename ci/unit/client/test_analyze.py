"""What `inflight analyze` compares, what it tells Model Analyzer, and how it reads its table.

pytest ci/unit/client/test_analyze.py
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from inflight_client import LoadTestError
from inflight_client._exceptions import UsageError
from inflight_client.analyze import AnalysisOptions, analysis, make_variants, parse_levels, results
from inflight_client.analyze.variants import differing, is_configured
from inflight_client.load_test.prompts import PromptOptions

ONE = {
    "max_batch_size": "1",
    "max_num_tokens": "9",
    "batch_scheduler_policy": "max_utilization",
    "tokens_per_block": "16",
}


class TestVariants:
    def test_every_combination_is_one(self) -> None:
        variants = make_variants(ONE | {"max_batch_size": "1, 08", "tokens_per_block": "16,32"})
        assert [(each["max_batch_size"], each["tokens_per_block"]) for each in variants] == [
            ("1", "16"),
            ("1", "32"),
            ("8", "16"),
            ("8", "32"),
        ]
        assert differing(variants) == ["max_batch_size", "tokens_per_block"]

    @pytest.mark.parametrize(
        ("values", "sentence"),
        [
            ({"max_batch_size": "0"}, "max_batch_size takes whole numbers above 0, got '0'"),
            ({"max_num_tokens": "1,x"}, "max_num_tokens takes whole numbers above 0, got 'x'"),
            ({"tokens_per_block": "24"}, "tokens_per_block must be a power of two, got 24"),
            ({"batch_scheduler_policy": "best"}, "batch_scheduler_policy has no 'best': there are guaranteed_no_evict"),
            ({"max_batch_size": "1,,2"}, "different values with commas between them"),
            ({"max_batch_size": "1,1"}, "different values with commas between them"),
            ({"max_batch_size": ",".join(map(str, range(1, 70)))}, "at most 64 are compared"),
        ],
    )
    def test_wrong_values_are_refused(self, values: dict[str, str], sentence: str) -> None:
        with pytest.raises(UsageError, match=sentence):
            make_variants(ONE | values)

    def test_levels(self) -> None:
        assert parse_levels("1, 8,32") == [1, 8, 32]
        with pytest.raises(UsageError, match="concurrency takes whole numbers above 0, got '1:4'"):
            parse_levels("1:4")


@dataclass
class FakeTarget:
    """A server that Model Analyzer would find."""

    parameters: dict[str, str] = field(default_factory=lambda: {"gpt_model_path": "/m", "max_batch_size": "64"})
    model: str = "llm"
    grpc: str = "127.0.0.1:1"
    api_key: str = "the key"
    settings: dict[str, Any] = field(default_factory=lambda: {"triton_launch_mode": "remote"})
    restored: int = 0

    def check(self, changes: dict[str, str]) -> None:
        if changes["max_batch_size"] == "7":
            raise UsageError("7 does not do")

    def restore(self) -> None:
        self.restored += 1


Profile = Callable[[Callable[[dict[str, Any]], None]], None]


@pytest.fixture
def profile(monkeypatch: pytest.MonkeyPatch) -> Profile:
    """Puts a function of its configuration in the place of Model Analyzer."""

    def replace(run: Callable[[dict[str, Any]], None]) -> None:
        def instead(settings: Path, *, api_key: str, log: Path, tell: Callable[[str], None]) -> None:
            assert api_key == "the key"
            run(json.loads(settings.read_text()))

        monkeypatch.setattr(analysis.model_analyzer, "profile", instead)
        monkeypatch.setattr(analysis.model_analyzer, "check_installed", lambda: None)

    return replace


def write_results(settings: dict[str, Any], *, skipped: int = 0) -> None:
    """As Model Analyzer would, without the last `skipped` measurements."""
    model = settings["profile_models"]["llm"]
    rows = [",".join(results.COLUMNS)]
    for number, parameters in enumerate(model["model_config_parameters"]["parameters"]):
        folder = Path(settings["output_model_repository_path"], f"llm_config_{number}")
        folder.mkdir(parents=True)
        lines = [
            f'parameters {{ key: "{key}" value {{ string_value: "{value["string_value"]}" }} }}'
            for key, value in parameters.items()
        ]
        (folder / "config.pbtxt").write_text("\n".join(lines))
        rows += [f"llm,{level},{folder.name},{number + level},10,20,30" for level in model["parameters"]["concurrency"]]
    table = Path(settings["export_path"], "results", "metrics-model-inference.csv")
    table.parent.mkdir()
    table.write_text("\n".join(rows[: len(rows) - skipped]))


def options(**changes: Any) -> AnalysisOptions:
    variants = make_variants(ONE | {"max_batch_size": "1,8"})
    prompts = PromptOptions(input_tokens=(4, 4), output_tokens=(10, 30))
    return AnalysisOptions(**{"variants": variants, "levels": [1, 4], "prompts": prompts, **changes})


@pytest.mark.parametrize(
    ("levels", "num_requests", "window"), [([1, 2], 0, 40), ([32, 1], 0, 128), ([32, 1], 8, 32), ([1, 32], 64, 64)]
)
def test_a_window_has_rounds_of_the_highest_level(levels: list[int], num_requests: int, window: int) -> None:
    assert options(levels=levels, num_requests=num_requests).window == window


def test_variants_become_whole_configurations_and_their_measurements_come_back(
    tmp_path: Path, profile: Profile
) -> None:
    seen: list[dict[str, Any]] = []

    def run(settings: dict[str, Any]) -> None:
        seen.append(settings)
        write_results(settings)

    profile(run)
    target = FakeTarget()
    found = analysis.run_analysis(options(), target, tmp_path / "results")
    (settings,) = seen
    sweep = settings["profile_models"]["llm"]["model_config_parameters"]["parameters"]
    assert [each["max_batch_size"]["string_value"] for each in sweep] == ["1", "8"]
    assert all(each["gpt_model_path"] == {"string_value": "/m"} for each in sweep)
    assert all(each["enable_kv_cache_reuse"] == {"string_value": "false"} for each in sweep)
    assert settings["triton_launch_mode"] == "remote" and target.restored == 1
    best = found.measurements[0]
    assert (best.variant["max_batch_size"], best.concurrency, best.requests_per_s) == ("8", 4, 5.0)
    assert found.tokens_per_s(best) == 100.0
    assert len(json.loads((tmp_path / "results" / "results.json").read_text())["measurements"]) == 4
    assert (tmp_path / "results" / "plot.png").exists()


def test_the_configuration_that_is_there_already_is_not_measured_twice(tmp_path: Path, profile: Profile) -> None:
    there = {**options().variants[0], "enable_kv_cache_reuse": "False"}
    assert is_configured(options().variants[0], there)
    swept: list[int] = []

    def run(settings: dict[str, Any]) -> None:
        swept.append(len(settings["profile_models"]["llm"]["model_config_parameters"]["parameters"]))
        raise LoadTestError("enough")

    profile(run)
    target = FakeTarget(parameters=there)
    with pytest.raises(LoadTestError, match="enough"):
        analysis.run_analysis(options(), target, tmp_path / "results")
    assert swept == [1] and target.restored == 1, "also after a failure"


def test_a_measurement_that_is_missing_is_an_error(tmp_path: Path, profile: Profile) -> None:
    profile(lambda settings: write_results(settings, skipped=1))
    with pytest.raises(LoadTestError, match="only 3 of 4 measurements were made"):
        analysis.run_analysis(options(), FakeTarget(), tmp_path / "results")
    assert len(json.loads((tmp_path / "results" / "results.json").read_text())["measurements"]) == 3


def test_nothing_is_started_for_what_cannot_be(
    tmp_path: Path, profile: Profile, monkeypatch: pytest.MonkeyPatch
) -> None:
    profile(lambda settings: pytest.fail("started"))
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "results.json").touch()
    with pytest.raises(UsageError, match="old is not empty: name another folder with --output"):
        analysis.run_analysis(options(), FakeTarget(), tmp_path / "old")
    wrong = make_variants(ONE | {"max_batch_size": "7"})
    with pytest.raises(UsageError, match="7 does not do"):
        analysis.run_analysis(options(variants=wrong), FakeTarget(), tmp_path / "new")
    (tmp_path / "a blank").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "a blank"))
    with pytest.raises(UsageError, match="without blanks with TMPDIR"):
        analysis.run_analysis(options(), FakeTarget(), tmp_path / "new")
