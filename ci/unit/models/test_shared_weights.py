"""Weights that another rank has read and packed give the very results of one's own, and no others are ever used.

Run: pytest ci/unit/models/test_shared_weights.py
"""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from awq_checkpoints import write_awq_checkpoint
from coded_checkpoints import CONFIG, EXPERTS, write_coded_checkpoint
from compiled_network import Network, Step, config_of, needs_compiler
from fp8_checkpoints import write_fp8_checkpoint
from kept_codes import keep_in
from lora_adapters import RandomAdapter
from tiny_checkpoints import COMPILED_CONFIGS, CONFIGS, SIZES, TinyCheckpoint, make_checkpoint, write_checkpoint

from inflight.config import EngineConfig
from inflight.distributed.rank_group import SingleRank
from inflight.distributed.sealed_memory import SealedMemory
from inflight.distributed.shared_memory import open_place
from inflight.errors import UnusableWeights
from inflight.executor.launchers.weight_holder import WeightHolder
from inflight.models import shared_weights
from inflight.runtime import loading

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("two_threads")]

STEP = Step(decodes=[1, 16, 33], prefills=[(0, 21), (70, 10)])
MAPPED = "weights are mapped from shared memory"


@pytest.fixture(autouse=True)
def told(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "inflight")


class Ranks:
    """Loads one rank of an engine after the other, into memory that outlives them."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self.holder = WeightHolder(config)
        self.place = self.holder.places()[0]

    def load(self, config: EngineConfig | None = None) -> Network:
        engine = loading.load_engine(config or self._config, SingleRank(), weights_place=self.place)
        return Network(engine.decoder, engine.store, engine.adapters)

    def is_sealed(self) -> bool:
        memory = SealedMemory(open_place(self.place))
        memory.close()
        return memory.is_sealed


def own(config: EngineConfig) -> Network:
    """With weights of its own."""
    engine = loading.load_engine(config, SingleRank())
    return Network(engine.decoder, engine.store, engine.adapters)


@pytest.mark.parametrize("name", ["llama", "qwen2", "phi3", "granite", "qwen3-moe", "gemma2", "gpt2", "gpt-oss"])
def test_torch_layers_give_the_same_bits(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    check_same_bits(config_of(make_checkpoint(tmp_path, name), "false", dtype="float32"), caplog)


@needs_compiler
@pytest.mark.parametrize("name", list(COMPILED_CONFIGS))
def test_compiled_layers_give_the_same_bits(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    check_same_bits(config_of(make_checkpoint(tmp_path, name, dtype=torch.bfloat16), "true"), caplog)


def test_dequantised_weights_give_the_same_bits(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    check_same_bits(config_of(write_awq_checkpoint(tmp_path), "false"), caplog)


@pytest.mark.parametrize("options", [{}, {"static": True}, {"strategy": "block"}], ids=str)
def test_fp8_weights_give_the_same_bits(
    options: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Static scales of activations are not in the memory, but read by each rank."""
    check_same_bits(config_of(write_fp8_checkpoint(tmp_path, **options), "false"), caplog)


