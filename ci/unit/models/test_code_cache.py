"""Codes that are kept between starts are those that would be made, on any number of ranks; what is damaged is made
anew, and where nothing can be kept the engine serves.

Run: pytest ci/unit/models/test_code_cache.py
"""

from __future__ import annotations

import logging
import os
import resource
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
from coded_checkpoints import CONFIG, EXPERTS, SHAPE
from compiled_network import needs_compiler
from kept_codes import keep_in, results, results_together
from quantized_runs import change_tensors
from safetensors.torch import load_file
from tiny_checkpoints import write_checkpoint
from transformers import Qwen2Config, Qwen3MoeConfig

from inflight.distributed.tensor_parallel import TensorParallelGroup
from inflight.layers.experts import Experts
from inflight.log_progress import SECONDS_TO_MENTION
from inflight.models import weights
from inflight.models.checkpoint import Checkpoint
from inflight.models.config import ModelConfig
from inflight.models.decoder import Decoder
from inflight.models.decoder_loading import load_decoder
from inflight.models.formats import code_cache, on_load
from inflight.models.formats.code_cache import CodeCache
from inflight.models.formats.on_load import OnLoadFormat
from inflight.models.weights import WeightLoader
from inflight_kernels import Code, CodedWeight

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread"), needs_compiler]


@pytest.fixture(autouse=True)
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Path:
    """Where codes are kept."""
    keep_in(tmp_path / "kept", monkeypatch)
    caplog.set_level(logging.INFO, "inflight")
    return tmp_path / "kept"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "checkpoint", CONFIG, 1, torch.float32).folder


