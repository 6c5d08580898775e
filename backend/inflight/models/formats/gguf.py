"""The weights of a GGUF file: codes where they are multiplied as they are, floats of all others.

Legend: I input features, O output features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from inflight.gguf.tensor_types import TensorType
from inflight.layers.weight import CodedGroups, Weight
from inflight.models.checkpoint import Checkpoint
from inflight.models.formats.coded import Coding
from inflight.models.formats.dense import DenseFormat, copy_values
from inflight.models.formats.format import Block, Target, shape_of
from inflight.models.ggml_codes import GROUP_SIZE, common_coding
from inflight.models.gguf_checkpoint import GgufCheckpoint
from inflight_kernels.matmul.coded_weight import CodedWeight
from inflight_kernels.moe import ExpertWeights


@dataclass(frozen=True, slots=True)
class GgufFormat:
    """`<name>.weight` (O, I) of any type of ggml's, floats too. Those that have a scale for each 16 or 32 inputs stay
    codes, if none divides a group: a rank's share of the inputs. Blocks of several types, of layers in one product,
    have the codes that all of them can have, if these are whole numbers; so do a layer's experts. Products of codes are
    for CPUs."""

    quantized: ClassVar[str] = "gguf"
    has_expert_kernel: ClassVar[bool] = True
    """See CodedFormat: GPUs have floats."""

    def read(self, checkpoint: Checkpoint, blocks: Sequence[Block], target: Target) -> Weight:
        """See WeightFormat."""
        blocks = [replace(block, transposed=False) for block in blocks]  # whatever other checkpoints have
        coding = _kept_coding(checkpoint, blocks, target)
        if coding is None:
            return DenseFormat().read(checkpoint, blocks, target)
        weight = _allocate(coding, shape_of(blocks), target)
        _fill(checkpoint, blocks, coding, weight)
        return CodedGroups(weight)

    def read_experts(self, checkpoint: Checkpoint, experts: Sequence[Sequence[Block]], target: Target) -> ExpertWeights:
        """The same of several weights of one shape, one after the other: (E, O, I)."""
        shape = (len(experts), *shape_of(experts[0]))
        coding = _kept_coding(checkpoint, [block for blocks in experts for block in blocks], target)
        if coding is None:
            values_EOI = target.empty(*shape)
            for blocks, values_OI in zip(experts, values_EOI, strict=True):
                copy_values(checkpoint, blocks, values_OI)
            return values_EOI
        weight = _allocate(coding, shape, target)
        for expert, blocks in enumerate(experts):
            _fill(checkpoint, blocks, coding, weight.of_expert(expert))
        return weight

    def has_exact_codes(self, checkpoint: Checkpoint, block: Block) -> bool:
        """Whether it can have codes that give its type's numbers without another rounding: those without zeros."""
        coding = _coding([block], _types(checkpoint, [block]))
        return coding is not None and not coding.has_zeros


def _kept_coding(checkpoint: Checkpoint, blocks: Sequence[Block], target: Target) -> Coding | None:
    """Of a product of these blocks, or of the products of several experts; None if they become floats."""
    kinds = _types(checkpoint, blocks)
    coding = _coding(blocks, kinds) if target.keeps_codes else None
    if coding is None:
        for block in blocks:
            _of_gguf(checkpoint).note_dense(f"{block.name}.weight")
    return coding


def _coding(blocks: Sequence[Block], kinds: Sequence[TensorType]) -> Coding | None:
    """That blocks of these types can have in common."""
    return common_coding(kinds) if all(_divides(block.inputs) for block in blocks) else None


def _types(checkpoint: Checkpoint, blocks: Sequence[Block]) -> list[TensorType]:
    """Of their tensors' rows; the tensors must have the right shapes."""
    shapes = [(block.num_outputs, block.num_inputs) for block in blocks]
    names = [f"{block.name}.weight" for block in blocks]
    found = [_of_gguf(checkpoint).matrix(*each).types for each in zip(names, shapes, strict=True)]
    return [kind for kinds in found for kind in kinds]


def _of_gguf(checkpoint: Checkpoint) -> GgufCheckpoint:
    assert isinstance(checkpoint, GgufCheckpoint), "config.json says gguf of another checkpoint"
    return checkpoint


def _divides(inputs: range) -> bool:
    """Whether they are whole groups of any type."""
    return inputs.start % GROUP_SIZE == 0 and len(inputs) % GROUP_SIZE == 0


def _allocate(coding: Coding, shape: Sequence[int], target: Target) -> CodedWeight:
    """Of `shape` (…, O, I)."""
    *rows, num_inputs = shape
    shared = (*rows, num_inputs // coding.group_size)
    return CodedWeight(
        code=coding.code,
        codes=target.empty(*rows, num_inputs * coding.code.bits // 8, dtype=torch.uint8),
        scales=target.empty(*shared, dtype=coding.scale_dtype),
        zeros=target.empty(*shared, dtype=torch.float32) if coding.has_zeros else None,
        group_size=coding.group_size,
        inputs=target.inputs_of(coding.code),
    )


def _fill(checkpoint: Checkpoint, blocks: Sequence[Block], coding: Coding, weight: CodedWeight) -> None:
    """A weight (O, I), block by block."""
    first = 0
    for block in blocks:
        part = weight.rows(slice(first, first + len(block.outputs)))
        _of_gguf(checkpoint).copy_codes(part, coding, f"{block.name}.weight", block.outputs, block.inputs)
        first += len(block.outputs)
