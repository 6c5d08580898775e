"""Weights of fp8 (float8_e4m3fn): with one scale, one for each output, or one for each block of both features."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from inflight.errors import ConfigurationError
from inflight.layers.weight import Fp8BlockWeight, Fp8Weight, Weight
from inflight.models.checkpoint import FLOAT_DTYPES, Checkpoint
from inflight.models.compressed_tensors import Fp8Scheme, read_blocks
from inflight.models.formats.coded import CodedFormat, Coding, Part
from inflight.models.formats.dense import read_values
from inflight.models.formats.format import Allocate, Block, Target, shape_of
from inflight.models.formats.reading import read_block, read_weight
from inflight_kernels import BlockScaledWeight, Code
from inflight_kernels.matmul.weight_formats import BLOCK_INPUTS
from inflight_kernels.moe import ExpertWeights
from inflight_kernels.quantization import FP8_CAPABILITY

FP8_DTYPES = ("F8_E4M3",)
"""As safetensors name it."""


@dataclass(frozen=True, slots=True)
class Fp8Format(CodedFormat):
    """fp8 weights as compressed-tensors, AutoFP8 and ModelOpt store them: for each layer `weight` (O, I),
    float8_e4m3fn, and `weight_scale`, a float, (O, 1) or, if it is one for all outputs, of one element; with static
    activations also `input_scale`, a float of one element. As codes activations stay as they are.
    """

    scheme: Fp8Scheme

    @property
    def quantized(self) -> str:
        """See WeightFormat."""
        return "fp8"

    @property
    def coding(self) -> Coding:
        """See CodedFormat."""
        return Coding(code=Code.FP8, group_size=0, scale_dtype=torch.float32)

    def is_dense(self, checkpoint: Checkpoint, name: str) -> bool:
        """See CodedFormat."""
        return checkpoint.dtype_of(f"{name}.weight") not in FP8_DTYPES

    def read(self, checkpoint: Checkpoint, blocks: Sequence[Block], target: Target) -> Weight:
        """See WeightFormat. Where codes are not kept, activations are quantised as well."""
        if target.keeps_codes or self.is_dense(checkpoint, blocks[0].name):
            return CodedFormat.read(self, checkpoint, blocks, target)
        if target.device.type == "cuda":
            _refuse_without_fp8(checkpoint, target.device)
        values_OI = read_values(checkpoint, blocks, target, torch.float8_e4m3fn, FP8_DTYPES)
        scale_O = self._read_scales(checkpoint, blocks, target.empty)
        return Fp8Weight(values_OI, scale_O, self._read_input_scale(checkpoint, blocks))

    def check(self, checkpoint: Checkpoint, block: Block) -> None:
        """See CodedFormat."""
        checkpoint.check(f"{block.name}.weight", (block.num_outputs, block.num_inputs), FP8_DTYPES)
        self._scales_of(checkpoint, block)
        self._read_input_scale(checkpoint, [block])

    def read_part(self, checkpoint: Checkpoint, block: Block, device: torch.device) -> Part:
        """See CodedFormat."""
        return Part(
            read_weight(checkpoint, block, torch.float8_e4m3fn, FP8_DTYPES, device).view(torch.uint8),
            self._scales_of(checkpoint, block),
        )

    def _scales_of(self, checkpoint: Checkpoint, block: Block) -> Tensor:
        """(O, 1) float32, of the block's outputs."""
        name, outputs = f"{block.name}.weight_scale", block.outputs
        if self.scheme.has_scale_per_output:
            scales = checkpoint.check_scales(name, (block.num_outputs, 1))
            return scales[outputs.start : outputs.stop].float()
        return torch.full((len(outputs), 1), checkpoint.read_scale(name))

    def _read_input_scale(self, checkpoint: Checkpoint, blocks: Sequence[Block]) -> float | None:
        """One for all tokens, the same on every rank. The blocks have one input: of their scales it is the largest,
        whose range holds that of the others. vLLM takes the same."""
        if not self.scheme.has_input_scale:
            return None
        return max(checkpoint.read_scale(f"{block.name}.input_scale") for block in blocks)

    def _read_scales(self, checkpoint: Checkpoint, blocks: Sequence[Block], empty: Allocate) -> Tensor:
        """(O,) float32, also of weights that have one scale: stacked layers have different ones."""
        scale_O = empty(sum(len(block.outputs) for block in blocks), dtype=torch.float32)
        parts = torch.split(scale_O, [len(block.outputs) for block in blocks])
        for block, part in zip(blocks, parts, strict=True):
            name = f"{block.name}.weight_scale"
            if self.scheme.has_scale_per_output:
                checkpoint.check_scales(name, (block.num_outputs, 1))
                checkpoint.copy_into(part[:, None], name, (block.num_outputs, 1), (block.outputs.start,))
                continue
            scale = checkpoint.read_scale(name)
            if checkpoint.is_read:
                part.fill_(scale)
        return scale_O


