"""Tiny checkpoints with weights of 4 and 8 bits in the formats that people publish, and the same network with the
weights that their packages, or their definitions, dequantise them to.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from awq_checkpoints import NIBBLES as AWQ_NIBBLES
from awq_checkpoints import QUANTIZATION as AWQ_QUANTIZATION
from compressed_tensors.compressors.base import BaseCompressor
from compressed_tensors.quantization import QuantizationScheme
from safetensors.torch import load_file, save_file
from tiny_checkpoints import SIZES, TinyCheckpoint, write_checkpoint
from torch import Tensor, nn
from transformers import PreTrainedConfig, Qwen2Config, Qwen3MoeConfig

from inflight_kernels.matmul.coded_weight import NF4_NUMBERS

GROUP_SIZE = 32
SHAPE: dict[str, Any] = {**SIZES, "hidden_size": 128, "intermediate_size": 192}
CONFIG: PreTrainedConfig = Qwen2Config(**SHAPE)
"""Sizes that two ranks can split between groups, and that C++ computes."""
EXPERTS: PreTrainedConfig = Qwen3MoeConfig(
    **{**SHAPE, "head_dim": 32}, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64, mlp_only_layers=[1]
)
Stored = tuple[dict[str, Tensor], Tensor]
"""A layer's tensors by the endings of their names, and the weight (outputs, inputs), float32, that they mean."""


@dataclass(frozen=True)
class Kind:
    quantization: dict[str, Any]
    """Of config.json."""
    quantize: Callable[[Tensor, torch.Generator], Stored]
    rounding: float
    """Of a weight, as a share of its layer's largest: how far the quantised ones are from it at most."""


def write_coded_checkpoint(folder: Path, kind: str, config: PreTrainedConfig = CONFIG) -> TinyCheckpoint:
    """Write the quantised checkpoint to `folder`/coded. The result has its folder, and a network of transformers, in
    float32, with the weights that its codes mean."""
    checkpoint = write_checkpoint(folder / "dense", config, 1, torch.float32)
    tensors = load_file(folder / "dense" / "model.safetensors")
    of_kind, meant = KINDS[kind], dict(tensors)
    for name in sorted(tensors):
        if not name.endswith("_proj.weight"):
            continue
        stored, values = of_kind.quantize(tensors[name], _generator_of_input(name))
        assert (values - tensors[name]).abs().max() <= of_kind.rounding * tensors[name].abs().max()
        del meant[name]
        meant |= {f"{name.removesuffix('.weight')}.{ending}": tensor for ending, tensor in stored.items()}
        tensors[name] = values
    written: dict[str, Any] = json.loads((folder / "dense" / "config.json").read_text())
    (folder / "coded").mkdir()
    (folder / "coded" / "config.json").write_text(json.dumps({**written, "quantization_config": of_kind.quantization}))
    save_file({name: tensor.contiguous() for name, tensor in meant.items()}, folder / "coded" / "model.safetensors")
    save_file(tensors, folder / "dense" / "model.safetensors")
    model = type(checkpoint.model).from_pretrained(folder / "dense", dtype=torch.float32).eval()
    return TinyCheckpoint(folder / "coded", model, margin=0.001)


def _generator_of_input(name: str) -> torch.Generator:
    """The same for all layers with one input: of GPTQ they have one order of inputs."""
    of_input = re.sub("(q|k|v|gate|up)_proj", "proj", name)
    return torch.Generator().manual_seed(zlib.crc32(of_input.encode()))


# -- compressed-tensors, by its own package ----------------------------------------------------------------------------


def _scheme(stored: str, inputs: dict[str, Any] | None, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"dynamic": False, "observer": "minmax", **weights}, "format": stored}
    return {
        "quant_method": "compressed-tensors",
        "format": stored,
        "quantization_status": "compressed",
        "config_groups": {"group_0": {**group, "input_activations": inputs, "output_activations": None}},
        "ignore": ["lm_head"],
    }


def _compressed(quantization: dict[str, Any]) -> Callable[[Tensor, torch.Generator], Stored]:
    stored_as = quantization["format"]
    (group,) = quantization["config_groups"].values()
    scheme = QuantizationScheme(**{name: value for name, value in group.items() if name != "format"})
    compressor = BaseCompressor.get_value_from_registry(stored_as)
    args = scheme.weights
    assert args is not None

    def quantize(weight: Tensor, generator: torch.Generator) -> Stored:
        given: dict[str, Tensor] = {"weight": weight, **_scales(weight, args)}
        stored = compressor.compress(given, scheme)
        values = compressor.decompress(dict(stored), scheme)["weight"]
        return stored, values.float()

    return quantize


