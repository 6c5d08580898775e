"""Checkpoints with fp8 weights: the tokens and log probabilities of a float network whose activations are rounded to
fp8 before each product; what the format cannot say exactly is refused by its name.

Run: pytest ci/unit/models/test_fp8_weights.py
"""

from __future__ import annotations

import json
import logging
from contextlib import closing
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from compiled_network import needs_compiler
from fake_cuda.context import fake_cuda
from fake_cuda.device import CUDA
from fp8_checkpoints import ARGUMENTS, BLOCK_CONFIG, CONFIG, QUANTIZATION, write_fp8_checkpoint
from quantized_runs import NUM_TOKENS, SAME, change_tensors, distance, load, refusal, run, write_quantization
from safetensors.torch import load_file
from tiny_checkpoints import CONFIGS, TinyCheckpoint, make_prompt
from transformers import PreTrainedConfig

from inflight.distributed.tensor_parallel import TensorParallelGroup
from inflight.errors import ConfigurationError
from inflight.layers.weight import DenseWeight, Fp8BlockWeight, Fp8Weight, Weight
from inflight.models.checkpoint import Checkpoint
from inflight.models.compressed_tensors import Fp8Scheme
from inflight.models.config import ModelConfig
from inflight.models.decoder import Decoder
from inflight.models.formats.fp8 import Fp8BlockFormat, Fp8Format
from inflight.models.split_tensors import SplitByInputs, SplitByOutputs
from inflight.models.weights import WeightLoader

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

GROUP = ("config_groups", "group_0")


