"""fp8 checkpoints that bring a scale for the activations of each product: the tokens of a network that rounds with the
same scales, alone, in batches and on ranks; what their publishers wrote is read, and what is no such scale is refused.

Run: pytest ci/unit/models/test_static_scales.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from fp8_checkpoints import ARGUMENTS, STATIC_QUANTIZATION, add_cache_scales, write_fp8_checkpoint
from quantized_runs import NUM_TOKENS, change_tensors, distance, refusal, run, write_quantization
from safetensors.torch import load_file
from tiny_checkpoints import CONFIGS, make_prompt

from inflight.distributed.tensor_parallel import TensorParallelGroup
from inflight.errors import ConfigurationError
from inflight.layers.weight import Fp8Weight
from inflight.models.checkpoint import Checkpoint
from inflight.models.compressed_tensors import Fp8Scheme
from inflight.models.config import ModelConfig
from inflight.models.formats.dense import DenseFormat
from inflight.models.formats.fp8 import Fp8Format
from inflight.models.split_tensors import SplitByInputs, SplitByOutputs
from inflight.models.weights import Section, WeightLoader

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

SAME = 0.07
"""Bound of log probabilities against the network that rounds with the same scales. Another order of additions moves an
activation now and then to a neighbouring number of fp8, a wrong scale all of them: that is a difference above 0.1."""
LAYER = "model.layers.1."
STATIC = Fp8Scheme(has_scale_per_output=False, has_input_scale=True)
BY_TOKEN = Fp8Scheme(has_scale_per_output=False, has_input_scale=False)
BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_fp8_checkpoint(tmp_path, strategy="tensor", static=True).folder


# -- results -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["channel", "tensor"])
def test_tokens_are_those_of_a_network_that_rounds_with_these_scales(strategy: str, tmp_path: Path) -> None:
    checkpoint = write_fp8_checkpoint(tmp_path, strategy=strategy, static=True)
    pairs = [checkpoint.prompt(length, NUM_TOKENS) for length in (1, 8, 21)]
    works = run(checkpoint.folder, [prompt for prompt, _ in pairs])
    assert [work.output for work in works] == [tokens for _, tokens in pairs]
    assert max(distance(work, checkpoint.model) for work in works) < SAME


@pytest.mark.parametrize("name", ["self_attn.k_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj"])
def test_each_scale_is_applied(name: str, tmp_path: Path) -> None:
    """Those of both norms, of what attention gives and of the gated activation."""
    checkpoint = write_fp8_checkpoint(tmp_path, static=True)
    place = f"{LAYER}{name}.input_scale"
    scale = load_file(checkpoint.folder / "model.safetensors")[place]
    right = run(checkpoint.folder, [make_prompt(21)])[0]
    change_tensors(checkpoint.folder, **{place: 1.5 * scale})
    wrong = run(checkpoint.folder, [make_prompt(21)])[0]
    assert distance(right, checkpoint.model) < SAME < distance(wrong, checkpoint.model)


def test_stacked_products_of_the_checkpoint_share_their_scale(tmp_path: Path) -> None:
    checkpoint = write_fp8_checkpoint(tmp_path, config=CONFIGS["phi3"], static=True)
    assert distance(run(checkpoint.folder, [make_prompt(21)])[0], checkpoint.model) < SAME


@pytest.mark.parametrize("is_given", [True, False])
def test_a_product_is_that_of_what_is_left_of_both_factors(is_given: bool) -> None:
    """In float64, of activations that were rounded with the given scale, however small they are, and cut off beyond its
    range. With scales of their own they are others."""
    generator = torch.Generator().manual_seed(3)
    scale = 0.004
    values_OI = torch.randn((24, 64), generator=generator).to(torch.float8_e4m3fn)
    scale_O = torch.rand(24, generator=generator) + 0.1
    x_TI = torch.randn((7, 64), generator=generator) * torch.logspace(-2, 0.5, 7)[:, None]
    rounded_TI = (x_TI.double() / scale).clamp(-448.0, 448.0).float().to(torch.float8_e4m3fn).double() * scale
    assert (x_TI.abs() > 448 * scale).any()
    expected_TO = rounded_TI @ (values_OI.double() * scale_O.double()[:, None]).T
    y_TO = Fp8Weight(values_OI, scale_O, scale if is_given else None).multiply(x_TI, None)
    assert torch.allclose(y_TO.double(), expected_TO, rtol=1e-5, atol=1e-5) == is_given


def test_with_deterministic_a_row_has_the_same_bits_in_any_batch(folder: Path) -> None:
    prompts = [make_prompt(length) for length in (1, 8, 21)]
    together = run(folder, prompts, deterministic=True)
    for work, prompt in zip(together, prompts, strict=True):
        (alone,) = run(folder, [prompt], deterministic=True)
        assert (alone.output, alone.output_log_probs) == (work.output, work.output_log_probs)


# -- which scale -------------------------------------------------------------------------------------------------------


class FakeGroup(TensorParallelGroup):
    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


def loader_of(checkpoint: Checkpoint, rank: int = 0, size: int = 1) -> WeightLoader:
    return WeightLoader(checkpoint, Fp8Format(STATIC), FakeGroup(rank, size), torch.float32, torch.device("cpu"))


@pytest.mark.parametrize("largest", ["q_proj", "k_proj", "v_proj"])
def test_of_products_with_one_input_the_largest_scale_counts(largest: str, folder: Path) -> None:
    names = [f"{LAYER}self_attn.{name}_proj" for name in "qkv"]
    changed = {f"{name}.input_scale": torch.tensor([0.5 if name.endswith(largest) else 0.25]) for name in names}
    change_tensors(folder, **changed)
    with Checkpoint(folder) as checkpoint:
        sections = [Section(64, 0, 64), Section(32, 0, 32), Section(32, 0, 32)]
        weight = loader_of(checkpoint).by_outputs(SplitByOutputs(tuple(names)), "", sections, 64).weight
    assert isinstance(weight, Fp8Weight) and weight.input_scale == 0.5


def test_every_rank_has_the_same(folder: Path) -> None:
    down = f"{LAYER}mlp.down_proj"
    found = []
    with Checkpoint(folder) as checkpoint:
        for rank in range(2):
            loader = loader_of(checkpoint, rank, 2)
            section = loader.even_section("intermediate_size", 128)
            weight = loader.by_inputs(SplitByInputs(down), "", 64, section).weight
            assert isinstance(weight, Fp8Weight)
            found.append(weight.input_scale)
    assert found == [load_file(folder / "model.safetensors")[f"{down}.input_scale"].item()] * 2


# -- publishers --------------------------------------------------------------------------------------------------------

OLD_ARGUMENTS = {"block_structure": None, "group_size": None, "num_bits": 8, "observer": "minmax", "symmetric": True,
                 "observer_kwargs": {}, "strategy": "tensor", "type": "float", "dynamic": False}  # fmt: skip
COMPRESSED_2024 = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "quantization_status": "frozen",
    "config_groups": {
        "group_0": {
            "input_activations": OLD_ARGUMENTS,
            "output_activations": None,
            "targets": ["Linear"],
            "weights": OLD_ARGUMENTS,
        }
    },
    "ignore": ["lm_head"],
    "kv_cache_scheme": None,
}
AUTOFP8 = {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}
MODELOPT_ARGUMENTS = {"dynamic": False, "num_bits": 8, "type": "float"}
MODELOPT = {
    "quant_method": "modelopt",
    "quant_algo": "FP8",
    "config_groups": {"group_0": {"input_activations": MODELOPT_ARGUMENTS, "weights": MODELOPT_ARGUMENTS}},
    "ignore": ["lm_head"],
    "producer": {"name": "modelopt", "version": "0.29.0"},
}
MODELOPT_FILE = {"quant_algo": "FP8", "kv_cache_quant_algo": None, "exclude_modules": ["lm_head"]}
CACHE = {**ARGUMENTS, "dynamic": False, "strategy": "tensor"}
OUTPUT_SCALES = ("self_attn.k_proj.output_scale", "self_attn.v_proj.output_scale")
MODELOPT_CACHE_SCALES = ("self_attn.k_proj.k_scale", "self_attn.v_proj.v_scale")


@pytest.mark.parametrize(
    ("written", "beside"),
    [
        (COMPRESSED_2024, None),
        (AUTOFP8, None),
        ({**AUTOFP8, "weight_block_size": None}, None),
        (MODELOPT, None),
        (None, MODELOPT_FILE),
    ],
    ids=["compressed-tensors", "AutoFP8", "fp8 without blocks", "ModelOpt", "ModelOpt's file"],
)
@pytest.mark.parametrize("shape", [(1,), ()])
def test_what_publishers_wrote_is_read(
    shape: tuple[int, ...], written: dict[str, Any] | None, beside: dict[str, Any] | None, folder: Path
) -> None:
    expected = run(folder, [make_prompt(8)])
    tensors = load_file(folder / "model.safetensors")
    change_tensors(folder, **{name: each.reshape(shape) for name, each in tensors.items() if name.endswith("_scale")})
    _describe(folder, written, beside)
    found = run(folder, [make_prompt(8)])
    assert found[0].output_log_probs == expected[0].output_log_probs
    # The scales of the activations are those of the file.
    name = f"{LAYER}self_attn.o_proj.input_scale"
    change_tensors(folder, **{name: tensors[name] / 3})
    assert run(folder, [make_prompt(8)])[0].output_log_probs != expected[0].output_log_probs


@pytest.mark.parametrize(
    ("written", "beside", "names"),
    [
        ({**STATIC_QUANTIZATION, "kv_cache_scheme": CACHE}, None, ("self_attn.k_scale", "self_attn.v_scale")),
        ({**AUTOFP8, "kv_cache_scheme": "static"}, None, OUTPUT_SCALES),
        ({**MODELOPT, "kv_cache_scheme": MODELOPT_ARGUMENTS}, None, MODELOPT_CACHE_SCALES),
        ({**MODELOPT, "kv_cache_scheme": "FP8"}, None, MODELOPT_CACHE_SCALES),
        (None, {**MODELOPT_FILE, "kv_cache_quant_algo": "FP8"}, MODELOPT_CACHE_SCALES),
    ],
    ids=["compressed-tensors", "AutoFP8", "ModelOpt", "ModelOpt 0.29", "ModelOpt's file"],
)
def test_so_are_scales_of_the_cache(
    written: dict[str, Any] | None, beside: dict[str, Any] | None, names: tuple[str, str], tmp_path: Path
) -> None:
    strategy = "channel" if written and written["quant_method"] == "compressed-tensors" else "tensor"
    folder = write_fp8_checkpoint(tmp_path, strategy=strategy, static=True).folder
    without = run(folder, [make_prompt(8)], kv_cache_dtype="fp8")
    add_cache_scales(folder, names)
    _describe(folder, written, beside)
    found = run(folder, [make_prompt(8)], kv_cache_dtype="fp8")
    assert found[0].output_log_probs != without[0].output_log_probs


@pytest.mark.parametrize("is_beside", [True, False])
@pytest.mark.parametrize(
    ("quantization", "expected"),
    [
        (MODELOPT, Fp8Format(STATIC)),
        ({**MODELOPT_FILE, "quant_method": "modelopt", "quant_algo": None}, DenseFormat()),
    ],
)
def test_modelopt_says_the_same_in_both_files(
    is_beside: bool, quantization: dict[str, Any], expected: object, folder: Path
) -> None:
    _describe(folder, None if is_beside else quantization, quantization if is_beside else None)
    assert ModelConfig.load(folder).weight_format == expected


def test_without_static_scales_autofp8_is_quantised_by_token(tmp_path: Path) -> None:
    folder = write_fp8_checkpoint(tmp_path, strategy="tensor").folder
    expected = run(folder, [make_prompt(8)])
    write_quantization(folder, {**AUTOFP8, "activation_scheme": "dynamic"})
    assert ModelConfig.load(folder).weight_format == Fp8Format(BY_TOKEN)
    assert run(folder, [make_prompt(8)])[0].output_log_probs == expected[0].output_log_probs


def _describe(folder: Path, written: dict[str, Any] | None, beside: dict[str, Any] | None) -> None:
    """In config.json, or in ModelOpt's file."""
    write_quantization(folder, written)
    if beside is not None:
        content = {"producer": {"name": "modelopt", "version": "0.23.0"}, "quantization": beside}
        (folder / "hf_quant_config.json").write_text(json.dumps(content))