def _reordered(kind: Kind) -> Kind:
    """Whole numbers of 4 bits whose groups are of inputs anywhere, as the package stored them before its version 0.20:
    the codes in the order of the inputs, and each one's group."""
    quantization = deepcopy(kind.quantization)
    quantization["config_groups"]["group_0"]["weights"]["actorder"] = "group"

    def quantize(weight: Tensor, generator: torch.Generator) -> Stored:
        order = torch.randperm(weight.shape[1], generator=generator)
        place = order.argsort()
        stored, values = kind.quantize(weight[:, order].contiguous(), generator)
        group_of, meant = place // GROUP_SIZE, values[:, place].contiguous()
        codes = (meant / stored["weight_scale"].float()[:, group_of]).round().int() + 8
        return stored | {"weight_packed": _words(codes, 4), "weight_g_idx": group_of.int()}, meant

    return Kind(quantization, quantize, kind.rounding)


def _scales(weight: Tensor, args: Any) -> dict[str, Tensor]:
    """With which the range of each group's weights is that of the codes."""
    strategy = str(getattr(args.strategy, "value", args.strategy))
    if strategy == "block":
        tall, wide = args.block_structure
        padded = nn.functional.pad(weight, (0, -weight.shape[1] % wide, 0, -weight.shape[0] % tall))
        groups = padded.unflatten(0, (-1, tall)).unflatten(2, (-1, wide)).transpose(1, 2).flatten(2)
        return {"weight_scale": groups.abs().amax(-1) / 448}
    groups = weight.unflatten(1, (-1, args.group_size)) if strategy == "group" else weight[:, None]
    if args.type == "float" and args.num_bits == 4:
        return {"weight_scale": torch.exp2((groups.abs().amax(-1) / 6).log2().ceil())}
    if args.type == "float":
        return {"weight_scale": groups.abs().amax(-1) / 448}
    half = 2 ** (args.num_bits - 1)
    if args.symmetric:
        return {"weight_scale": groups.abs().amax(-1) / (half - 1)}
    low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    scale = (high - low) / (2 * half - 1)
    return {"weight_scale": scale, "weight_zero_point": (-half - low / scale).round().to(torch.int8)}


# -- GPTQ, AWQ, fp8 and NF4, after their definitions --------------------------------------------------------------