@pytest.fixture(scope="module", params=["channel", "tensor", "block"])
def strategy(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def checkpoint(strategy: str, tmp_path_factory: pytest.TempPathFactory) -> TinyCheckpoint:
    return write_fp8_checkpoint(tmp_path_factory.mktemp("fp8"), strategy=strategy, config=config_of(strategy))


def config_of(strategy: str) -> PreTrainedConfig:
    """Of some blocks, if these have scales."""
    return BLOCK_CONFIG if strategy == "block" else CONFIG


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_fp8_checkpoint(tmp_path).folder


def test_tokens_are_those_of_a_network_that_rounds_activations(checkpoint: TinyCheckpoint) -> None:
    pairs = [checkpoint.prompt(length, NUM_TOKENS) for length in (1, 8, 21)]
    works = run(checkpoint.folder, [prompt for prompt, _ in pairs])
    assert [work.output for work in works] == [tokens for _, tokens in pairs]
    assert max(distance(work, checkpoint.model) for work in works) < SAME


def test_a_scale_that_is_not_applied_is_noticed(tmp_path: Path) -> None:
    checkpoint = write_fp8_checkpoint(tmp_path)
    name = "model.layers.1.self_attn.v_proj.weight_scale"
    scales = load_file(checkpoint.folder / "model.safetensors")[name]
    scales[0] *= 2
    change_tensors(checkpoint.folder, **{name: scales})
    assert max(distance(work, checkpoint.model) for work in run(checkpoint.folder, [make_prompt(21)])) > SAME


@pytest.mark.parametrize("scaling", [1.0, 1.5])
def test_a_product_is_as_near_to_that_of_the_dequantised_weight_as_fp8_allows(scaling: float) -> None:
    """fp8 has three bits behind the leading one, and steps of 2^-9 below its smallest normal number: activations are
    off by a sixteenth at most, or by half a step. Weights are exact, and wrong ones are noticed."""
    generator = torch.Generator().manual_seed(3)
    values_OI = torch.randn((24, 64), generator=generator).to(torch.float8_e4m3fn)
    scale_O = torch.rand(24, generator=generator) + 0.1
    x_TI, bias_O = torch.randn((7, 64), generator=generator), torch.randn(24, generator=generator)
    weight_OI = values_OI.float() * scale_O[:, None]
    steps_TI = (x_TI.abs().amax(1, keepdim=True) / 448 * 2.0**-10).expand_as(x_TI)
    bound_TO = torch.maximum(x_TI.abs() / 16, steps_TI) @ weight_OI.abs().T + 1e-5
    y_TO = Fp8Weight(values_OI, scaling * scale_O).multiply(x_TI, bias_O)
    is_near = ((y_TO - torch.nn.functional.linear(x_TI, weight_OI, bias_O)).abs() <= bound_TO).all()
    assert bool(is_near) == (scaling == 1.0)


def test_with_deterministic_a_row_has_the_same_bits_in_any_batch(folder: Path) -> None:
    prompts = [make_prompt(length) for length in (1, 8, 21)]
    together = run(folder, prompts, deterministic=True)
    for work, prompt in zip(together, prompts, strict=True):
        (alone,) = run(folder, [prompt], deterministic=True)
        assert (alone.output, alone.output_log_probs) == (work.output, work.output_log_probs)


def test_the_format_decides_what_a_layer_holds(folder: Path) -> None:
    with closing(load(folder)) as runner:
        decoder = runner._computation.decoder
        assert isinstance(decoder, Decoder)
        weights = [getattr(decoder.layers[0].branches[0].stateful, name).weight for name in ("qkv", "output")]
    assert [type(weight) for weight in weights] == [Fp8Weight] * 2
    assert {weight.values_OI.dtype for weight in weights} == {torch.float8_e4m3fn}


ARGUMENTS_2024 = {"num_bits": 8, "type": "float", "symmetric": True, "block_structure": None, "observer_kwargs": {}}


@pytest.mark.parametrize(
    "written",
    [
        {
            "format": "naive-quantized",
            "quantization_status": "frozen",
            "config_groups": {
                "group_0": {
                    "input_activations": {**ARGUMENTS_2024, "dynamic": True, "strategy": "token"},
                    "output_activations": None,
                    "targets": ["Linear"],
                    "weights": {**ARGUMENTS_2024, "dynamic": False, "strategy": "channel"},
                }
            },
            "global_compression_ratio": 1.46,
        },
        {
            **QUANTIZATION,
            "config_groups": {"group_0": {**QUANTIZATION["config_groups"]["group_0"], "format": "float-quantized"}},
            "sparsity_config": {},
            "transform_config": {},
            "version": "0.11.0",
        },
        {
            **QUANTIZATION,
            "kv_cache_scheme": {
                **ARGUMENTS, "dynamic": False, "strategy": "tensor", "observer": "minmax", "observer_kwargs": {}
            },
        },
    ],
    ids=["2024", "2025", "with a cache"],
)  # fmt: skip
def test_what_compressed_tensors_wrote_over_the_years_is_read(written: dict[str, Any], folder: Path) -> None:
    expected = run(folder, [make_prompt(8)])
    write_quantization(folder, {"quant_method": "compressed-tensors", "ignore": ["lm_head"], **written})
    found = run(folder, [make_prompt(8)])
    assert found[0].output_log_probs == expected[0].output_log_probs


def test_one_scale_may_be_a_number(tmp_path: Path) -> None:
    """Some writers store it with the shape (1,), some with ()."""
    folder = write_fp8_checkpoint(tmp_path, strategy="tensor").folder
    expected = run(folder, [make_prompt(8)])
    tensors = load_file(folder / "model.safetensors")
    scales = {name: each.reshape(()) for name, each in tensors.items() if name.endswith("weight_scale")}
    change_tensors(folder, **scales)
    found = run(folder, [make_prompt(8)])
    assert found[0].output_log_probs == expected[0].output_log_probs


def test_stacked_products_of_the_checkpoint_share_their_scale(tmp_path: Path, strategy: str) -> None:
    checkpoint = write_fp8_checkpoint(tmp_path, strategy=strategy, config=CONFIGS["phi3"])
    assert distance(run(checkpoint.folder, [make_prompt(21)])[0], checkpoint.model) < SAME


def test_a_layer_that_was_not_quantised_is_dense(tmp_path: Path) -> None:
    """Its tensors, not the configuration, say so."""
    folder = write_fp8_checkpoint(tmp_path, dense=("model.layers.1.mlp.down_proj",)).folder
    with closing(load(folder)) as runner:
        decoder = runner._computation.decoder
        assert isinstance(decoder, Decoder)
        first, second = (layer.branches[1].part for layer in decoder.layers[:2])
        assert isinstance(second.down.weight, DenseWeight) and isinstance(first.down.weight, Fp8Weight)


@needs_compiler
def test_layers_run_in_torch_where_cpp_was_not_asked_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = write_fp8_checkpoint(tmp_path, torch.bfloat16).folder
    reason = "C++ has no operation for products of fp8"
    caplog.set_level(logging.INFO, "inflight")
    load(folder, cpu_compile="auto").close()
    assert f"the layers run in torch, several times slower: {reason}" in caplog.text
    assert refusal(folder, cpu_compile="true") == (
        f"cpu_compile is true, but {reason}; set cpu_compile to auto or false"
    )


# -- ranks -------------------------------------------------------------------------------------------------------------


class FakeGroup(TensorParallelGroup):
    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


def format_of(strategy: str) -> Fp8Format | Fp8BlockFormat:
    if strategy == "block":
        return Fp8BlockFormat(outputs=128, inputs=128, scales="weight_scale")
    return Fp8Format(Fp8Scheme(has_scale_per_output=strategy == "channel", has_input_scale=False))


def dequantized(weight: Weight) -> torch.Tensor:
    if isinstance(weight, Fp8BlockWeight):
        values, scales, block_outputs = weight.packed
        outputs, inputs = (torch.arange(size) for size in values.shape)
        assert scales.dtype == torch.float32
        return values.float() * scales[outputs // block_outputs][:, inputs // 128]
    assert isinstance(weight, Fp8Weight) and weight.scale_O.dtype == torch.float32
    return weight.values_OI.float() * weight.scale_O[:, None]


def loaders_of(checkpoint: Checkpoint, strategy: str, num_ranks: int) -> list[WeightLoader]:
    groups = [FakeGroup(rank, num_ranks) for rank in range(num_ranks)]
    cpu = torch.device("cpu")
    return [WeightLoader(checkpoint, format_of(strategy), group, torch.float32, cpu) for group in groups]


def test_ranks_hold_the_whole_weight_between_them(checkpoint: TinyCheckpoint, strategy: str) -> None:
    dense = load_file(checkpoint.folder.parent / "dense" / "model.safetensors")
    gate, up, down = (f"model.layers.0.mlp.{name}_proj" for name in ("gate", "up", "down"))
    num_ranks, (hidden, inner) = (2, (256, 256)) if strategy == "block" else (4, (64, 128))
    with Checkpoint(checkpoint.folder) as tensors:
        loaders = loaders_of(tensors, strategy, num_ranks)
        section = [loader.even_section("intermediate_size", inner) for loader in loaders]
        gate_up = [
            dequantized(loader.by_outputs(SplitByOutputs((gate, up)), "", [mine, mine], hidden).weight)
            for loader, mine in zip(loaders, section, strict=True)
        ]
        rows = [
            dequantized(loader.by_inputs(SplitByInputs(down), "", hidden, mine).weight)
            for loader, mine in zip(loaders, section, strict=True)
        ]
    own = inner // num_ranks
    assert torch.equal(torch.cat([part[:own] for part in gate_up]), dense[f"{gate}.weight"])
    assert torch.equal(torch.cat([part[own:] for part in gate_up]), dense[f"{up}.weight"])
    assert torch.equal(torch.cat(rows, dim=1), dense[f"{down}.weight"])


def test_outputs_of_a_block_may_be_divided_and_its_inputs_not(tmp_path: Path) -> None:
    """A rank's keys and values are half a block each. Rows of scales are then for as many outputs as no border
    divides."""
    folder = write_fp8_checkpoint(tmp_path, strategy="block", config=BLOCK_CONFIG).folder
    dense = load_file(folder.parent / "dense" / "model.safetensors")
    names = tuple(f"model.layers.0.self_attn.{name}_proj" for name in "qkv")
    down = SplitByInputs("model.layers.0.mlp.down_proj")
    with Checkpoint(folder) as tensors:
        parts = []
        for loader in loaders_of(tensors, "block", 2):
            queries, keys = loader.even_section("queries", 256), loader.even_section("keys", 32)
            weight = loader.by_outputs(SplitByOutputs(names), "", [queries, keys, keys], 256).weight
            assert isinstance(weight, Fp8BlockWeight) and weight.packed.block_outputs == 16
            parts.append(dequantized(weight).split([128, 16, 16]))
        loader = loaders_of(tensors, "block", 4)[1]
        with pytest.raises(ConfigurationError, match="quantised in groups of 128, and one rank's share of them, 64,"):
            loader.by_inputs(down, "", 256, loader.even_section("intermediate_size", 256))
    for name, halves in zip(names, zip(*parts, strict=True), strict=True):
        assert torch.equal(torch.cat(halves), dense[f"{name}.weight"])


# -- refused -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("place", "value", "words"),
    [
        (("format",), "marlin-24", '"mxfp4-pack-quantized", got "marlin-24"'),
        (("quantization_status",), "calibration", 'must be "compressed" or "frozen", got "calibration"'),
        (("kv_cache_scheme",), {"num_bits": 8}, 'kv_cache_scheme.type must be "float", got "int"'),
        (("transform_config",), {"groups": 1}, 'transform_config must be null, got {"groups": 1}'),
        (("sparsity_config",), {"format": "sparse-24"}, 'sparsity_config.format must be "dense", got "sparse-24"'),
        (("config_groups",), None, "config_groups must be an object, got null"),
        (("config_groups",), {}, "config_groups must hold one group, got 0"),
        (GROUP, 3, "config_groups.group_0 must be an object, got 3"),
        ((*GROUP, "format"), "int-quantized", '"float-quantized" or null, got "int-quantized"'),
        ((*GROUP, "output_activations"), {"type": "float"}, 'output_activations must be null, got {"type": "float"}'),
        ((*GROUP, "weights"), None, "weights must be an object, got null"),
        ((*GROUP, "weights", "type"), "int", 'weights.type must be "float", got "int"'),
        ((*GROUP, "weights", "num_bits"), 4, "weights.num_bits must be 8, got 4"),
        ((*GROUP, "weights", "strategy"), "group", 'must be "channel" or "tensor" or "block", got "group"'),
        ((*GROUP, "weights", "symmetric"), False, "weights.symmetric must be true, got false"),
        ((*GROUP, "input_activations"), None, "input_activations must be an object, got null"),
        ((*GROUP, "input_activations", "dynamic"), False, 'input_activations.strategy must be "tensor", got "token"'),
        ((*GROUP, "input_activations", "dynamic"), "local", 'dynamic must be true or false, got "local"'),
        ((*GROUP, "input_activations", "strategy"), "tensor", 'input_activations.strategy must be "token", got "ten'),
    ],
    ids=lambda value: value[-1] if isinstance(value, tuple) else None,
)
def test_other_schemes(place: tuple[str, ...], value: Any, words: str, folder: Path) -> None:
    path = folder / "config.json"
    assert json.loads(path.read_text())["quantization_config"] == QUANTIZATION
    at = quantization = deepcopy(QUANTIZATION)
    for key in place[:-1]:
        at = at[key]
    at[place[-1]] = value
    write_quantization(folder, quantization)
    with pytest.raises(ConfigurationError) as caught:
        ModelConfig.load(folder)
    assert str(caught.value).startswith(f"{path}: quantization_config.") and words in str(caught.value)


def test_a_scale_of_another_shape(folder: Path) -> None:
    name = "model.layers.0.self_attn.q_proj.weight_scale"
    change_tensors(folder, **{name: torch.ones(1)})
    assert f"tensor {name} has shape [1], config.json asks for [64, 1]" in refusal(folder)


@pytest.mark.parametrize("value", [0.0, -0.25, float("nan"), float("inf")])
def test_a_scale_that_is_none(value: float, tmp_path: Path, strategy: str) -> None:
    folder = write_fp8_checkpoint(tmp_path, strategy=strategy).folder
    name = "model.layers.1.mlp.up_proj.weight_scale"
    scales = load_file(folder / "model.safetensors")[name]
    scales[-1] = value
    change_tensors(folder, **{name: scales})
    assert refusal(folder).endswith(
        f"tensor {name} holds {value:g}, but a scale is a positive number of at least 1.2e-38"
    )


def test_weights_without_their_scale(folder: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight_scale"
    change_tensors(folder, **{name: None})
    assert refusal(folder) == f"{folder}: the checkpoint has no tensor {name}"


def test_a_scale_of_weights_that_are_floats(folder: Path) -> None:
    """Nothing tells whether they are still to be multiplied by it."""
    name = "model.layers.1.mlp.up_proj"
    tensors = load_file(folder / "model.safetensors")
    change_tensors(folder, **{f"{name}.weight": tensors[f"{name}.weight"].bfloat16()})
    assert f"tensor {name}.weight is BF16; only F8_E4M3 weights are supported" in refusal(folder)


def test_a_quantised_head(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    change_tensors(folder, **{"lm_head.weight": tensors["lm_head.weight"].to(torch.float8_e4m3fn)})
    assert "tensor lm_head.weight is F8_E4M3; only F32, BF16, F16 weights are supported" in refusal(folder)


def test_scales_of_activations(folder: Path) -> None:
    """In the tensors, though the configuration says that there are none."""
    name = "model.layers.0.self_attn.q_proj.input_scale"
    change_tensors(folder, **{name: torch.ones(1)})
    assert refusal(folder).endswith(f"tensors that its config.json does not account for: {name}")


@pytest.mark.parametrize(("capability", "is_refused"), [(80, True), (86, True), (89, False), (90, False)])
@pytest.mark.parametrize("kind", [Fp8Weight, Fp8BlockWeight])
def test_an_older_gpu(capability: int, is_refused: bool, kind: type[Weight], tmp_path: Path) -> None:
    strategy = "block" if kind is Fp8BlockWeight else "channel"
    folder = write_fp8_checkpoint(tmp_path, strategy=strategy).folder
    down = SplitByInputs("model.layers.0.mlp.down_proj")
    with fake_cuda(capability=capability), Checkpoint(folder) as tensors:
        loader = WeightLoader(tensors, format_of(strategy), TensorParallelGroup(), torch.bfloat16, CUDA)
        section = loader.even_section("intermediate_size", 128)
        if not is_refused:
            assert isinstance(loader.by_inputs(down, "", 64, section).weight, kind)
            return
        with pytest.raises(ConfigurationError) as caught:
            loader.by_inputs(down, "", 64, section)
    assert str(caught.value) == (
        f"{folder}: fp8 weights need a GPU of compute capability 8.9 (Ada) or more, and this one has "
        f"{capability // 10}.{capability % 10}; use the float16 or bfloat16 checkpoint"
    )
