"""A KV cache in fp8: what it holds and what it takes, the scales of a checkpoint, and what is refused.

That its bits do not depend on how a prompt is batched is tested in test_same_bits.py.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from compiled_network import needs_compiler
from fp8_checkpoints import add_cache_scales
from model_driver import Driver, Work
from safetensors.torch import load_file, save_file
from tiny_checkpoints import CONFIGS, make_checkpoint, make_prompt
from torch import Tensor

from inflight.config import EngineConfig
from inflight.distributed.rank_group import SingleRank
from inflight.distributed.tensor_parallel import TensorParallelGroup
from inflight.errors import ConfigurationError
from inflight.models.cache_scales import CacheScales
from inflight.models.checkpoint import Checkpoint
from inflight.models.config import ModelConfig
from inflight.models.decoder_loading import load_decoder
from inflight.models.formats.dense import DenseFormat
from inflight.models.implementation import NO_SCALES, UNUSED_SCALES
from inflight.models.weights import WeightLoader
from inflight.runtime.model_runner import ModelRunner

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

NUM_LAYERS: int = CONFIGS["llama"].num_hidden_layers
PROMPT = make_prompt(21)
SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
NAMES = {
    "compressed-tensors": ("self_attn.k_scale", "self_attn.v_scale"),
    "older compressed-tensors": ("self_attn.k_proj.output_scale", "self_attn.v_proj.output_scale"),
    "vLLM": ("self_attn.attn.k_scale", "self_attn.attn.v_scale"),
    "ModelOpt": ("self_attn.k_proj.k_scale", "self_attn.v_proj.v_scale"),
    "ModelOpt, stacked": ("self_attn.qkv_proj.k_scale", "self_attn.qkv_proj.v_scale"),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path, "llama").folder


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    with caplog.at_level(logging.INFO):
        yield caplog


def add_tensors(folder: Path, tensors: dict[str, Tensor]) -> None:
    path = folder / "model.safetensors"
    save_file({**load_file(path), **tensors}, path)


def add_quantization(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    quantization = {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": SCHEME, **values}
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": quantization}))


def config_of(folder: Path, **options: Any) -> EngineConfig:
    usual: dict[str, Any] = {
        "device": "cpu",
        "num_threads": 1,
        "max_batch_size": 8,
        "max_seq_len": 64,
        "max_tokens_in_paged_kv_cache": 256,
        "cpu_compile": "false",
        "deterministic": True,
        "kv_cache_dtype": "fp8",
    }
    return EngineConfig(gpt_model_path=str(folder), **{**usual, **options})


class Ran:
    """What a network has computed of PROMPT, alone."""

    def __init__(self, folder: Path, max_tokens: int = 8, **options: Any) -> None:
        work = Work(prompt=PROMPT, max_tokens=max_tokens, log_probs=True)
        with closing(ModelRunner.load(config_of(folder, **options), SingleRank())) as runner:
            Driver(runner).run([work])
            caches = runner._store.states
            self.block_bytes = sum(cache[0].nbytes for layer in caches for cache in (layer["keys"], layer["values"]))
            self.scales = [CacheScales(*spec.scales) for spec in runner._computation.decoder.state_specs]
            self.first_keys = caches[0]["keys"].float() * self.scales[0].k
            self.first_values = caches[0]["values"].float() * self.scales[0].v
            self.described = runner.description.kv_cache_dtype
        self.tokens, self.log_probs = work.output, work.output_log_probs


def refusal(folder: Path, **options: Any) -> str:
    with pytest.raises(ConfigurationError) as caught:
        ModelRunner.load(config_of(folder, **options), SingleRank()).close()
    return str(caught.value)


def is_rounded(found: Tensor, exact: Tensor, scale: float) -> bool:
    """Within half a step of e4m3: 3 bits of mantissa, and steps of 2^-9 around 0; and not within a tenth of it."""
    half_steps = (exact.abs() * 2.0**-4).clamp(min=scale * 2.0**-10)
    error = (found - exact).abs()
    return bool((error <= 1.001 * half_steps).all()) and bool((error > 0.1 * half_steps).any())


def test_keys_and_values_are_divided_by_the_checkpoints_scales_and_rounded(folder: Path) -> None:
    all_scales = add_cache_scales(folder)
    exact, found = Ran(folder, kv_cache_dtype="auto"), Ran(folder)
    for each, scales in zip(found.scales, all_scales, strict=True):
        assert (each.k, each.v) == pytest.approx((scales.k, scales.v), rel=1e-6)
    assert found.tokens == exact.tokens
    # The keys and values of the first layer were computed before anything was rounded.
    assert is_rounded(found.first_keys, exact.first_keys, found.scales[0].k)
    assert is_rounded(found.first_values, exact.first_values, found.scales[0].v)
    assert not is_rounded(2 * found.first_keys, exact.first_keys, found.scales[0].k)
    assert not is_rounded(exact.first_keys, exact.first_keys, found.scales[0].k)
    assert found.log_probs == pytest.approx(exact.log_probs, abs=0.5) and found.log_probs != exact.log_probs
    assert (exact.described, found.described) == ("float32", "fp8")
    assert 4 * found.block_bytes == exact.block_bytes


def test_auto_is_the_type_of_the_activations_and_needs_no_scales(folder: Path, log: pytest.LogCaptureFixture) -> None:
    without = Ran(folder, kv_cache_dtype="auto")
    assert UNUSED_SCALES not in log.text and NO_SCALES not in log.text
    add_cache_scales(folder)
    with_scales = Ran(folder, kv_cache_dtype="auto")
    assert UNUSED_SCALES in log.text
    assert (with_scales.tokens, with_scales.log_probs) == (without.tokens, without.log_probs)
    assert with_scales.scales == [CacheScales()] * NUM_LAYERS


@pytest.mark.parametrize("names", NAMES.values(), ids=NAMES)
def test_every_rank_and_stage_reads_the_scales_of_its_layers(folder: Path, names: tuple[str, str]) -> None:
    all_scales = add_cache_scales(folder, names)
    model = ModelConfig.load(folder)
    for rank in (0, 1):
        for is_read in (True, False):  # False: its weights are in shared memory already
            group = TensorParallelGroup()
            group.rank, group.size = rank, 2
            with Checkpoint(folder, is_read=is_read) as checkpoint:
                loader = WeightLoader(
                    checkpoint, DenseFormat(), group, torch.float32, torch.device("cpu"), kv_dtype=torch.float8_e4m3fn
                )
                last = load_decoder(model, loader, 65, range(1, NUM_LAYERS))
            for spec, scales in zip(last.state_specs, all_scales[1:], strict=True):
                assert spec.scales == pytest.approx((scales.k, scales.v), rel=1e-6)


def test_without_scales_they_are_1_and_the_log_says_so(folder: Path, log: pytest.LogCaptureFixture) -> None:
    assert Ran(folder).scales == [CacheScales()] * NUM_LAYERS
    assert NO_SCALES in log.text


def test_a_scheme_of_the_cache_alone_leaves_the_weights_as_they_are(folder: Path) -> None:
    add_cache_scales(folder)
    before = Ran(folder)
    add_quantization(folder)
    after = Ran(folder)
    assert (before.tokens, before.log_probs) == (after.tokens, after.log_probs)


def test_transformers_code_stores_fp8_too(folder: Path) -> None:
    native, other = (Ran(folder, model_impl=code, deterministic=False) for code in ("native", "transformers"))
    exact = Ran(folder, model_impl="transformers", deterministic=False, kv_cache_dtype="auto")
    assert (other.described, other.block_bytes) == ("fp8", native.block_bytes)
    assert torch.allclose(other.first_keys, native.first_keys, rtol=0.13, atol=2.0**-9)
    assert other.log_probs == pytest.approx(native.log_probs, abs=0.1) and other.log_probs != exact.log_probs


@needs_compiler
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_layers_in_cpp_store_it_too(dtype: str, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "mistral-wide").folder
    add_cache_scales(folder)
    of_torch, ours = (Ran(folder, 1, cpu_compile=compiles, dtype=dtype) for compiles in ("false", "true"))
    exact = Ran(folder, 1, cpu_compile="true", dtype=dtype, kv_cache_dtype="auto")
    assert (ours.described, ours.block_bytes, ours.scales) == ("fp8", of_torch.block_bytes, of_torch.scales)
    # One of the two may be rounded to the next number, where the last bits of a product differ.
    for found, expected, scale in (
        (ours.first_keys, of_torch.first_keys, ours.scales[0].k),
        (ours.first_values, of_torch.first_values, ours.scales[0].v),
    ):
        assert torch.allclose(found, expected, rtol=0.13, atol=scale * 2.0**-9)
        assert (found != expected).float().mean() < 0.02
    assert ours.log_probs == pytest.approx(of_torch.log_probs, abs=0.1) and ours.log_probs != exact.log_probs


# -- refused -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_a_scale_is_a_positive_number(folder: Path, value: float) -> None:
    add_cache_scales(folder)
    add_tensors(folder, {"model.layers.1.self_attn.v_scale": torch.tensor(value)})
    sentence = (
        f"tensor model.layers.1.self_attn.v_scale holds {value:g}, but a scale is a positive number of at least 1.2e-38"
    )
    assert sentence in refusal(folder)


def test_one_scale_for_each_head_is_refused(folder: Path) -> None:
    add_cache_scales(folder)
    add_tensors(folder, {"model.layers.1.self_attn.k_scale": torch.ones(2)})
    assert "tensor model.layers.1.self_attn.k_scale has shape [2], but one number is supported" in refusal(folder)


def test_keys_without_values_are_refused(folder: Path) -> None:
    add_tensors(folder, {"model.layers.0.self_attn.k_scale": torch.tensor(0.1)})
    assert "has no tensor model.layers.0.self_attn.v_scale" in refusal(folder)


def test_layers_without_scales_beside_others_that_have_some_are_refused(folder: Path) -> None:
    add_cache_scales(folder)
    path = folder / "model.safetensors"
    save_file({name: of_one for name, of_one in load_file(path).items() if "1.self_attn.k_s" not in name}, path)
    assert "has no tensor model.layers.1.self_attn.k_scale" in refusal(folder)
    save_file({name: of_one for name, of_one in load_file(path).items() if "1.self_attn.v_s" not in name}, path)
    assert refusal(folder) == (
        f"{folder}: the checkpoint brings scales of the KV cache for other layers, but none for "
        "model.layers.1.self_attn"
    )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kv_cache_scheme": {**SCHEME, "dynamic": True}}, "kv_cache_scheme.dynamic must be false, got true"),
        ({"kv_cache_scheme": {**SCHEME, "type": "int"}}, 'kv_cache_scheme.type must be "float", got "int"'),
        ({"kv_cache_scheme": {**SCHEME, "num_bits": 4}}, "kv_cache_scheme.num_bits must be 8, got 4"),
        (
            {"kv_cache_scheme": {**SCHEME, "strategy": "attn_head"}},
            'kv_cache_scheme.strategy must be "tensor", got "attn_head"',
        ),
        ({"kv_cache_scheme": ["float"]}, 'kv_cache_scheme must be an object, got ["float"]'),
        ({"config_groups": {"group_0": {}}}, '"int-quantized" or "mxfp4-pack-quantized", got null'),
        ({"kv_cache_scheme": None}, '"int-quantized" or "mxfp4-pack-quantized", got null'),
    ],
)
def test_other_schemes_are_refused(folder: Path, changes: dict[str, Any], words: str) -> None:
    add_quantization(folder, **changes)
    assert words in refusal(folder)
