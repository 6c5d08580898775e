"""Tuned launch configurations: which entry answers which question, and when the launcher's default holds."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from inflight_kernels import tuning

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
DEFAULT = {"BLOCK_N": 64, "num_warps": 4}


def entry(shape: dict[str, int | str], block_n: int, **more: int) -> dict[str, object]:
    return {"shape": shape, "config": {"BLOCK_N": block_n, "num_warps": 4, **more}}


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An H200 whose table holds decode configurations for batches of 8 and 128."""
    triton = pytest.importorskip("triton")
    monkeypatch.setattr(tuning, "TABLES", tmp_path)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA H200")
    tuning._table.cache_clear()
    tuning._lookup.cache_clear()
    path = tuning.table_path("NVIDIA H200", triton.__version__)
    entries = [entry({"batch": 8, "dtype": "bf16"}, 32), entry({"batch": 128, "dtype": "bf16"}, 128)]
    path.write_text(json.dumps({"operations": {"decode": entries}}))
    return path


def ask(batch: int, dtype: str = "bf16", operation: str = "decode", device: torch.device = CUDA) -> int:
    return tuning.tuned(operation, {"batch": batch, "dtype": dtype}, DEFAULT, device)["BLOCK_N"]


def test_a_file_is_named_after_device_and_triton() -> None:
    assert tuning.table_path("NVIDIA H100 80GB HBM3", "3.8.0").name == "nvidia-h100-80gb-hbm3-triton-3.8.json"


def test_the_nearest_entry_within_reach_answers(table: Path) -> None:
    assert [ask(batch) for batch in (8, 16, 64, 512)] == [32, 32, 128, 128]


def test_the_default_holds_past_reach_for_other_text_operations_and_devices(table: Path) -> None:
    assert ask(1024) == DEFAULT["BLOCK_N"]
    assert ask(8, dtype="fp16") == DEFAULT["BLOCK_N"]
    assert ask(8, operation="prefill") == DEFAULT["BLOCK_N"]
    assert ask(8, device=CPU) == DEFAULT["BLOCK_N"]


def test_the_default_holds_without_a_table(table: Path) -> None:
    table.unlink()
    assert ask(8) == DEFAULT["BLOCK_N"]


def test_an_entry_with_other_dimensions_or_configuration_keys_is_passed_over(table: Path) -> None:
    other_keys = entry({"batch": 8, "dtype": "bf16"}, 16, num_stages=2)
    other_shape = entry({"batch": 8}, 16)
    table.write_text(
        json.dumps({"operations": {"decode": [other_keys, other_shape, entry({"batch": 16, "dtype": "bf16"}, 256)]}})
    )
    assert ask(8) == 256


def test_the_file_is_read_once(table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ask(8) == 32
    table.unlink()
    assert ask(128) == 128


def test_a_trial_answers_on_every_device_and_collects_what_was_asked(table: Path) -> None:
    with tuning.trying("decode", {"BLOCK_N": 7, "num_warps": 1}) as shapes:
        assert ask(8) == ask(9, device=CPU) == 7
        assert ask(8, operation="prefill") == DEFAULT["BLOCK_N"]
    assert shapes == {(("batch", 8), ("dtype", "bf16")), (("batch", 9), ("dtype", "bf16"))}
    with tuning.trying("decode", None):
        assert ask(8) == DEFAULT["BLOCK_N"]
    assert ask(8) == 32


def misfits(tables: Path) -> list[str]:
    """Files that no device and triton version looks for, and operations with an entry that could answer nobody."""
    found = []
    for path in sorted(tables.glob("*")):
        if not re.fullmatch(r"[a-z0-9-]+-triton-\d+\.\d+\.json", path.name):
            found.append(path.name)
            continue
        for operation, entries in json.loads(path.read_text())["operations"].items():
            shapes_fit = all(isinstance(value, int | str) for each in entries for value in each["shape"].values())
            configs_fit = all(isinstance(value, int) for each in entries for value in each["config"].values())
            if not (entries and shapes_fit and configs_fit):
                found.append(f"{path.name}: {operation}")
    return found


def test_packaged_tables_have_the_form_that_is_read() -> None:
    assert misfits(tuning.TABLES) == []


def test_a_table_of_another_form_is_seen(table: Path) -> None:
    assert misfits(table.parent) == []
    (table.parent / "NVIDIA H200.json").write_text("{}")
    wrong = {"shape": {"batch": 8}, "config": {"BLOCK_N": "32"}}
    table.write_text(json.dumps({"operations": {"decode": [wrong], "prefill": []}}))
    assert misfits(table.parent) == ["NVIDIA H200.json", f"{table.name}: decode", f"{table.name}: prefill"]