def _refuse_without_fp8(checkpoint: Checkpoint, device: torch.device) -> None:
    capability = torch.cuda.get_device_capability(device)
    if capability < FP8_CAPABILITY:
        raise ConfigurationError(
            f"{checkpoint.folder}: fp8 weights need a GPU of compute capability 8.9 (Ada) or more, and this one has "
            f"{capability[0]}.{capability[1]}; use the float16 or bfloat16 checkpoint"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8BlockFormat(CodedFormat):
    """fp8 weights as DeepSeek and Qwen publish them, and compressed-tensors: for each layer `weight` (O, I),
    float8_e4m3fn, and one scale for each block of outputs and inputs. As codes activations stay as they are."""

    outputs: int
    inputs: int
    """Of a block."""
    scales: str
    """Ending of the scales' name."""

    @property
    def quantized(self) -> str:
        """See WeightFormat."""
        return "fp8"

    @property
    def coding(self) -> Coding:
        """See CodedFormat."""
        return Coding(code=Code.FP8, group_size=self.inputs, scale_dtype=torch.float32)

    def is_dense(self, checkpoint: Checkpoint, name: str) -> bool:
        """See CodedFormat."""
        return checkpoint.dtype_of(f"{name}.weight") not in FP8_DTYPES

    def read(self, checkpoint: Checkpoint, blocks: Sequence[Block], target: Target) -> Weight:
        """See WeightFormat. Where codes are not kept, activations are quantised as well, in groups of as many inputs as
        a block has, if the operations for it have such groups."""
        if target.keeps_codes or self.inputs != BLOCK_INPUTS or self.is_dense(checkpoint, blocks[0].name):
            return CodedFormat.read(self, checkpoint, blocks, target)
        return Fp8BlockWeight(self._read_scaled(checkpoint, [blocks], target, ()))

    @property
    def has_expert_kernel(self) -> bool:
        """See CodedFormat."""
        return self.inputs == BLOCK_INPUTS

    def read_experts(self, checkpoint: Checkpoint, experts: Sequence[Sequence[Block]], target: Target) -> ExpertWeights:
        """See CodedFormat; else as `read`."""
        if target.keeps_codes or self.inputs != BLOCK_INPUTS:
            return CodedFormat.read_experts(self, checkpoint, experts, target)
        return self._read_scaled(checkpoint, experts, target, (len(experts),))

    def check(self, checkpoint: Checkpoint, block: Block) -> None:
        """See CodedFormat."""
        checkpoint.check(f"{block.name}.weight", (block.num_outputs, block.num_inputs), FP8_DTYPES)
        checkpoint.check_scales(f"{block.name}.{self.scales}", self._shape_of_scales(block))

    def read_part(self, checkpoint: Checkpoint, block: Block, device: torch.device) -> Part:
        """See CodedFormat."""
        outputs, inputs = block.outputs, block.inputs
        scales = checkpoint.check_scales(f"{block.name}.{self.scales}", self._shape_of_scales(block))
        columns = slice(inputs.start // self.inputs, -(-inputs.stop // self.inputs))
        of_output = torch.arange(outputs.start, outputs.stop) // self.outputs
        return Part(
            read_weight(checkpoint, block, torch.float8_e4m3fn, FP8_DTYPES, device).view(torch.uint8),
            scales[of_output, columns].float(),
        )

    def _read_scaled(
        self, checkpoint: Checkpoint, weights: Sequence[Sequence[Block]], target: Target, several: tuple[int, ...]
    ) -> BlockScaledWeight:
        """One weight, or `several`, of one shape.

        As many outputs share a row of scales as a block has, if all parts of a weight begin and end with a block, as
        those of most networks do. Heads of other sizes, or a rank's share, may cut blocks: then rows are repeated for
        the most outputs that no border divides.
        """
        if target.device.type == "cuda":
            _refuse_without_fp8(checkpoint, target.device)
        for blocks in weights:
            self._check(checkpoint, blocks)
        borders = [*itertools.accumulate(len(block.outputs) for block in weights[0])]
        shared = math.gcd(self.outputs, *borders[:-1], *(block.outputs.start for block in weights[0]))
        num_outputs, num_inputs = shape_of(weights[0])
        packed = BlockScaledWeight(
            target.empty(*several, num_outputs, num_inputs, dtype=torch.float8_e4m3fn),
            target.empty(*several, -(-num_outputs // shared), -(-num_inputs // self.inputs), dtype=torch.float32),
            shared,
        )
        if checkpoint.is_read and not packed.values.is_meta:
            for number, blocks in enumerate(weights):
                self._fill_scaled(checkpoint, blocks, packed.of_expert(number) if several else packed)
        return packed

    def _fill_scaled(self, checkpoint: Checkpoint, blocks: Sequence[Block], packed: BlockScaledWeight) -> None:
        sizes = [len(block.outputs) for block in blocks]
        values = torch.split(packed.values, sizes)
        scales = torch.split(packed.scales, [-(-size // packed.block_outputs) for size in sizes])
        for block, values_OI, scale_BG in zip(blocks, values, scales, strict=True):
            shape, starts = (block.num_outputs, block.num_inputs), (block.outputs.start, block.inputs.start)
            checkpoint.copy_into(values_OI, f"{block.name}.weight", shape, starts, FP8_DTYPES)
            first, end = block.outputs.start // self.outputs, -(-block.outputs.stop // self.outputs)
            rows = read_block(
                checkpoint,
                f"{block.name}.{self.scales}",
                self._shape_of_scales(block),
                (first, block.inputs.start // self.inputs),
                (end - first, scale_BG.shape[1]),
                torch.float32,
                FLOAT_DTYPES,
                scale_BG.device,
            )
            begin = (block.outputs.start - first * self.outputs) // packed.block_outputs
            repeated = rows.repeat_interleave(self.outputs // packed.block_outputs, 0)
            scale_BG.copy_(repeated[begin : begin + len(scale_BG)])

    def _shape_of_scales(self, block: Block) -> tuple[int, int]:
        return -(-block.num_outputs // self.outputs), -(-block.num_inputs // self.inputs)


def choose_fp8(path: Path, quantization: Mapping[str, Any]) -> Fp8Format | Fp8BlockFormat:
    """Raises ConfigurationError."""
    if blocks := quantization.get("weight_block_size"):
        return _choose_blocks(path, quantization, blocks)
    activations, cache = quantization.get("activation_scheme"), quantization.get("kv_cache_scheme")
    if activations not in ("static", "dynamic"):
        raise ConfigurationError(
            f'{path}: quantization_config.activation_scheme must be "static" or "dynamic", got '
            f"{json.dumps(activations)}"
        )
    if cache not in (None, "static"):
        raise ConfigurationError(
            f'{path}: quantization_config.kv_cache_scheme must be "static" or null, got {json.dumps(cache)}'
        )
    # AutoFP8 means one dynamic scale for all tokens of a call. That would make a token depend on the others of its
    # step, so each token has a scale of its own, with which it is rounded no worse.
    return Fp8Format(Fp8Scheme(has_scale_per_output=False, has_input_scale=activations == "static"))


def _choose_blocks(path: Path, quantization: Mapping[str, Any], sizes: Any) -> Fp8BlockFormat:
    blocks = read_blocks(path, "quantization_config.weight_block_size", sizes)
    if quantization.get("activation_scheme", "dynamic") != "dynamic":
        raise ConfigurationError(
            f'{path}: quantization_config.activation_scheme must be "dynamic" where weights have a scale for each '
            f"block, got {json.dumps(quantization['activation_scheme'])}"
        )
    return Fp8BlockFormat(outputs=blocks.outputs, inputs=blocks.inputs, scales="weight_scale_inv")