def _gptq(bits: int, group_size: int, version: str = "gptq", *, reordered: bool = False) -> Kind:
    def quantize(weight: Tensor, generator: torch.Generator) -> Stored:
        num_inputs = weight.shape[1]
        size = num_inputs if group_size == -1 else group_size
        group_of = torch.arange(num_inputs) // size
        if reordered:
            group_of = group_of[torch.randperm(num_inputs, generator=generator)]
        groups = [weight[:, group_of == group] for group in range(-(-num_inputs // size))]
        low = torch.stack([each.amin(1).clamp(max=0) for each in groups])
        high = torch.stack([each.amax(1).clamp(min=0) for each in groups])
        scales = ((high - low) / (2**bits - 1)).half()
        zeros = (-low / scales.float()).round().clamp(1, 2**bits - 1)
        of_input_scale, of_input_zero = scales.float()[group_of], zeros[group_of]
        q = (weight.T / of_input_scale + of_input_zero).round().clamp(0, 2**bits - 1)
        stored = {
            "qweight": _words(q.T.int(), bits).T,
            "qzeros": _words(zeros.int() - int(version == "gptq"), bits),
            "scales": scales,
            "g_idx": group_of.int(),
        }
        return stored, ((q - of_input_zero) * of_input_scale).T.contiguous()

    quantization = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group_size,
        "desc_act": reordered,
        "sym": False,
        "checkpoint_format": version,
    }
    return Kind(quantization, quantize, 0.2 if bits == 4 else 0.02)


def _words(numbers: Tensor, bits: int) -> Tensor:
    """(rows, N) as (rows, N * bits / 32), int32: neighbours in a word, from the lowest bits up."""
    in_word = 32 // bits
    parts = numbers.long().unflatten(1, (-1, in_word)) << torch.arange(0, 32, bits)
    return parts.sum(2).to(torch.int32) if bits == 4 else parts.sum(2).to(torch.uint32).view(torch.int32)


def _awq(weight: Tensor, generator: torch.Generator) -> Stored:
    """As AutoAWQ stores it: of version gemm, with eight outputs in a word."""
    groups = weight.T.unflatten(0, (-1, GROUP_SIZE))
    low, high = groups.amin(1).clamp(max=0), groups.amax(1).clamp(min=0)
    scales = ((high - low) / 15).half()
    zeros = (-low / scales.float()).round().clamp(0, 15)
    of_input_scale, of_input_zero = (each.float().repeat_interleave(GROUP_SIZE, 0) for each in (scales, zeros))
    q = (weight.T / of_input_scale + of_input_zero).round().clamp(0, 15)
    in_order = [each.int().unflatten(1, (-1, 8))[:, :, list(AWQ_NIBBLES)].flatten(1) for each in (q, zeros)]
    qweight, qzeros = (_words(each, 4) for each in in_order)
    stored = {"qweight": qweight, "qzeros": qzeros, "scales": scales}
    return stored, ((q - of_input_zero) * of_input_scale).T.contiguous()


def _fp8_whole(weight: Tensor, generator: torch.Generator) -> Stored:
    """As AutoFP8 and ModelOpt store it: one scale, and one of the activations."""
    scale = weight.abs().max() / 448
    values = (weight / scale).to(torch.float8_e4m3fn)
    stored = {"weight": values, "weight_scale": scale[None], "input_scale": torch.tensor([0.02])}
    return stored, values.float() * scale


def _fp8_blocks(weight: Tensor, generator: torch.Generator) -> Stored:
    """As DeepSeek and Qwen publish them: 128 by 128."""
    scales = torch.empty(-(-weight.shape[0] // 128), -(-weight.shape[1] // 128))
    values, meant = torch.empty_like(weight, dtype=torch.float8_e4m3fn), torch.empty_like(weight)
    for row in range(scales.shape[0]):
        for column in range(scales.shape[1]):
            place = slice(128 * row, 128 * row + 128), slice(128 * column, 128 * column + 128)
            scales[row, column] = weight[place].abs().max() / 448
            values[place] = (weight[place] / scales[row, column]).to(torch.float8_e4m3fn)
            meant[place] = values[place].float() * scales[row, column]
    return {"weight": values, "weight_scale_inv": scales}, meant


def _nf4(weight: Tensor, generator: torch.Generator) -> Stored:
    """As bitsandbytes stores it, with scales of float32."""
    levels = torch.tensor(NF4_NUMBERS)
    scales = weight.reshape(-1, 64).abs().amax(1)
    codes = ((weight.reshape(-1, 64) / scales[:, None])[..., None] - levels).abs().argmin(-1)
    state = {"quant_type": "nf4", "blocksize": 64, "dtype": "float32", "shape": list(weight.shape)}
    pairs = codes.flatten().to(torch.uint8).view(-1, 2)
    stored = {
        "weight": (pairs[:, 0] << 4 | pairs[:, 1])[:, None],
        "weight.absmax": scales,
        "weight.quant_map": levels,
        "weight.quant_state.bitsandbytes__nf4": torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8),
    }
    return stored, (levels[codes] * scales[:, None]).view(weight.shape)


def _of_package(rounding: float, stored: str, inputs: dict[str, Any] | None = None, **weights: Any) -> Kind:
    quantization = _scheme(stored, inputs, **weights)
    return Kind(quantization, _compressed(deepcopy(quantization)), rounding)


INT4 = {"type": "int", "num_bits": 4}
IN_GROUPS = _of_package(0.2, "pack-quantized", **INT4, symmetric=True, strategy="group", group_size=GROUP_SIZE)
INT8 = {"type": "int", "num_bits": 8}
FP8 = {"type": "float", "num_bits": 8, "symmetric": True}
KINDS: dict[str, Kind] = {
    "awq": Kind(AWQ_QUANTIZATION, _awq, 0.2),
    "gptq-4": _gptq(4, GROUP_SIZE),
    "gptq-4-v2": _gptq(4, 64, "gptq_v2"),
    "gptq-4-whole": _gptq(4, -1),
    "gptq-4-reordered": _gptq(4, GROUP_SIZE, reordered=True),
    "gptq-8": _gptq(8, GROUP_SIZE),
    "int4": IN_GROUPS,
    "int4-reordered": _reordered(IN_GROUPS),
    "int4-zeros": _of_package(0.2, "pack-quantized", **INT4, symmetric=False, strategy="group", group_size=64),
    "int4-channel": _of_package(0.2, "pack-quantized", **INT4, symmetric=True, strategy="channel"),
    "int8-packed": _of_package(0.02, "pack-quantized", **INT8, symmetric=True, strategy="channel"),
    "int8": _of_package(0.02, "int-quantized", **INT8, symmetric=True, strategy="channel"),
    "w8a8": _of_package(
        0.02,
        "int-quantized",
        {**INT8, "dynamic": True, "strategy": "token"},
        **INT8,
        symmetric=True,
        strategy="channel",
    ),
    "fp8": _of_package(
        0.07, "float-quantized", {**FP8, "dynamic": True, "strategy": "token"}, **FP8, strategy="channel"
    ),
    "fp8-blocks": _of_package(
        0.07,
        "float-quantized",
        {**FP8, "dynamic": True, "strategy": "group", "group_size": 64},
        **FP8,
        strategy="block",
        block_structure=[64, 64],
    ),
    "fp8-whole": Kind({"quant_method": "fp8", "activation_scheme": "static"}, _fp8_whole, 0.07),
    "fp8-modelopt": Kind({"quant_method": "modelopt", "quant_algo": "FP8"}, _fp8_whole, 0.07),
    "fp8-official": Kind(
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}, _fp8_blocks, 0.07
    ),
    "nf4": Kind({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, _nf4, 0.2),
    "mxfp4": _of_package(0.3, "mxfp4-pack-quantized", type="float", num_bits=4, strategy="group", group_size=32),
}
