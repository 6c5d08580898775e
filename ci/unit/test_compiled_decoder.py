"""A decoder compiled for this CPU gives the tokens that transformers gives: alone, in mixed batches, in chunks.

Compiles a few programs from nothing, which takes about a minute. Run: pytest ci/unit/test_compiled_decoder.py
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from model_driver import Driver, Work
from tiny_checkpoints import TinyCheckpoint, make_checkpoint

from inflight.config import EngineConfig
from inflight.distributed.rank_group import SingleRank
from inflight.errors import ConfigurationError
from inflight.layers.compiled_layer import CompiledDecoderLayer, layer_shape
from inflight.models import compiled
from inflight.runtime import loading
from inflight.runtime.model_runner import ModelRunner
from inflight_kernels.cpu import HugePageArena, can_pack, find_compiler, pack_weight, packed_linear

NUM_TOKENS = 24

needs_compiler = pytest.mark.skipif(find_compiler() is None, reason="compiling needs a C++ compiler")


def config_of(checkpoint: TinyCheckpoint, cpu_compile: str, **options: str) -> EngineConfig:
    return EngineConfig.from_parameters(
        {
            "gpt_model_path": str(checkpoint.folder),
            "device": "cpu",
            "max_batch_size": "8",
            "max_num_tokens": "256",
            "max_seq_len": "100",
            "tokens_per_block": "4",
            "max_tokens_in_paged_kv_cache": "1024",
            "cpu_compile": cpu_compile,
            **options,
        }
    )


# Biases everywhere; norms on the heads and windows on some layers only, so two shapes of layer in one network.
@pytest.fixture(scope="module", params=["llama-biases", "qwen3-window"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TinyCheckpoint:
    return make_checkpoint(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def cache(checkpoint: TinyCheckpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("programs")


@pytest.fixture(scope="module")
def runner(checkpoint: TinyCheckpoint, cache: Path) -> Iterator[ModelRunner]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("INFLIGHT_CACHE_DIR", str(cache))
        runner = ModelRunner.load(config_of(checkpoint, "true"), SingleRank())
    assert all(isinstance(layer, CompiledDecoderLayer) for layer in runner._decoder.layers)
    yield runner
    runner.close()


@pytest.fixture(scope="module")
def pairs(checkpoint: TinyCheckpoint) -> list[tuple[list[int], list[int]]]:
    return [checkpoint.prompt(length, NUM_TOKENS) for length in (1, 2, 8, 19, 33)]


@needs_compiler
def test_alone(runner: ModelRunner, pairs: list[tuple[list[int], list[int]]]) -> None:
    for prompt, tokens in pairs:
        assert Driver(runner).run([Work(prompt=prompt, max_tokens=NUM_TOKENS)]) == [tokens]


@needs_compiler
@pytest.mark.parametrize("chunk", [1, 16, 100])
def test_in_a_mixed_batch(runner: ModelRunner, pairs: list[tuple[list[int], list[int]]], chunk: int) -> None:
    """One decode beside a prefill, several beside one, decodes alone: each goes its own way through the programs."""
    works = [
        Work(prompt=prompt, max_tokens=NUM_TOKENS, arrives=3 * place, chunk=chunk)
        for place, (prompt, _) in enumerate(pairs)
    ]
    assert Driver(runner).run(works) == [tokens for _, tokens in pairs]


@needs_compiler
def test_without_room_for_plain_weights(
    runner: ModelRunner,
    checkpoint: TinyCheckpoint,
    cache: Path,
    pairs: list[tuple[list[int], list[int]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A step of one token goes the way of all others."""
    monkeypatch.setenv("INFLIGHT_CACHE_DIR", str(cache))
    monkeypatch.setattr(loading, "free_memory", lambda device, num_ranks: 0)
    packed_only = ModelRunner.load(config_of(checkpoint, "true"), SingleRank())
    layers = [layer for layer in packed_only._decoder.layers if isinstance(layer, CompiledDecoderLayer)]
    assert layers and not any(layer.token_weights for layer in layers)
    for prompt, tokens in pairs[:3]:
        assert Driver(packed_only).run([Work(prompt=prompt, max_tokens=NUM_TOKENS)]) == [tokens]
    packed_only.close()


def test_copies_in_an_arena_lie_in_its_regions_and_are_alike() -> None:
    arena = HugePageArena()
    originals = [torch.randn(3, 5), torch.randn(7).bfloat16(), torch.empty(0), torch.randn(2, 1, 4)]
    copies = [arena.copy(original) for original in originals]
    for original, copy in zip(originals, copies, strict=True):
        assert torch.equal(copy, original) and copy.dtype == original.dtype and copy.data_ptr() % 64 == 0
    assert copies[0].untyped_storage().data_ptr() == copies[1].untyped_storage().data_ptr()
    copies[0].zero_()
    assert torch.equal(copies[1], originals[1])
    large = torch.zeros(300 * 2**20, dtype=torch.uint8)
    assert arena.copy(large).shape == large.shape  # more than a region holds


@needs_compiler
def test_the_second_time_nothing_is_compiled(runner: ModelRunner, checkpoint: TinyCheckpoint, cache: Path) -> None:
    def list_programs() -> dict[str, int]:
        return {path.name: path.stat().st_mtime_ns for path in Path(cache, "cpu").iterdir()}

    programs = list_programs()
    num_shapes = len(set(map(layer_shape, (layer.layer for layer in runner._decoder.layers))))
    assert len(programs) == 4 * num_shapes + 2  # silu_and_mul and the head's product know no shape
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("INFLIGHT_CACHE_DIR", str(cache))
        ModelRunner.load(config_of(checkpoint, "true"), SingleRank()).close()
    assert list_programs() == programs
    assert Path(cache, "cpu").stat().st_mode & 0o077 == 0


def test_a_missing_compiler_is_said_only_if_it_was_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = make_checkpoint(tmp_path / "checkpoint", "llama")
    monkeypatch.setattr(compiled, "find_compiler", lambda: None)
    ModelRunner.load(config_of(checkpoint, "auto", dtype="bfloat16"), SingleRank()).close()
    with pytest.raises(ConfigurationError, match="no C\\+\\+ compiler was found; install g\\+\\+"):
        ModelRunner.load(config_of(checkpoint, "true"), SingleRank())


@pytest.mark.parametrize("num_tokens", [1, 3, 16, 130])
def test_a_packed_product_is_the_product(num_tokens: int) -> None:
    generator = torch.Generator().manual_seed(num_tokens)
    weight, bias = torch.randn(96, 64, generator=generator), torch.randn(96, generator=generator)
    x = torch.randn(num_tokens, 64, generator=generator)
    for dtype in (torch.float32, torch.bfloat16):
        packed = pack_weight(weight.to(dtype))
        assert (packed.layout != torch.strided) == can_pack(weight.to(dtype))
        found = packed_linear(x.to(dtype), packed, bias.to(dtype)).float()
        expected = F.linear(x.to(dtype).double(), weight.to(dtype).double(), bias.to(dtype).double()).float()
        # One rounding of the result to bfloat16 is 2**-9 of it.
        torch.testing.assert_close(found, expected, rtol=2**-8 if dtype == torch.bfloat16 else 1e-5, atol=1e-4)
