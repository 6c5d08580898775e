"""4-bit weights of AWQ."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from inflight.errors import ConfigurationError
from inflight.models.checkpoint import Checkpoint
from inflight.models.formats.coded import CodedFormat, Coding, Part
from inflight.models.formats.format import Block
from inflight.models.formats.reading import read_block
from inflight.models.formats.words import WORD_DTYPES, centred, in_awq_order, numbers_of, read_words
from inflight_kernels import Code

SCALE_DTYPES = ("F16",)


@dataclass(frozen=True, slots=True)
class AwqFormat(CodedFormat):
    """For each layer `qweight` (I, O / 8) and `qzeros` (G, O / 8), int32 with eight outputs in a word, and `scales`
    (G, O), float16."""

    group_size: int

    @property
    def quantized(self) -> str:
        """See WeightFormat."""
        return "int4"

    @property
    def coding(self) -> Coding:
        """See CodedFormat."""
        return Coding(code=Code.INT4, group_size=self.group_size, scale_dtype=torch.float16, has_zeros=True)

    @property
    def output_unit(self) -> int:
        """See CodedFormat: a word."""
        return 8

    @property
    def ending(self) -> str:
        """See CodedFormat."""
        return "qweight"

    def shape_of_layer(self, checkpoint: Checkpoint, name: str) -> tuple[int, int]:
        """See CodedFormat."""
        num_inputs, num_words = checkpoint.shape_of(f"{name}.{self.ending}")
        return 8 * num_words, num_inputs

    def is_dense(self, checkpoint: Checkpoint, name: str) -> bool:
        """See CodedFormat."""
        return f"{name}.weight" in checkpoint

    def check(self, checkpoint: Checkpoint, block: Block) -> None:
        """See CodedFormat."""
        groups = block.num_inputs // self.group_size
        checkpoint.check(f"{block.name}.qweight", (block.num_inputs, block.num_outputs // 8), WORD_DTYPES)
        checkpoint.check(f"{block.name}.qzeros", (groups, block.num_outputs // 8), WORD_DTYPES)
        checkpoint.check(f"{block.name}.scales", (groups, block.num_outputs), SCALE_DTYPES)

    def read_part(self, checkpoint: Checkpoint, block: Block, device: torch.device) -> Part:
        """See CodedFormat."""
        size = self.group_size
        groups = range(block.inputs.start // size, block.inputs.stop // size)
        total_groups, total_words = block.num_inputs // size, block.num_outputs // 8
        word, words = block.outputs.start // 8, len(block.outputs) // 8
        qweight = read_words(
            checkpoint,
            f"{block.name}.qweight",
            (block.num_inputs, total_words),
            (block.inputs.start, word),
            (len(block.inputs), words),
            device,
        )
        qzeros = read_words(
            checkpoint,
            f"{block.name}.qzeros",
            (total_groups, total_words),
            (groups.start, word),
            (len(groups), words),
            device,
        )
        scales = read_block(
            checkpoint,
            f"{block.name}.scales",
            (total_groups, block.num_outputs),
            (groups.start, block.outputs.start),
            (len(groups), len(block.outputs)),
            torch.float16,
            SCALE_DTYPES,
            device,
        )
        codes, zeros = (in_awq_order(numbers_of(words, 4)) for words in (qweight, qzeros))
        return Part(centred(codes, 4).T.contiguous(), scales.T, (zeros.to(torch.int8) - 8).T)


def choose_awq(path: Path, quantization: Mapping[str, Any]) -> AwqFormat:
    """Raises ConfigurationError."""
    group_size = quantization.get("group_size", quantization.get("q_group_size"))
    bits = quantization.get("bits", quantization.get("w_bit"))
    version = str(quantization.get("version", "gemm")).lower()
    if (bits, version, quantization.get("zero_point", True)) != (4, "gemm", True):
        raise ConfigurationError(
            f"{path}: of awq checkpoints only those with bits 4, version gemm and zero_point true are supported, "
            f"not bits {bits}, version {version} and zero_point {quantization.get('zero_point')}; use the float16 or "
            "bfloat16 checkpoint"
        )
    if type(group_size) is not int or group_size < 1 or group_size % 32:
        raise ConfigurationError(f"{path}: quantization_config.group_size must be a multiple of 32, got {group_size!r}")
    return AwqFormat(group_size)