@pytest.fixture
def nothing_is_quantised(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From when it is called."""

    def refuse(*arguments: Any) -> None:
        raise AssertionError("codes are made")

    def forbid() -> None:
        for module, name in ((on_load, "quantize"), (weights, "quantize_into")):
            monkeypatch.setattr(module, name, refuse)

    return forbid


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Of codes. How far reading is, which takes long on a busy machine alone, does not count."""
    lines = [record.getMessage() for record in caplog.records]
    caplog.clear()
    return [line for line in lines if "quantised" in line and "by this rank" not in line]


def files(kept: Path) -> list[Path]:
    return sorted(path for path in kept.rglob("*") if path.is_file())


# -- what is read ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [CONFIG, EXPERTS], ids=["dense", "experts"])
@pytest.mark.parametrize("name", ["int8", "int4", "fp8"])
def test_the_second_start_reads_the_codes_of_the_first(
    name: str,
    config: Any,
    tmp_path: Path,
    kept: Path,
    nothing_is_quantised: Callable[[], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder = write_checkpoint(tmp_path / "checkpoint", config, 1, torch.float32).folder
    made = results(folder, name)
    (file,) = files(kept)
    (line,) = told(caplog)
    assert line.startswith(f"quantised to {name} in ") and f" s, kept in {file} (" in line
    nothing_is_quantised()
    assert results(folder, name) == made
    assert told(caplog) == [f"quantised weights are read from {file.parent}"]
    assert files(kept) == [file]


class FakeGroup(TensorParallelGroup):
    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


def load_ranks(folder: Path, size: int, *, is_cached: bool = True) -> list[Decoder]:
    model, decoders = ModelConfig.load(folder), []
    for rank in range(size):
        with Checkpoint(folder) as tensors:
            cache = CodeCache(tensors, Code.INT4, torch.float32) if is_cached else None
            weight_format, group, cpu = OnLoadFormat(Code.INT4, cache), FakeGroup(rank, size), torch.device("cpu")
            loader = WeightLoader(tensors, weight_format, group, torch.float32, cpu, keeps_codes=True)
            decoders.append(load_decoder(model, loader, 64))
            if cache is not None:
                cache.finish()
    return decoders


def codes_of(decoder: Decoder) -> list[torch.Tensor]:
    head: Any = decoder.head
    parts: list[Any] = [head]
    found: list[CodedWeight] = []
    for layer in decoder.layers:
        mlp: Any = layer.branches[1].part
        parts += [layer.branches[0].stateful.qkv, layer.branches[0].stateful.output]
        if isinstance(mlp, Experts):
            found += [mlp.gate_up_ECD, mlp.down_EDI]
        else:
            parts += [mlp.gate_up, mlp.down]
    found += [part.weight.packed for part in parts]
    return [tensor for weight in found for tensor in (weight.codes, weight.scales)]


def is_same(some: list[Decoder], others: list[Decoder]) -> bool:
    pairs = [pair for each in zip(some, others, strict=True) for pair in zip(*map(codes_of, each), strict=True)]
    return all(torch.equal(*pair) for pair in pairs)


@pytest.mark.parametrize(("before", "now"), [(1, 2), (2, 1)])
def test_other_numbers_of_ranks_read_them_too(
    before: int, now: int, tmp_path: Path, nothing_is_quantised: Callable[[], None]
) -> None:
    """Where every share of inputs is whole groups, and the vocabulary is divided evenly."""
    config = Qwen2Config(**SHAPE | {"intermediate_size": 256, "vocab_size": 204})
    folder = write_checkpoint(tmp_path / "checkpoint", config, 1, torch.float32).folder
    expected = load_ranks(folder, now, is_cached=False)
    load_ranks(folder, before)
    nothing_is_quantised()
    assert is_same(load_ranks(folder, now), expected)


def test_ranks_whose_groups_are_others_make_their_own(
    folder: Path, kept: Path, nothing_is_quantised: Callable[[], None]
) -> None:
    """A half of 192 inputs is groups of 32, the whole of 64."""
    expected = load_ranks(folder, 2, is_cached=False)
    load_ranks(folder, 1)
    assert is_same(load_ranks(folder, 2), expected)
    assert len(files(kept)) == 3
    nothing_is_quantised()
    assert is_same(load_ranks(folder, 2), expected)


def test_groups_that_begin_elsewhere_are_not_taken(tmp_path: Path) -> None:
    """Those of the second half of 96 inputs of experts begin with the 48th, those of the whole with every 32nd."""
    config = Qwen3MoeConfig(**EXPERTS.to_dict() | {"moe_intermediate_size": 96})
    folder = write_checkpoint(tmp_path / "checkpoint", config, 1, torch.float32).folder
    expected = load_ranks(folder, 2, is_cached=False)
    load_ranks(folder, 1)
    assert is_same(load_ranks(folder, 2), expected)


def test_a_checkpoint_of_other_values_has_other_codes(folder: Path, kept: Path) -> None:
    """Of the same size and time."""
    change_tensors(folder)  # the layout of the file that is written below
    first, path = results(folder), folder / "model.safetensors"
    before = path.stat()
    name = "model.layers.0.mlp.down_proj.weight"
    change_tensors(folder, **{name: -load_file(path)[name]})
    assert path.stat().st_size == before.st_size
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert results(folder) != first
    assert len(files(kept)) == 2


# -- what is damaged ---------------------------------------------------------------------------------------------------


def flip(content: bytearray, place: int) -> bytearray:
    content[place] ^= 4
    return content


def move(content: bytearray) -> bytearray:
    """The codes of one layer to another one of the same shape."""
    first, second = b"layers.0.mlp.down_proj", b"layers.1.mlp.down_proj"
    content = content.replace(first, b"layers.9.mlp.down_proj").replace(second, first)
    return content.replace(b"layers.9.mlp.down_proj", second)


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content[:-1],
        lambda content: content[: len(content) // 2],
        lambda content: content[:4],
        lambda content: b"",
        lambda content: flip(content, 0),
        lambda content: flip(content, 60),
        lambda content: flip(content, len(content) // 2),
        lambda content: flip(content, len(content) - 1),
        lambda content: content[: len(content) // 2] + bytes(len(content) - len(content) // 2),
        lambda content: content + b"\0",
        move,
    ],
    ids=["end", "half", "head", "all", "length", "name", "codes", "scales", "zeros", "longer", "moved"],
)
def test_a_damaged_file_is_never_used_and_made_anew(
    damage: Callable[[bytearray], bytes],
    folder: Path,
    kept: Path,
    nothing_is_quantised: Callable[[], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    made = results(folder)
    (file,) = files(kept)
    content = file.read_bytes()
    file.write_bytes(damage(bytearray(content)))
    told(caplog)
    assert results(folder) == made
    assert f"{file} is damaged and removed, and its weights are quantised anew: " in "\n".join(told(caplog))
    assert file.read_bytes() == content
    nothing_is_quantised()
    assert results(folder) == made


# -- where nothing can be kept -----------------------------------------------------------------------------------------


def test_a_disk_without_room_is_left_alone(
    folder: Path, kept: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = results(folder, "none")
    usage = shutil.disk_usage(kept)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=code_cache.ROOM_BYTES + 10**5))
    told(caplog)
    assert results(folder) != expected
    warning, line = told(caplog)
    assert warning.startswith("quantised weights are not kept, and are made anew at the next start: ")
    assert "has room for 0 MB; INFLIGHT_CACHE_DIR may name a folder with room for " in warning
    assert line.startswith("quantised to int4 in ") and "kept" not in line
    assert files(kept) == []


def test_a_disk_that_is_full_before_all_is_written(folder: Path, kept: Path, caplog: pytest.LogCaptureFixture) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Checkpoint(folder) as tensors:
        cache = CodeCache(tensors, Code.INT4, torch.float32)
        weight_format, cpu = OnLoadFormat(Code.INT4, cache), torch.device("cpu")
        loader = WeightLoader(tensors, weight_format, FakeGroup(0, 1), torch.float32, cpu, keeps_codes=True)
        load_decoder(ModelConfig.load(folder), loader, 64)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, before[1]))
        try:
            cache.finish()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "quantised weights are not kept, and are made anew at the next start: " in told(caplog)[0]
    assert files(kept) == []


def test_without_a_folder_nothing_is_kept(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_folder(name: str) -> Path:
        raise OSError("there is no home folder; set INFLIGHT_CACHE_DIR to a full path")

    made = results(folder)
    told(caplog)
    monkeypatch.setattr(code_cache, "cache_folder", no_folder)
    assert results(folder) == made
    warning, _ = told(caplog)
    assert warning == ("quantised weights are not kept: there is no home folder; set INFLIGHT_CACHE_DIR to a full path")


def test_few_codes_are_not_kept(folder: Path, kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code_cache, "LEAST_BYTES", 2**24)
    results(folder)
    assert files(kept) == []


# -- several writers, and the end of a file ----------------------------------------------------------------------------


def test_two_processes_make_one_file(folder: Path, kept: Path, nothing_is_quantised: Callable[[], None]) -> None:
    context = get_context("spawn")
    with context.Manager() as manager, ProcessPoolExecutor(2, context) as processes:
        barrier = manager.Barrier(2)
        both = [processes.submit(results_together, barrier, folder, kept) for _ in range(2)]
        first, second = (each.result() for each in both)
    assert first == second
    assert len(files(kept)) == 1
    nothing_is_quantised()
    assert results(folder) == first


def test_what_nobody_reads_for_long_is_removed(folder: Path, tmp_path: Path, kept: Path) -> None:
    results(folder)
    (used,) = files(kept)
    stale, scratch = kept / "int4-of-another" / "0.safetensors", used.parent / "killed.part"
    for path in (stale, scratch):
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"")
    for path in (stale, scratch, used):
        os.utime(path, (0, 0))
    results(folder)
    assert used.stat().st_mtime > time.time() - 3600
    results(folder, "int8")
    assert used in files(kept) and not stale.parent.exists() and not scratch.exists()


def test_progress_says_that_weights_are_quantised(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("inflight.log_progress.SECONDS_TO_MENTION", SECONDS_TO_MENTION * 0)
    results(folder)
    assert " GB of the checkpoint are read and quantised to int4 by this rank after " in caplog.text
    results(folder)
    assert not [line for line in told(caplog) if "of the checkpoint" in line]