# -- refused -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "words"),
    [
        (
            {**BLOCKS, "weight_block_size": [128, 100]},
            "quantization_config.weight_block_size must be two numbers, the second one a multiple of 32, got "
            "[128, 100]",
        ),
        (
            {**BLOCKS, "activation_scheme": "static"},
            'quantization_config.activation_scheme must be "dynamic" where weights have a scale for each block, got '
            '"static"',
        ),
        (
            {"quant_method": "fp8"},
            'quantization_config.activation_scheme must be "static" or "dynamic", got null',
        ),
        (
            {**AUTOFP8, "kv_cache_scheme": "dynamic"},
            'quantization_config.kv_cache_scheme must be "static" or null, got "dynamic"',
        ),
        (
            {**MODELOPT, "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"},
            "quantized checkpoints (modelopt, quant_algo FP8_PER_CHANNEL_PER_TOKEN, kv_cache_quant_algo None) are not "
            "supported; use the float16, bfloat16 or float32 one, or one that awq or gptq quantized to 4 bits, or "
            "bitsandbytes to nf4, or llm-compressor's schemes W4A16, W8A16, W8A8, FP8_DYNAMIC, FP8_BLOCK and FP8, "
            "AutoFP8 or ModelOpt to fp8",
        ),
        (
            {**MODELOPT, "kv_cache_scheme": "NVFP4"},
            "quantized checkpoints (modelopt, quant_algo FP8, kv_cache_quant_algo NVFP4) are not supported; use the "
            "float16, bfloat16 or float32 one, or one that awq or gptq quantized to 4 bits, or bitsandbytes to nf4, or "
            "llm-compressor's schemes W4A16, W8A16, W8A8, FP8_DYNAMIC, FP8_BLOCK and FP8, AutoFP8 or ModelOpt to fp8",
        ),
    ],
    ids=["blocks", "static blocks", "activation_scheme", "kv_cache_scheme", "quant_algo", "kv_cache_quant_algo"],
)
def test_other_schemes(written: dict[str, Any], words: str, folder: Path) -> None:
    write_quantization(folder, written)
    with pytest.raises(ConfigurationError) as caught:
        ModelConfig.load(folder)
    assert str(caught.value) == f"{folder / 'config.json'}: {words}"


@pytest.mark.parametrize("name", ["self_attn.k_proj", "mlp.down_proj"])
@pytest.mark.parametrize("value", [0.0, -0.25, 2.0**-140, float("nan"), float("inf")])
def test_a_scale_that_is_none(value: float, name: str, folder: Path) -> None:
    place = f"{LAYER}{name}.input_scale"
    change_tensors(folder, **{place: torch.tensor([value])})
    assert refusal(folder).endswith(
        f"tensor {place} holds {value:g}, but a scale is a positive number of at least 1.2e-38"
    )


def test_a_product_without_its_scale(folder: Path) -> None:
    place = f"{LAYER}self_attn.v_proj.input_scale"
    change_tensors(folder, **{place: None})
    assert refusal(folder) == f"{folder}: the checkpoint has no tensor {place}"


def test_a_scale_of_each_input(folder: Path) -> None:
    place = f"{LAYER}self_attn.o_proj.input_scale"
    change_tensors(folder, **{place: torch.ones(64)})
    assert refusal(folder).endswith(f"tensor {place} has shape [64], but one number is supported")
