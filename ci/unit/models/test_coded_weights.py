"""Checkpoints with weights of 4 and 8 bits: in every format the log probabilities are those of the weights that its
package, or its definition, dequantises to, with C++ that multiplies codes and with torch; damaged ones are refused.

Run: pytest ci/unit/models/test_coded_weights.py
"""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from coded_checkpoints import CONFIG, EXPERTS, KINDS, SHAPE, write_coded_checkpoint
from compiled_network import force, needs_compiler
from fake_cuda.context import fake_cuda
from fake_cuda.device import CUDA
from quantized_runs import change_tensors, distance, load, refusal, run
from safetensors.torch import load_file, save_file
from tiny_checkpoints import make_prompt, write_checkpoint
from torch import nn
from transformers import Qwen2Config

from inflight.distributed.tensor_parallel import TensorParallelGroup
from inflight.errors import ConfigurationError
from inflight.layers.weight import CodedGroups, DenseWeight
from inflight.models.checkpoint import Checkpoint
from inflight.models.compiled import CompiledNetwork
from inflight.models.config import ModelConfig
from inflight.models.decoder_loading import load_decoder
from inflight.models.expert_weights import load_experts
from inflight.models.formats.bitsandbytes import STATE, Nf4Format
from inflight.models.formats.dense import DenseFormat
from inflight.models.formats.format import Block, Target
from inflight.models.formats.on_load import OnLoadFormat
from inflight.models.split_tensors import SplitByInputs, SplitByOutputs
from inflight.models.weights import WeightLoader
from inflight_kernels import BlockScaledWeight, Code, CodedWeight
from inflight_kernels.cpu import variants_here

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

GOLDEN = Path(__file__).resolve().parents[2] / "golden"
SAME = 1e-4
"""Bound of log probabilities against the network with dequantised weights, all in float32."""
PROMPTS = [make_prompt(length) for length in (1, 8, 21)]
CANNOT_BE_HALVED = frozenset({"fp8-blocks", "fp8-official", "int4-zeros", "gptq-4-v2", "nf4"})
"""Their groups are of 64 or 128 inputs."""
IN_CPP = {"cpu_compile": "true", "dtype": "float32"}
WAYS = {
    "fp8": [("true", "auto")],
    "fp8-official": [("true", "auto")],
    "fp8-whole": [("true", "auto")],
    "fp8-modelopt": [("true", "auto")],
    "w8a8": [("true", "keep"), ("false", "auto")],
}
"""Kinds whose activations are quantised in some ways: those (cpu_compile, cpu_activations) in which they are not."""


