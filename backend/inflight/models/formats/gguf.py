"""The weights of a GGUF file: codes where they are multiplied as they are, floats of all others.

Legend: I input features, O output features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from inflight.gguf.tensor_types import TensorType
from inflight.layers.weight import CodedGroups, Weight
from inflight.models.checkpoint import Checkpoint
from inflight.models.formats.dense import DenseFormat
from inflight.models.formats.format import Allocate, Block, Target
from inflight.models.ggml_codes import CODES, GROUP_SIZE, CodedType
from inflight.models.gguf_checkpoint import GgufCheckpoint
from inflight.models.gguf_tensor import FLOATS
from inflight_kernels.matmul.coded_weight import CodedWeight


@dataclass(frozen=True, slots=True)
class GgufFormat:
    """`<name>.weight` (O, I) of any type of ggml's. Those that have a scale for each 32 inputs stay codes, if all
    blocks have the same type and none divides a group: of several layers in one product, and of a rank's share of the
    inputs. Products of codes are for CPUs."""

    quantized: ClassVar[str] = "gguf"

    def read(self, checkpoint: Checkpoint, blocks: Sequence[Block], target: Target) -> Weight:
        """See WeightFormat."""
        kinds = _types(checkpoint, blocks)
        if target.keeps_codes and self.has_codes(checkpoint, blocks):
            return _read_codes(checkpoint, blocks, CODES[kinds[0]], target.empty)
        for block, kind in zip(blocks, kinds, strict=True):
            if kind not in FLOATS:
                _of_gguf(checkpoint).note_dense(f"{block.name}.weight")
        return DenseFormat().read(checkpoint, blocks, target)

    def has_codes(self, checkpoint: Checkpoint, blocks: Sequence[Block]) -> bool:
        """Whether a product of these blocks can have codes."""
        kinds = set(_types(checkpoint, blocks))
        return len(kinds) == 1 and kinds <= CODES.keys() and all(_divides(block.inputs) for block in blocks)


def _types(checkpoint: Checkpoint, blocks: Sequence[Block]) -> list[TensorType]:
    """Of their tensors, which must have the right shapes."""
    shapes = [(block.num_outputs, block.num_inputs) for block in blocks]
    names = [f"{block.name}.weight" for block in blocks]
    return [_of_gguf(checkpoint).matrix(*each).type for each in zip(names, shapes, strict=True)]


def _of_gguf(checkpoint: Checkpoint) -> GgufCheckpoint:
    assert isinstance(checkpoint, GgufCheckpoint), "config.json says gguf of another checkpoint"
    return checkpoint


def _divides(inputs: range) -> bool:
    """Whether they are whole groups."""
    return inputs.start % GROUP_SIZE == 0 and len(inputs) % GROUP_SIZE == 0


def _read_codes(checkpoint: Checkpoint, blocks: Sequence[Block], coded: CodedType, empty: Allocate) -> CodedGroups:
    sizes, num_inputs = [len(block.outputs) for block in blocks], len(blocks[0].inputs)
    shared = (sum(sizes), num_inputs // GROUP_SIZE)
    weight = CodedWeight(
        code=coded.code,
        codes=empty(sum(sizes), num_inputs * coded.code.bits // 8, dtype=torch.uint8),
        scales=empty(*shared, dtype=coded.scale_dtype),
        zeros=empty(*shared, dtype=torch.float32) if coded.has_zeros else None,
        group_size=GROUP_SIZE,
    )
    first = 0
    for block, size in zip(blocks, sizes, strict=True):
        part = weight.rows(slice(first, first + size))
        _of_gguf(checkpoint).copy_codes(part, f"{block.name}.weight", block.outputs, block.inputs)
        first += size
    return CodedGroups(weight)
