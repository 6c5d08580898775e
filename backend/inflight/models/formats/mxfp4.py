"""Experts in MXFP4 as gpt-oss publishes them: all of a layer in one tensor of blocks and one of scales.

Legend: E experts, I input features, O output features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from inflight.errors import ConfigurationError
from inflight.layers.weight import Weight
from inflight.models.checkpoint import Checkpoint
from inflight.models.formats.dense import DenseFormat
from inflight.models.formats.format import Block, Target
from inflight.models.formats.packed import scales_of
from inflight.models.formats.reading import read_block
from inflight_kernels import Code, CodedWeight
from inflight_kernels.moe import ExpertWeights

GROUP_SIZE = 32
"""Inputs of a block, which share a scale."""
BLOCK_BYTES = GROUP_SIZE // 2
DTYPES = ("U8",)


@dataclass(frozen=True, slots=True, kw_only=True)
class StackedBlocks:
    """The rows and columns of a layer's experts that a rank reads: of `<name>_blocks` (E, O, I / 32, 16), with the even
    input in the lower half of a byte, and of `<name>_scales` (E, O, I / 32), exponents of 2 above -127."""

    name: str
    num_experts: int
    num_outputs: int
    num_inputs: int
    """All of the whole tensors."""
    experts: range
    outputs: range
    inputs: range
    in_turn: bool = False
    """The outputs are those of two layers in turn. Read, all of the first stand before all of the second."""


@dataclass(frozen=True, slots=True)
class Mxfp4Experts:
    """All layers but experts are floats. Experts stay codes where C++ multiplies them, and become floats elsewhere."""

    quantized: ClassVar[str] = "mxfp4"

    def read(self, checkpoint: Checkpoint, blocks: Sequence[Block], target: Target) -> Weight:
        """See WeightFormat."""
        return DenseFormat().read(checkpoint, blocks, target)

    def read_stacked(self, checkpoint: Checkpoint, blocks: StackedBlocks, target: Target) -> ExpertWeights:
        """(E, O, I) of the rows and columns that are read."""
        _check(checkpoint, blocks)
        num_experts, num_outputs, num_inputs = len(blocks.experts), len(blocks.outputs), len(blocks.inputs)
        if not target.keeps_codes:
            values_EOI = target.empty(num_experts, num_outputs, num_inputs)
            if checkpoint.is_read and not values_EOI.is_meta:
                for expert, values_OI in zip(blocks.experts, values_EOI, strict=True):
                    values_OI.copy_(_read(checkpoint, blocks, expert, target.device).dequantize(target.dtype))
            return values_EOI
        weight = CodedWeight(
            code=Code.FP4,
            codes=target.empty(num_experts, num_outputs, num_inputs // 2, dtype=torch.uint8),
            scales=target.empty(num_experts, num_outputs, num_inputs // GROUP_SIZE, dtype=torch.bfloat16),
            zeros=None,
            group_size=GROUP_SIZE,
        )
        if checkpoint.is_read and not weight.codes.is_meta:
            for place, expert in enumerate(blocks.experts):
                own, read = weight.of_expert(place), _read(checkpoint, blocks, expert, target.device)
                own.codes.copy_(read.codes)
                own.scales.copy_(read.scales)
        return weight


def _check(checkpoint: Checkpoint, blocks: StackedBlocks) -> None:
    if blocks.num_inputs % GROUP_SIZE or blocks.inputs.start % GROUP_SIZE or len(blocks.inputs) % GROUP_SIZE:
        raise ConfigurationError(
            f"{checkpoint.folder}: the {blocks.num_inputs} inputs of {blocks.name} are quantised in groups of "
            f"{GROUP_SIZE}, and one rank's share of them, {len(blocks.inputs)}, is not a whole number of groups; "
            "choose another tensor_parallel_size"
        )
    shape = (blocks.num_experts, blocks.num_outputs, blocks.num_inputs // GROUP_SIZE)
    checkpoint.check(f"{blocks.name}_blocks", (*shape, BLOCK_BYTES), DTYPES)
    checkpoint.check(f"{blocks.name}_scales", shape, DTYPES)


def _read(checkpoint: Checkpoint, blocks: StackedBlocks, expert: int, device: torch.device) -> CodedWeight:
    """One expert's (O, I), in the memory of this process."""
    shape = (blocks.num_experts, blocks.num_outputs, blocks.num_inputs // GROUP_SIZE)
    starts = (expert, blocks.outputs.start, blocks.inputs.start // GROUP_SIZE)
    size = (1, len(blocks.outputs), len(blocks.inputs) // GROUP_SIZE)

    def read(kind: str, of_block: tuple[int, ...] = ()) -> torch.Tensor:
        read = read_block(
            checkpoint,
            f"{blocks.name}_{kind}",
            (*shape, *of_block),
            (*starts, *(0 for _ in of_block)),
            (*size, *of_block),
            torch.uint8,
            DTYPES,
            device,
        )[0]
        return torch.cat([read[::2], read[1::2]]) if blocks.in_turn else read

    scales = scales_of(checkpoint, f"{blocks.name}_scales", read("scales"))
    return CodedWeight(Code.FP4, read("blocks", (BLOCK_BYTES,)).flatten(1), scales, None, GROUP_SIZE)