def empty(*shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_coded_checkpoint(tmp_path, "int4-zeros").folder


@needs_compiler
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("config", [CONFIG, EXPERTS], ids=["dense", "experts"])
def test_codes_mean_what_their_package_dequantises_them_to(kind: str, config: Any, tmp_path: Path) -> None:
    checkpoint = write_coded_checkpoint(tmp_path, kind, config)
    for cpu_compile, kept in WAYS.get(kind, [("true", "auto"), ("false", "auto")]):
        works = run(checkpoint.folder, PROMPTS, cpu_compile=cpu_compile, cpu_activations=kept, dtype="float32")
        assert max(distance(work, checkpoint.model) for work in works) < SAME
        assert len({tuple(work.output) for work in works}) == len(PROMPTS)


@needs_compiler
@pytest.mark.parametrize("kind", ["int4-zeros", "fp8-official"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_sixteen_bits_are_as_near_as_they_can_be(kind: str, dtype: str, tmp_path: Path) -> None:
    """Codes are no further from the network in float32 than its plain weights in this type are."""
    checkpoint = write_coded_checkpoint(tmp_path, kind)
    coded, plain = (
        max(distance(work, checkpoint.model) for work in run(each, PROMPTS, cpu_compile="true", dtype=dtype))
        for each in (checkpoint.folder, checkpoint.folder.parent / "dense")
    )
    assert coded < 2 * plain


@pytest.mark.parametrize("kind", ["plain", "nested"])
def test_nf4_is_what_bitsandbytes_dequantises(kind: str, tmp_path: Path) -> None:
    """The golden file has what bitsandbytes 0.50.2 made of 48 by 128 random numbers, with scales in float32, and with
    quantised ones."""
    stored = load_file(GOLDEN / "nf4.safetensors")
    layer = {name.removeprefix(f"{kind}."): tensor for name, tensor in stored.items() if name.startswith(f"{kind}.")}
    save_file({f"layer.{name}": tensor for name, tensor in layer.items()}, tmp_path / "model.safetensors")
    target = Target(dtype=torch.float32, device=torch.device("cpu"), empty=empty, keeps_codes=True)
    with Checkpoint(tmp_path) as checkpoint:
        for outputs, inputs in ((range(48), range(128)), (range(9, 30), range(64, 128))):
            block = Block(name="layer", num_outputs=48, num_inputs=128, outputs=outputs, inputs=inputs)
            found = dequantized(Nf4Format().read(checkpoint, [block], target))
            expected = layer["dequantized"][outputs.start : outputs.stop, inputs.start : inputs.stop]
            torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)


@needs_compiler
def test_the_network_keeps_codes_and_c_computes_it(folder: Path) -> None:
    with closing(load(folder, cpu_compile="auto")) as runner:
        assert isinstance(runner._computation.decoder, CompiledNetwork)


@needs_compiler
@pytest.mark.parametrize(
    ("kind", "asked", "group_size"), [("w8a8", "auto", 0), ("int8", "int8", 0), ("gptq-4", "int8", 32)]
)
def test_activations_are_quantised_where_the_checkpoint_or_the_operator_says_so(
    kind: str, asked: str, group_size: int, tmp_path: Path
) -> None:
    """The oracle: transformers' network, the inputs of whose layers are quantised as they go in. Where one of them is
    all but half way between two numbers, the order of sums decides, and what follows is as far as that rounding."""
    checkpoint = write_coded_checkpoint(tmp_path, kind)
    prompts = [make_prompt(length) for length in (1, 2, 3, 5, 8, 13, 21)]
    works = run(checkpoint.folder, prompts, cpu_compile="true", cpu_activations=asked, dtype="float32")
    kept = [distance(work, checkpoint.model) for work in works]
    quantize_inputs_of(checkpoint.model, group_size)
    quantised = [distance(work, checkpoint.model) for work in works]
    assert sorted(quantised)[len(prompts) // 3] < SAME
    assert all(near < far / 2 for near, far in zip(quantised, kept, strict=True))


def quantize_inputs_of(model: nn.Module, group_size: int) -> None:
    """Of each token and group (0 = all inputs) the largest magnitude becomes 127."""

    def quantize(module: nn.Module, arguments: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        (x,) = arguments
        groups = x.double().unflatten(-1, (-1, group_size or x.shape[-1]))
        scales = groups.abs().amax(-1, keepdim=True) / 127
        return (((groups / scales).round().nan_to_num() * scales).flatten(-2).float(),)

    for name, module in model.named_modules():
        if name.endswith("_proj"):
            module.register_forward_pre_hook(quantize)


@needs_compiler
@pytest.mark.parametrize("kind", ["gptq-4", "gptq-4-reordered", "int8", "w8a8", "mxfp4"])
@pytest.mark.parametrize("config", [CONFIG, EXPERTS], ids=["dense", "experts"])
def test_a_request_has_the_same_bits_beside_any_others(kind: str, config: Any, tmp_path: Path) -> None:
    folder = write_coded_checkpoint(tmp_path, kind, config).folder
    together = run(folder, PROMPTS, cpu_compile="true", dtype="bfloat16")
    for work, prompt in zip(together, PROMPTS, strict=True):
        (alone,) = run(folder, [prompt], cpu_compile="true", dtype="bfloat16")
        assert (alone.output, alone.output_log_probs) == (work.output, work.output_log_probs)


@needs_compiler
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_networks_of_whole_numbers_have_the_same_bits_by_every_variant(
    dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, found = write_coded_checkpoint(tmp_path, "w8a8").folder, []
    for variant in variants_here():
        force(monkeypatch, variant=variant)
        works = run(folder, PROMPTS, cpu_compile="true", dtype=dtype, cpu_order="fma")
        found.append([(work.output, work.output_log_probs) for work in works])
    assert all(each == found[0] for each in found)


# -- weights of floats that become codes -------------------------------------------------------------------------------


@needs_compiler
@pytest.mark.parametrize(
    ("name", "rounding", "squares", "size"),
    [("int8", 1 / 254, 0.008, 128), ("fp8", 1 / 16, 0.035, 128), ("int4", 0.5 / 7, 0.12, 64)],
)
def test_weights_become_the_nearest_codes(
    name: str, rounding: float, squares: float, size: int, tmp_path: Path
) -> None:
    """`rounding`: of a weight, as a share of the largest of its group; of 4 bits the scale may cut that one off, for a
    smaller sum of `squares`, in which all groups count alike."""
    write_checkpoint(tmp_path, CONFIG, 1, torch.float32)
    values = load_file(tmp_path / "model.safetensors")["model.layers.0.mlp.gate_proj.weight"]
    block = Block(
        name="model.layers.0.mlp.gate_proj", num_outputs=192, num_inputs=128, outputs=range(192), inputs=range(128)
    )
    target = Target(dtype=torch.float32, device=torch.device("cpu"), empty=empty, keeps_codes=True)
    with Checkpoint(tmp_path) as checkpoint:
        weight = OnLoadFormat(Code(name)).read(checkpoint, [block], target)
    errors = (dequantized(weight) - values).unflatten(1, (-1, size))
    groups = values.unflatten(1, (-1, size))
    if name != "int4":
        assert (errors.abs() <= 1.01 * rounding * groups.abs().amax(-1, keepdim=True)).all()
    assert (errors.norm(dim=-1) / groups.norm(dim=-1)).mean() < squares


@needs_compiler
@pytest.mark.parametrize("config", [CONFIG, EXPERTS], ids=["dense", "experts"])
def test_networks_of_codes_are_near_those_of_floats(config: Any, tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path, config, 1, torch.float32)
    found = {
        name: max(distance(work, checkpoint.model) for work in run(tmp_path, PROMPTS, quantization=name, **IN_CPP))
        for name in ("none", "int8", "fp8", "int4")
    }
    assert found["none"] < SAME < found["int8"] < found["fp8"] < found["int4"]
    # A token of experts may go to other ones.
    assert found["int8"] < 0.5 or config is EXPERTS


@needs_compiler
def test_stacked_experts_become_the_same_codes_and_routers_none(tmp_path: Path) -> None:
    found = []
    for is_stacked in (False, True):
        folder = tmp_path / str(is_stacked)
        checkpoint = write_checkpoint(folder, EXPERTS, 1, torch.float32)
        if is_stacked:
            checkpoint.model.save_pretrained(folder, save_original_format=False)
        found.append([work.output_log_probs for work in run(folder, PROMPTS, quantization="int4", **IN_CPP)])
        model, cpu = ModelConfig.load(folder), torch.device("cpu")
        assert model.family.experts is not None
        with Checkpoint(folder) as tensors:
            loader = WeightLoader(
                tensors, OnLoadFormat(Code.INT4), FakeGroup(0, 1), torch.float32, cpu, keeps_codes=True
            )
            experts = load_experts(loader, model.family.experts, "model.layers.0.", 128)
        assert isinstance(experts.router, DenseWeight) and isinstance(experts.down_EDI, CodedWeight)
    assert found[0] == found[1]


@needs_compiler
def test_ranks_whose_shares_are_whole_groups_make_the_same_codes(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, Qwen2Config(**SHAPE | {"intermediate_size": 256}), 1, torch.float32)
    down, cpu = SplitByInputs("model.layers.0.mlp.down_proj"), torch.device("cpu")
    with Checkpoint(tmp_path) as checkpoint:
        parts = []
        for size in (1, 2):
            loaders = [
                WeightLoader(
                    checkpoint, OnLoadFormat(Code.INT4), FakeGroup(rank, size), torch.float32, cpu, keeps_codes=True
                )
                for rank in range(size)
            ]
            weights = [
                loader.by_inputs(down, "", 128, loader.even_section("intermediate_size", 256)).weight
                for loader in loaders
            ]
            parts.append(torch.cat([dequantized(weight) for weight in weights], 1))
    assert torch.equal(*parts)


def test_quantization_where_nothing_multiplies_codes(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, CONFIG, 1, torch.float32)
    words = "quantization is int4, which layers in C++ multiply on a CPU, and they do not run"
    assert words in refusal(tmp_path, **{**IN_CPP, "quantization": "int4", "cpu_compile": "false"})


def test_codes_are_not_quantised_again(folder: Path) -> None:
    assert refusal(folder, quantization="int8") == (
        f"quantization is int8, and the weights of {folder} are int4 already; set quantization to none"
    )


# -- ranks -------------------------------------------------------------------------------------------------------------


NAMES = ("gate", "up", "down")


class FakeGroup(TensorParallelGroup):
    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_hold_the_whole_weight_between_them(kind: str, tmp_path: Path) -> None:
    folder = write_coded_checkpoint(tmp_path, kind).folder
    dense = load_file(folder.parent / "dense" / "model.safetensors")
    gate, up, down = (f"model.layers.0.mlp.{name}_proj" for name in ("gate", "up", "down"))
    model, cpu = ModelConfig.load(folder), torch.device("cpu")
    with Checkpoint(folder) as checkpoint:
        loaders = [
            WeightLoader(checkpoint, model.weight_format, FakeGroup(rank, 2), torch.float32, cpu, keeps_codes=True)
            for rank in range(2)
        ]
        sections = [loader.even_section("intermediate_size", 192) for loader in loaders]
        pairs = list(zip(loaders, sections, strict=True))
        if kind in CANNOT_BE_HALVED:
            with pytest.raises(ConfigurationError, match="96, is not a whole number of groups"):
                loaders[1].by_inputs(SplitByInputs(down), "", 128, sections[1])
            return
        wide = [loader.by_outputs(SplitByOutputs((gate, up)), "", [own, own], 128).weight for loader, own in pairs]
        tall = [loader.by_inputs(SplitByInputs(down), "", 128, own).weight for loader, own in pairs]
    assert torch.equal(torch.cat([dequantized(each)[:96] for each in wide]), dense[f"{gate}.weight"])
    assert torch.equal(torch.cat([dequantized(each)[96:] for each in wide]), dense[f"{up}.weight"])
    assert torch.equal(torch.cat([dequantized(each) for each in tall], 1), dense[f"{down}.weight"])


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_have_whole_experts_in_every_format(kind: str, tmp_path: Path) -> None:
    """Of formats whose groups ranks cannot halve, too."""
    folder = write_coded_checkpoint(tmp_path, kind, EXPERTS).folder
    model, cpu, found = ModelConfig.load(folder), torch.device("cpu"), []
    assert model.family.experts is not None
    for size in (1, 2):
        for rank in range(size):
            with Checkpoint(folder) as checkpoint:
                group, options = FakeGroup(rank, size), {"keeps_codes": True, "expert_parallel_size": size}
                loader = WeightLoader(checkpoint, model.weight_format, group, torch.float32, cpu, **options)
                experts = load_experts(loader, model.family.experts, "model.layers.0.", 128)
                found.append((experts.gate_up_ECD, experts.down_EDI))
    for whole, first, second in zip(*found, strict=True):
        assert all(isinstance(each, CodedWeight) for each in (whole, first, second))
        assert torch.equal(torch.cat([first.dequantize(), second.dequantize()]), whole.dequantize())


@pytest.mark.parametrize("kind", ["gptq-4-reordered", "int4-reordered"])
def test_experts_with_orders_of_their_own_stay_codes_where_a_rank_has_all_inputs(kind: str, tmp_path: Path) -> None:
    folder = write_coded_checkpoint(tmp_path, kind, EXPERTS).folder
    dense = load_file(folder.parent / "dense" / "model.safetensors")
    model, cpu = ModelConfig.load(folder), torch.device("cpu")
    assert model.family.experts is not None
    with Checkpoint(folder) as checkpoint:
        loader = WeightLoader(checkpoint, model.weight_format, FakeGroup(1, 2), torch.float32, cpu, keeps_codes=True)
        experts = load_experts(loader, model.family.experts, "model.layers.0.", 128)
    gate_up, down = experts.gate_up_ECD, experts.down_EDI
    assert isinstance(gate_up, CodedWeight) and isinstance(down, torch.Tensor)
    assert gate_up.permutation is not None and len({tuple(order) for order in gate_up.permutation.tolist()}) == 4
    for expert in range(4):
        gate, up, whole = (dense[f"model.layers.0.mlp.experts.{expert}.{name}_proj.weight"] for name in NAMES)
        assert torch.equal(gate_up.of_expert(expert).dequantize(), torch.cat([gate[32:], up[32:]]))
        assert torch.equal(down[expert], whole[:, 32:])


def test_codes_of_several_orders_become_floats_together(tmp_path: Path) -> None:
    """Which GPTQ does not make: layers with one input have one order of it. Of each alone codes are kept."""
    folder = write_coded_checkpoint(tmp_path, "gptq-4-reordered").folder
    dense = load_file(folder.parent / "dense" / "model.safetensors")
    names = tuple(f"model.layers.{layer}.mlp.gate_proj" for layer in range(2))
    model, cpu = ModelConfig.load(folder), torch.device("cpu")
    with Checkpoint(folder) as checkpoint:
        loader = WeightLoader(checkpoint, model.weight_format, FakeGroup(0, 1), torch.float32, cpu, keeps_codes=True)
        own = loader.even_section("intermediate_size", 192)
        both = loader.by_outputs(SplitByOutputs(names), "", [own, own], 128).weight
        alone = [loader.by_outputs(SplitByOutputs((name,)), "", [own], 128).weight for name in names]
    assert isinstance(both, DenseWeight) and all(isinstance(each, CodedGroups) for each in alone)
    expected = torch.cat([dense[f"{name}.weight"] for name in names])
    assert torch.equal(both.values_OI, expected)
    assert torch.equal(torch.cat([dequantized(each) for each in alone]), expected)


def dequantized(weight: Any) -> torch.Tensor:
    if isinstance(weight, CodedGroups):
        return weight.packed.dequantize()
    found: torch.Tensor = weight.values_OI
    return found


def test_a_tied_head_and_the_embedding_are_the_same_codes(tmp_path: Path) -> None:
    """Of a rank's part of the vocabulary; without codes they are the same floats."""
    write_checkpoint(tmp_path, Qwen2Config(**SHAPE | {"tie_word_embeddings": True}), 1, torch.float32)
    model, table = ModelConfig.load(tmp_path), load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
    for keeps_codes in (True, False):
        parts = []
        for rank in range(2):
            with Checkpoint(tmp_path) as checkpoint:
                weight_format = OnLoadFormat(Code.INT4) if keeps_codes else DenseFormat()
                loader = WeightLoader(
                    checkpoint,
                    weight_format,
                    FakeGroup(rank, 2),
                    torch.float32,
                    torch.device("cpu"),
                    keeps_codes=keeps_codes,
                )
                decoder: Any = load_decoder(model, loader, 64)
            rows, weight = decoder.embedding.weight_UD, decoder.head.weight
            assert rows is (weight.packed if keeps_codes else weight.values_OI)
            parts.append(dequantized(weight))
        found = torch.cat(parts)[: len(table)]
        assert (found - table).abs().max() <= (0.51 / 127 * table.abs().max() if keeps_codes else 0)


# -- refused -----------------------------------------------------------------------------------------------------------

LAYER = "model.layers.1.mlp.down_proj"


@pytest.mark.parametrize(
    ("kind", "changes", "words"),
    [
        ("int4", {"weight_scale": None}, f"the checkpoint has no tensor {LAYER}.weight_scale"),
        ("int4", {"weight_packed": torch.zeros(128, 23).int()}, "has shape [128, 23], config.json asks for [128, 24]"),
        ("int4", {"weight_shape": torch.tensor([128, 190])}, "is [128, 190], config.json asks for [128, 192]"),
        ("int4", {"weight_scale": torch.full((128, 6), torch.nan)}, f"tensor {LAYER}.weight_scale holds nan"),
        ("int4-zeros", {"weight_zero_point": None}, f"the checkpoint has no tensor {LAYER}.weight_zero_point"),
        ("int8", {"weight_scale": torch.ones(128, 2)}, "has shape [128, 2], config.json asks for [128, 1]"),
        ("gptq-4", {"qzeros": torch.zeros(6, 16)}, "is F32; only I32 weights are supported"),
        (
            "gptq-4",
            {"g_idx": torch.zeros(192).int()},
            f"{LAYER}.g_idx does not divide the 192 inputs into groups of 32",
        ),
        ("gptq-4-reordered", {"g_idx": (torch.arange(192) + 1).int() // 32}, f"{LAYER}.g_idx does not divide the 192"),
        ("gptq-4-reordered", {"g_idx": torch.zeros(191).int()}, "has shape [191], config.json asks for [192]"),
        ("gptq-4-reordered", {"g_idx": None}, f"the checkpoint has no tensor {LAYER}.g_idx"),
        ("fp8-official", {"weight_scale_inv": torch.zeros(1, 2)}, f"tensor {LAYER}.weight_scale_inv holds 0"),
        ("nf4", {"weight.absmax": torch.ones(9)}, "has shape [9], config.json asks for [384]"),
        ("nf4", {"weight.quant_map": torch.ones(16)}, "weight.quant_map has other levels than NF4"),
        ("nf4", {f"weight.{STATE}": torch.tensor(list(b"[]"), dtype=torch.uint8)}, "nf4 holds no JSON object"),
        ("nf4", {f"weight.{STATE}": torch.tensor(list(b"{}"), dtype=torch.uint8)}, 'must be "nf4", got null'),
        ("mxfp4", {"weight_scale": torch.full((128, 6), 255, dtype=torch.uint8)}, "holds a scale that is NaN"),
        ("mxfp4", {"weight_scale": torch.ones(128, 6)}, "is F32; only U8 weights are supported"),
    ],
)
def test_damaged_layers(kind: str, changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    folder = write_coded_checkpoint(tmp_path, kind).folder
    change_tensors(folder, **{f"{LAYER}.{ending}": tensor for ending, tensor in changes.items()})
    assert words in refusal(folder, dtype="float32")


@pytest.mark.parametrize(
    ("kind", "place", "value", "words"),
    [
        ("gptq-4", ("bits",), 3, "not bits 3 and"),
        ("gptq-4", ("checkpoint_format",), "marlin", 'and "marlin"'),
        ("gptq-4", ("group_size",), 48, "group_size must be a multiple of 32, or -1, got 48"),
        ("int4", ("num_bits",), 3, "weights.num_bits must be 4 or 8, got 3"),
        ("int4", ("group_size",), 16, "weights.group_size must be a multiple of 32, got 16"),
        ("int4", ("actorder",), "dynamic", 'must be null or "static" or "weight" or "group", got "dynamic"'),
        ("fp8-blocks", ("block_structure",), None, "block_structure must be two numbers"),
        ("fp8-blocks", ("block_structure",), [64, 32], "input_activations.group_size must be 32, got 64"),
        ("nf4", ("bnb_4bit_quant_type",), "fp4", 'not 4 bits and "fp4"'),
        ("nf4", ("load_in_4bit",), False, 'not 8 bits and "nf4"'),
    ],
)
def test_other_schemes(kind: str, place: tuple[str, ...], value: Any, words: str, tmp_path: Path) -> None:
    folder = write_coded_checkpoint(tmp_path, kind).folder
    path = folder / "config.json"
    config = json.loads(path.read_text())
    at = config["quantization_config"]
    if "config_groups" in at:
        at = at["config_groups"]["group_0"]["weights"]
    at[place[-1]] = value
    path.write_text(json.dumps(config))
    with pytest.raises(ConfigurationError) as caught:
        ModelConfig.load(folder)
    assert words in str(caught.value)


@pytest.mark.parametrize(("kind", "quantized"), [("mxfp4", "mxfp4"), ("fp8-blocks", "fp8")])
def test_what_gpus_cannot_multiply_is_refused_there(kind: str, quantized: str, tmp_path: Path) -> None:
    """fp8, too, in blocks of other sizes than 128 inputs."""
    folder = write_coded_checkpoint(tmp_path, kind).folder
    model = ModelConfig.load(folder)
    with Checkpoint(folder) as checkpoint:
        loader = WeightLoader(checkpoint, model.weight_format, FakeGroup(0, 1), torch.bfloat16, torch.device("cuda"))
        with pytest.raises(ConfigurationError, match=f"{quantized} weights like these are multiplied on CPUs only"):
            loader.by_inputs(SplitByInputs(LAYER), "", 128, loader.even_section("intermediate_size", 192))


@pytest.mark.parametrize("kind", ["mxfp4", "fp8", "fp8-blocks", "fp8-official"])
def test_gpus_multiply_experts_of_fp8_in_blocks_of_128_inputs_alone(kind: str, tmp_path: Path) -> None:
    folder = write_coded_checkpoint(tmp_path, kind, EXPERTS).folder
    model = ModelConfig.load(folder)
    assert model.family.experts is not None
    with fake_cuda(), Checkpoint(folder) as checkpoint:
        loader = WeightLoader(checkpoint, model.weight_format, FakeGroup(0, 1), torch.bfloat16, CUDA)
        if kind == "fp8-official":
            experts = load_experts(loader, model.family.experts, "model.layers.0.", 128)
            assert isinstance(experts.gate_up_ECD, BlockScaledWeight) and experts.gate_up_ECD.shape == (4, 128, 128)
            return
        with pytest.raises(ConfigurationError, match=r"quantized experts \(.*\) are multiplied on CPUs only"):
            load_experts(loader, model.family.experts, "model.layers.0.", 128)
