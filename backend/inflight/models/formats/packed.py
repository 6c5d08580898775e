"""Whole numbers and MXFP4 of compressed-tensors: weights of 4 or 8 bits."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from inflight.errors import ConfigurationError
from inflight.models.checkpoint import FLOAT_DTYPES, Checkpoint
from inflight.models.compressed_tensors import PackedScheme
from inflight.models.formats.coded import CodedFormat, Coding, Part
from inflight.models.formats.format import Block
from inflight.models.formats.reading import read_block, read_weight
from inflight.models.formats.words import WORD_DTYPES, centred, numbers_of, read_words
from inflight_kernels import Code, Inputs

BYTE_DTYPES = ("I8",)
ZERO_DTYPES = ("I32", "I8")
NO_NUMBER = 255
"""As an exponent of E8M0."""
OUTPUTS_OF_ZEROS = 8
"""Of a word of zeros of 4 bits."""


@dataclass(frozen=True, slots=True)
class PackedFormat(CodedFormat):
    """For each layer `weight_packed` (O, I * bits / 32), int32 with neighbouring inputs in a word, or `weight` (O, I),
    int8; `weight_scale` (O, G), float; where they are not symmetric `weight_zero_point`, (O * bits / 32, G) int32 with
    neighbouring outputs in a word, or (O, G) int8."""

    scheme: PackedScheme

    @property
    def quantized(self) -> str:
        """See WeightFormat."""
        return f"int{self.scheme.bits}"

    @property
    def coding(self) -> Coding:
        """See CodedFormat."""
        return Coding(
            code=Code.INT4 if self.scheme.bits == 4 else Code.INT8,
            group_size=self.scheme.group_size,
            scale_dtype=torch.float32,
            has_zeros=not self.scheme.is_symmetric,
            inputs=Inputs.INT8 if self.scheme.has_int8_inputs else Inputs.KEPT,
        )

    @property
    def output_unit(self) -> int:
        """See CodedFormat: a word of zeros."""
        return 1 if self.scheme.is_symmetric else OUTPUTS_OF_ZEROS

    @property
    def ending(self) -> str:
        """See CodedFormat."""
        return "weight_packed" if self.scheme.is_packed else "weight"

    def shape_of_layer(self, checkpoint: Checkpoint, name: str) -> tuple[int, int]:
        """See CodedFormat."""
        num_outputs, columns = checkpoint.shape_of(f"{name}.{self.ending}")
        return num_outputs, columns * 32 // self.scheme.bits if self.scheme.is_packed else columns

    def is_dense(self, checkpoint: Checkpoint, name: str) -> bool:
        """See CodedFormat."""
        if self.scheme.is_packed:
            return f"{name}.weight_packed" not in checkpoint
        return checkpoint.dtype_of(f"{name}.weight") not in BYTE_DTYPES

    def groups_of_inputs(self, checkpoint: Checkpoint, name: str) -> str | None:
        """See CodedFormat."""
        return f"{name}.weight_g_idx" if self.scheme.is_reordered else None

    def check(self, checkpoint: Checkpoint, block: Block) -> None:
        """See CodedFormat."""
        shape, groups = (block.num_outputs, block.num_inputs), self._groups(block)
        if self.scheme.is_packed:
            checkpoint.check(f"{block.name}.weight_packed", self._packed_shape(block), WORD_DTYPES)
            name = f"{block.name}.weight_shape"
            if name in checkpoint:
                told = read_block(checkpoint, name, (2,), (0,), (2,), torch.int64, ("I64", "I32")).tolist()
                if checkpoint.is_read and tuple(told) != shape:
                    raise ConfigurationError(
                        f"{checkpoint.folder}: tensor {name} is {told}, config.json asks for {list(shape)}"
                    )
        else:
            checkpoint.check(f"{block.name}.weight", shape, BYTE_DTYPES)
        checkpoint.check(f"{block.name}.weight_scale", (block.num_outputs, groups), FLOAT_DTYPES)
        if not self.scheme.is_symmetric:
            zeros = f"{block.name}.weight_zero_point"
            checkpoint.check(zeros, self._zeros_shape(checkpoint, block), ZERO_DTYPES)

    def read_part(self, checkpoint: Checkpoint, block: Block, device: torch.device) -> Part:
        """See CodedFormat."""
        outputs, inputs, bits = block.outputs, block.inputs, self.scheme.bits
        size = self.scheme.group_size or block.num_inputs
        groups = range(inputs.start // size, -(-inputs.stop // size))
        if self.scheme.is_packed:
            in_word = 32 // bits
            first, end = inputs.start // in_word, -(-inputs.stop // in_word)
            words = read_words(
                checkpoint,
                f"{block.name}.weight_packed",
                self._packed_shape(block),
                (outputs.start, first),
                (len(outputs), end - first),
                device,
            )
            skipped = inputs.start - first * in_word
            codes = centred(numbers_of(words, bits), bits)[:, skipped : skipped + len(inputs)]
        else:
            codes = read_weight(checkpoint, block, torch.int8, BYTE_DTYPES, device).view(torch.uint8)
        scales = read_block(
            checkpoint,
            f"{block.name}.weight_scale",
            (block.num_outputs, self._groups(block)),
            (outputs.start, groups.start),
            (len(outputs), len(groups)),
            torch.float32,
            FLOAT_DTYPES,
            device,
        )
        zeros = None if self.scheme.is_symmetric else self._read_zeros(checkpoint, block, groups, device)
        return Part(codes.contiguous(), scales, zeros)

    def _read_zeros(self, checkpoint: Checkpoint, block: Block, groups: range, device: torch.device) -> torch.Tensor:
        """(O, G) int8."""
        name, outputs, bits = f"{block.name}.weight_zero_point", block.outputs, self.scheme.bits
        shape = self._zeros_shape(checkpoint, block)
        if shape[0] == block.num_outputs:
            size = (len(outputs), len(groups))
            return read_block(
                checkpoint, name, shape, (outputs.start, groups.start), size, torch.int8, ZERO_DTYPES, device
            )
        in_word = 32 // bits
        words = read_words(
            checkpoint,
            name,
            shape,
            (outputs.start // in_word, groups.start),
            (-(-len(outputs) // in_word), len(groups)),
            device,
        )
        zeros = numbers_of(words.T, bits).to(torch.int16) - (1 << (bits - 1))
        return zeros.to(torch.int8).T[: len(outputs)]

    def _groups(self, block: Block) -> int:
        return -(-block.num_inputs // self.scheme.group_size) if self.scheme.group_size else 1

    def _packed_shape(self, block: Block) -> tuple[int, int]:
        return block.num_outputs, -(-block.num_inputs * self.scheme.bits // 32)

    def _zeros_shape(self, checkpoint: Checkpoint, block: Block) -> tuple[int, int]:
        is_packed = checkpoint.dtype_of(f"{block.name}.weight_zero_point") == "I32"
        rows = -(-block.num_outputs * self.scheme.bits // 32) if is_packed else block.num_outputs
        return rows, self._groups(block)


@dataclass(frozen=True, slots=True)
class Mxfp4Format(CodedFormat):
    """For each layer `weight_packed` (O, I / 2), uint8 with the even input in the lower half, and `weight_scale`
    (O, I / 32), uint8: exponents of 2 above -127 (OCP MX, E8M0)."""

    @property
    def quantized(self) -> str:
        """See WeightFormat."""
        return "mxfp4"

    @property
    def coding(self) -> Coding:
        """See CodedFormat. bfloat16 holds every power of 2 that a scale can be."""
        return Coding(code=Code.FP4, group_size=32, scale_dtype=torch.bfloat16)

    @property
    def ending(self) -> str:
        """See CodedFormat."""
        return "weight_packed"

    def shape_of_layer(self, checkpoint: Checkpoint, name: str) -> tuple[int, int]:
        """See CodedFormat."""
        num_outputs, num_bytes = checkpoint.shape_of(f"{name}.{self.ending}")
        return num_outputs, 2 * num_bytes

    def is_dense(self, checkpoint: Checkpoint, name: str) -> bool:
        """See CodedFormat."""
        return f"{name}.weight_packed" not in checkpoint

    def check(self, checkpoint: Checkpoint, block: Block) -> None:
        """See CodedFormat."""
        checkpoint.check(f"{block.name}.weight_packed", (block.num_outputs, block.num_inputs // 2), ("U8",))
        checkpoint.check(f"{block.name}.weight_scale", (block.num_outputs, block.num_inputs // 32), ("U8",))

    def read_part(self, checkpoint: Checkpoint, block: Block, device: torch.device) -> Part:
        """See CodedFormat."""
        outputs, inputs = block.outputs, block.inputs

        def read(kind: str, inputs_of_byte: int) -> torch.Tensor:
            return read_block(
                checkpoint,
                f"{block.name}.{kind}",
                (block.num_outputs, block.num_inputs // inputs_of_byte),
                (outputs.start, inputs.start // inputs_of_byte),
                (len(outputs), len(inputs) // inputs_of_byte),
                torch.uint8,
                ("U8",),
                device,
            )

        halves, exponents = read("weight_packed", 2), read("weight_scale", 32)
        codes = torch.stack([halves & 15, halves >> 4], -1).flatten(1)
        return Part(codes, scales_of(checkpoint, f"{block.name}.weight_scale", exponents))


def scales_of(checkpoint: Checkpoint, name: str, exponents: torch.Tensor) -> torch.Tensor:
    """bfloat16: what these values of the tensor `name` stand for, in E8M0."""
    if exponents.numel() and int(exponents.max()) == NO_NUMBER:
        raise ConfigurationError(f"{checkpoint.folder}: tensor {name} holds a scale that is NaN")
    return torch.exp2(exponents.float() - 127).to(torch.bfloat16)
