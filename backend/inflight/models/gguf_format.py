"""The weights of a GGUF file: codes where they are multiplied as they are, floats of all others.

Legend: I input features, O output features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from inflight.layers.weight import CodedGroups, Weight
from inflight.models.checkpoint import Checkpoint
from inflight.models.gguf_checkpoint import GgufCheckpoint
from inflight.models.gguf_tensor import CODES, FLOATS, GROUP_SIZE
from inflight.models.weight_formats import Allocate, Block, DenseFormat
from inflight_kernels.matmul.coded_weight import Code, CodedWeight


@dataclass(frozen=True, slots=True)
class GgufFormat:
    """`<name>.weight` (O, I) of any type of ggml's. Those whose numbers are a scale times a code stay codes, if all
    blocks have the same type and none divides a group: of several layers in one product, and of a rank's share of the
    inputs. Products of codes are for CPUs."""

    quantized: ClassVar[str] = "gguf"
    reads_experts: ClassVar[bool] = True

    def read(
        self,
        checkpoint: Checkpoint,
        blocks: Sequence[Block],
        dtype: torch.dtype,
        device: torch.device,
        empty: Allocate,
    ) -> Weight:
        """See WeightFormat."""
        assert isinstance(checkpoint, GgufCheckpoint), "config.json says gguf of another checkpoint"
        names = [f"{block.name}.weight" for block in blocks]
        shapes = [(block.num_outputs, block.num_inputs) for block in blocks]
        types = [checkpoint.matrix(*each).type for each in zip(names, shapes, strict=True)]
        code = CODES.get(types[0])
        is_whole = all(_divides(block.inputs) for block in blocks)
        if code is not None and len(set(types)) == 1 and is_whole and device.type != "cuda":
            return _read_codes(checkpoint, blocks, code, empty)
        for name, kind in zip(names, types, strict=True):
            if kind not in FLOATS:
                checkpoint.note_dense(name)
        return DenseFormat().read(checkpoint, blocks, dtype, device, empty)


def _divides(inputs: range) -> bool:
    """Whether they are whole groups."""
    return inputs.start % GROUP_SIZE == 0 and len(inputs) % GROUP_SIZE == 0


def _read_codes(checkpoint: GgufCheckpoint, blocks: Sequence[Block], code: Code, empty: Allocate) -> CodedGroups:
    sizes = [len(block.outputs) for block in blocks]
    num_inputs = len(blocks[0].inputs)
    codes = empty(sum(sizes), num_inputs * code.bits // 8, dtype=torch.uint8)
    scales = empty(sum(sizes), num_inputs // GROUP_SIZE, dtype=torch.float16)
    for block, own_codes, own_scales in zip(blocks, torch.split(codes, sizes), torch.split(scales, sizes), strict=True):
        checkpoint.copy_codes(own_codes, own_scales, f"{block.name}.weight", block.outputs, block.inputs)
    return CodedGroups(CodedWeight(code, codes, scales, None, GROUP_SIZE))
