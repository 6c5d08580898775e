"""4-bit weights of bitsandbytes: NF4 (QLoRA)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from inflight.errors import ConfigurationError
from inflight.models.checkpoint import Checkpoint
from inflight.models.formats.coded import CodedFormat, Coding, Part
from inflight.models.formats.format import Block
from inflight.models.formats.reading import read_block
from inflight_kernels import Code

BLOCK_SIZE = 64
"""Inputs that share a scale."""
NESTED_SIZE = 256
"""Scales that share a scale of theirs, if they are quantised too."""
STATE = "quant_state.bitsandbytes__nf4"
BYTES, FLOATS = ("U8",), ("F32",)


@dataclass(frozen=True, slots=True)
class Nf4Format(CodedFormat):
    """For each layer `weight` (O * I / 2, 1), uint8 with the even input in the upper half, and behind its name `absmax`
    (O * I / 64), the scales: float32, or uint8 as places in `nested_quant_map` (256), which `nested_absmax` scales and
    an offset moves. `quant_map` (16) has the levels, `quant_state…` the shape and the offset, as a JSON text.
    """

    @property
    def quantized(self) -> str:
        """See WeightFormat."""
        return "nf4"

    @property
    def coding(self) -> Coding:
        """See CodedFormat."""
        return Coding(code=Code.NF4, group_size=BLOCK_SIZE, scale_dtype=torch.float32)

    def shape_of_layer(self, checkpoint: Checkpoint, name: str) -> tuple[int, int]:
        """See CodedFormat."""
        shape = self._state(checkpoint, f"{name}.weight").get("shape")
        if not isinstance(shape, list) or len(shape) != 2:
            raise ConfigurationError(f"{checkpoint.folder}: tensor {name}.weight.{STATE} has no shape of two numbers")
        return int(shape[0]), int(shape[1])

    def is_dense(self, checkpoint: Checkpoint, name: str) -> bool:
        """See CodedFormat."""
        return checkpoint.dtype_of(f"{name}.weight") not in BYTES

    def check(self, checkpoint: Checkpoint, block: Block) -> None:
        """See CodedFormat."""
        name, count = f"{block.name}.weight", block.num_outputs * block.num_inputs
        if block.num_inputs % BLOCK_SIZE:
            raise ConfigurationError(
                f"{checkpoint.folder}: {name} has {block.num_inputs} inputs, and NF4 is supported for multiples of "
                f"{BLOCK_SIZE}; use the float16 or bfloat16 checkpoint"
            )
        checkpoint.check(name, (count // 2, 1), BYTES)
        checkpoint.check(f"{name}.absmax", (count // BLOCK_SIZE,), (*BYTES, *FLOATS))
        checkpoint.check(f"{name}.quant_map", (16,), FLOATS)
        if self._is_nested(checkpoint, name):
            checkpoint.check(f"{name}.nested_absmax", (-(-count // BLOCK_SIZE // NESTED_SIZE),), FLOATS)
            checkpoint.check(f"{name}.nested_quant_map", (256,), FLOATS)
        self._check_state(checkpoint, block)

    def read_part(self, checkpoint: Checkpoint, block: Block, device: torch.device) -> Part:
        """See CodedFormat."""
        name, outputs, inputs = f"{block.name}.weight", block.outputs, block.inputs
        row_bytes, count = block.num_inputs // 2, block.num_outputs * block.num_inputs
        halves = read_block(
            checkpoint, name, (count // 2, 1), (outputs.start * row_bytes, 0), (len(outputs) * row_bytes, 1),
            torch.uint8, BYTES, device,
        ).view(len(outputs), row_bytes)  # fmt: skip
        codes = torch.stack([halves >> 4, halves & 15], -1).flatten(1)[:, inputs.start : inputs.stop]
        scales = self._scales(checkpoint, name, count // BLOCK_SIZE, device).view(block.num_outputs, -1)
        groups = slice(inputs.start // BLOCK_SIZE, inputs.stop // BLOCK_SIZE)
        return Part(codes.contiguous(), scales[outputs.start : outputs.stop, groups])

    def _scales(self, checkpoint: Checkpoint, name: str, count: int, device: torch.device) -> Tensor:
        """(count), float32."""

        def read(kind: str, size: int, dtypes: tuple[str, ...] = FLOATS) -> Tensor:
            dtype = torch.uint8 if dtypes is BYTES else torch.float32
            return read_block(checkpoint, f"{name}.{kind}", (size,), (0,), (size,), dtype, dtypes, device)

        if not self._is_nested(checkpoint, name):
            return read("absmax", count)
        nested = read("nested_absmax", -(-count // NESTED_SIZE)).repeat_interleave(NESTED_SIZE)[:count]
        places = read("absmax", count, BYTES).long()
        return read("nested_quant_map", 256)[places] * nested + float(self._state(checkpoint, name)["nested_offset"])

    def _is_nested(self, checkpoint: Checkpoint, name: str) -> bool:
        return checkpoint.dtype_of(f"{name}.absmax") in BYTES

    def _state(self, checkpoint: Checkpoint, name: str) -> dict[str, Any]:
        try:
            state = json.loads(checkpoint.read_bytes(f"{name}.{STATE}"))
        except (ValueError, RecursionError):
            state = None
        if not isinstance(state, dict):
            raise ConfigurationError(f"{checkpoint.folder}: tensor {name}.{STATE} holds no JSON object")
        return state

    def _check_state(self, checkpoint: Checkpoint, block: Block) -> None:
        name = f"{block.name}.weight"
        state = self._state(checkpoint, name)
        expected: dict[str, object] = {
            "quant_type": "nf4",
            "blocksize": BLOCK_SIZE,
            "shape": [block.num_outputs, block.num_inputs],
        }
        if self._is_nested(checkpoint, name):
            expected["nested_blocksize"] = NESTED_SIZE
            if type(state.get("nested_offset")) is not float:
                raise ConfigurationError(f"{checkpoint.folder}: tensor {name}.{STATE} has no nested_offset")
        for key, value in expected.items():
            if state.get(key) != value:
                raise ConfigurationError(
                    f"{checkpoint.folder}: {key} in tensor {name}.{STATE} must be {json.dumps(value)}, got "
                    f"{json.dumps(state.get(key))}"
                )
        if checkpoint.is_read:
            levels = read_block(checkpoint, f"{name}.quant_map", (16,), (0,), (16,), torch.float32, FLOATS)
            if not torch.allclose(levels, Code.NF4.numbers(), atol=1e-6):
                raise ConfigurationError(f"{checkpoint.folder}: tensor {name}.quant_map has other levels than NF4")


def choose_bitsandbytes(path: Path, quantization: Mapping[str, Any]) -> Nf4Format:
    """Raises ConfigurationError."""
    kind = quantization.get("bnb_4bit_quant_type", "fp4")
    if not quantization.get("load_in_4bit") or kind != "nf4":
        bits = "4 bits" if quantization.get("load_in_4bit") else "8 bits"
        raise ConfigurationError(
            f"{path}: of bitsandbytes checkpoints only those of 4 bits with bnb_4bit_quant_type nf4 are supported, not "
            f"{bits} and {json.dumps(kind)}; use the float16 or bfloat16 checkpoint"
        )
    return Nf4Format()