def test_fp8_experts_give_the_same_bits(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    check_same_bits(config_of(write_coded_checkpoint(tmp_path, "fp8-official", EXPERTS), "false"), caplog)


@needs_compiler
@pytest.mark.parametrize("kind", ["int4-zeros", "gptq-4-reordered", "fp8-official", "mxfp4"])
@pytest.mark.parametrize("experts", [False, True])
def test_codes_give_the_same_bits(kind: str, experts: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    checkpoint = write_coded_checkpoint(tmp_path, kind, EXPERTS if experts else CONFIG)
    check_same_bits(config_of(checkpoint, "true", dtype="bfloat16"), caplog)


@needs_compiler
@pytest.mark.parametrize("name", [*COMPILED_CONFIGS, "qwen2-wide"])
def test_so_do_those_that_weights_become(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With the head, also where it is the embedding, which stays."""
    check_same_bits(config_of(make_checkpoint(tmp_path, name), "true", quantization="int4"), caplog)


@needs_compiler
@pytest.mark.parametrize("name", ["llama-wide", "qwen2-wide"])
def test_so_do_those_that_an_earlier_start_has_kept(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep_in(tmp_path / "kept", monkeypatch)
    config = config_of(make_checkpoint(tmp_path / "checkpoint", name), "true", quantization="int4")
    own(config)
    assert "kept in" in caplog.text
    check_same_bits(config, caplog)


@needs_compiler
def test_another_quantization_is_not_mapped(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path, "qwen2-wide")
    first, second = (config_of(checkpoint, "true", quantization=name) for name in ("int8", "fp8"))
    ranks = Ranks(first)
    before = ranks.load().logits(STEP)
    after = own(second).logits(STEP)
    assert not torch.equal(before, after)
    assert torch.equal(ranks.load(second).logits(STEP), after)


def check_same_bits(config: EngineConfig, caplog: pytest.LogCaptureFixture) -> None:
    expected = own(config).logits(STEP)
    ranks = Ranks(config)
    assert torch.equal(ranks.load().logits(STEP), expected)
    assert ranks.is_sealed() and MAPPED not in caplog.text
    for _ in range(2):
        assert torch.equal(ranks.load().logits(STEP), expected)
        assert MAPPED in caplog.text
        caplog.clear()


@needs_compiler
def test_adapters_run_beside_mapped_weights(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path, next(iter(COMPILED_CONFIGS)), dtype=torch.bfloat16)
    config = config_of(checkpoint, "true", max_loras="2")
    ranks = Ranks(config)
    ranks.load()
    slots = [0, -1, 1] + [1] * 21 + [0] * 10
    expected, *others = (with_adapters(network, checkpoint) for network in (own(config), ranks.load()))
    for network in others:
        assert torch.equal(network.logits(STEP, slots=slots), expected.logits(STEP, slots=slots))
    assert not torch.equal(expected.logits(STEP, slots=slots), expected.logits(STEP))


def with_adapters(network: Network, checkpoint: TinyCheckpoint) -> Network:
    for slot in (0, 1):
        adapter = RandomAdapter.of(checkpoint, slot + 1, rank=4)
        parts = {
            name: network.adapters.places[name].part(a.bfloat16(), (b * adapter.scale).bfloat16())
            for name, (a, b) in adapter.matrices.items()
        }
        network.adapters.fill(slot, parts)
    return network


def test_a_draft_model_shares_the_memory(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first, *_ = CONFIGS
    target, draft = (make_checkpoint(tmp_path / name, first) for name in ("target", "draft"))
    config = config_of(target, "false", speculative_model_dir=str(draft.folder))
    ranks = Ranks(config)
    place = ranks.place
    networks = [loading.load_engine(config, SingleRank(), weights_place=each) for each in (None, place, place)]
    assert MAPPED in caplog.text
    expected, *found = [
        Network(network, engine.store).decoder.logits(torch.ones(3, SIZES["hidden_size"]))
        for engine in networks
        if (network := engine.draft_network) is not None
    ]
    assert len(found) == 2 and all(torch.equal(logits, expected) for logits in found)


def test_a_changed_checkpoint_is_read_anew(tmp_path: Path) -> None:
    first, *_ = CONFIGS
    checkpoint = make_checkpoint(tmp_path / "served", first)
    config = config_of(checkpoint, "false")
    ranks = Ranks(config)
    before = ranks.load().logits(STEP)
    other = write_checkpoint(tmp_path / "other", CONFIGS[first], seed=99).folder / "model.safetensors"
    weights = checkpoint.folder / "model.safetensors"
    status = weights.stat()
    weights.write_bytes(other.read_bytes())  # in place, as long as before
    os.utime(weights, ns=(status.st_atime_ns, status.st_mtime_ns))
    after = own(config).logits(STEP)
    assert not torch.equal(before, after)
    assert torch.equal(ranks.load().logits(STEP), after)
    old, ranks.place = ranks.place, ranks.holder.places()[0]
    assert ranks.place != old and not ranks.is_sealed()
    assert torch.equal(ranks.load().logits(STEP), after) and ranks.is_sealed()


def test_a_checkpoint_that_changes_while_it_is_read_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, *_ = CONFIGS
    checkpoint = make_checkpoint(tmp_path / "served", first)
    ranks = Ranks(config_of(checkpoint, "false"))
    load_network = loading.load_network

    def load_and_change(*arguments: object, **options: object) -> object:
        network = load_network(*arguments, **options)  # type: ignore[arg-type]
        shutil.copy(checkpoint.folder / "config.json", tmp_path / "other.json")
        os.replace(tmp_path / "other.json", checkpoint.folder / "config.json")
        return network

    monkeypatch.setattr(loading, "load_network", load_and_change)
    with pytest.raises(UnusableWeights, match="the checkpoint was changed while it was read"):
        ranks.load()


def test_weights_that_the_system_does_not_seal_stay_their_ranks_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first, *_ = CONFIGS
    config = config_of(make_checkpoint(tmp_path, first), "false")

    def refuse(*_: object) -> None:
        raise OSError("not here")

    monkeypatch.setattr(SealedMemory, "seal", refuse)
    monkeypatch.setattr(shared_weights, "WAIT_SECONDS", 0.0)
    ranks = Ranks(config)
    loaded = [ranks.load() for _ in range(2)]
    assert all(torch.equal(network.logits(STEP), own(config).logits(STEP)) for network in loaded)
    assert "does not seal them: not here" in caplog.text and "another process fills this memory" in caplog.text


@needs_compiler
def test_weights_that_were_packed_are_not_taken_for_plain_ones(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path, next(iter(COMPILED_CONFIGS)), dtype=torch.bfloat16)
    ranks = Ranks(config_of(checkpoint, "true"))
    ranks.load()
    with pytest.raises(UnusableWeights, match="laid out for other code"):
        ranks.load(config_of(checkpoint, "false"))


def test_memory_that_steps_would_read_more_slowly_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first, *_ = CONFIGS
    config = config_of(make_checkpoint(tmp_path, first), "false")
    monkeypatch.setattr(shared_weights, "keeps_huge_pages", lambda: False)
    ranks = Ranks(config)
    assert torch.equal(ranks.load().logits(STEP), own(config).logits(STEP))
    assert "are not used: shared memory cannot be on huge pages" in caplog.text and not ranks.is_sealed()
