"""Weights of 4 or 8 bits of GPTQ."""

from __future__ import annotations

import json
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
from inflight.models.formats.words import WORD_DTYPES, centred, numbers_of, read_words
from inflight_kernels import Code

SCALE_DTYPES = ("F16", "BF16")
ZERO_OFFSETS = {"gptq": 1, "gptq_v2": 0}
"""What zero points are stored less."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GptqFormat(CodedFormat):
    """For each layer `qweight` (I * bits / 32, O), int32 with neighbouring inputs in a word, `qzeros`
    (G, O * bits / 32) likewise along outputs, `scales` (G, O), float, and `g_idx` (I), the group of each input, which
    may be missing unless they are reordered."""

    bits: int
    group_size: int
    """0 = all inputs."""
    is_reordered: bool
    """Groups are of inputs with similar activations (desc_act)."""
    zero_offset: int

    @property
    def quantized(self) -> str:
        """See WeightFormat."""
        return f"int{self.bits}"

    @property
    def coding(self) -> Coding:
        """See CodedFormat."""
        code = Code.INT4 if self.bits == 4 else Code.INT8
        return Coding(code=code, group_size=self.group_size, scale_dtype=torch.float16, has_zeros=True)

    @property
    def output_unit(self) -> int:
        """See CodedFormat: a word of zeros."""
        return 32 // self.bits

    @property
    def ending(self) -> str:
        """See CodedFormat."""
        return "qweight"

    def shape_of_layer(self, checkpoint: Checkpoint, name: str) -> tuple[int, int]:
        """See CodedFormat."""
        num_words, num_outputs = checkpoint.shape_of(f"{name}.{self.ending}")
        return num_outputs, num_words * 32 // self.bits

    def is_dense(self, checkpoint: Checkpoint, name: str) -> bool:
        """See CodedFormat."""
        return f"{name}.weight" in checkpoint

    def groups_of_inputs(self, checkpoint: Checkpoint, name: str) -> str | None:
        """See CodedFormat. Without reordering they are told as well, in most checkpoints."""
        tensor = f"{name}.g_idx"
        return tensor if self.is_reordered or tensor in checkpoint else None

    def check(self, checkpoint: Checkpoint, block: Block) -> None:
        """See CodedFormat."""
        groups, in_word = self._groups(block), 32 // self.bits
        checkpoint.check(f"{block.name}.qweight", (block.num_inputs // in_word, block.num_outputs), WORD_DTYPES)
        checkpoint.check(f"{block.name}.qzeros", (groups, block.num_outputs // in_word), WORD_DTYPES)
        checkpoint.check(f"{block.name}.scales", (groups, block.num_outputs), SCALE_DTYPES)

    def read_part(self, checkpoint: Checkpoint, block: Block, device: torch.device) -> Part:
        """See CodedFormat."""
        size = self.group_size or block.num_inputs
        # Of one group for all inputs each rank has the same.
        groups = range(block.inputs.start // size, -(-block.inputs.stop // size))
        inputs, outputs, in_word, total_groups = block.inputs, block.outputs, 32 // self.bits, self._groups(block)
        first, end = inputs.start // in_word, -(-inputs.stop // in_word)
        qweight = read_words(
            checkpoint,
            f"{block.name}.qweight",
            (block.num_inputs // in_word, block.num_outputs),
            (first, outputs.start),
            (end - first, len(outputs)),
            device,
        )
        qzeros = read_words(
            checkpoint,
            f"{block.name}.qzeros",
            (total_groups, block.num_outputs // in_word),
            (groups.start, outputs.start // in_word),
            (len(groups), len(outputs) // in_word),
            device,
        )
        scales = read_block(
            checkpoint,
            f"{block.name}.scales",
            (total_groups, block.num_outputs),
            (groups.start, outputs.start),
            (len(groups), len(outputs)),
            torch.float16,
            SCALE_DTYPES,
            device,
        )
        skipped = inputs.start - first * in_word
        codes_OI = centred(numbers_of(qweight.T, self.bits), self.bits)[:, skipped : skipped + len(inputs)]
        zeros_GO = numbers_of(qzeros, self.bits).int() + self.zero_offset - (1 << (self.bits - 1))
        if len(zeros_GO) and int(zeros_GO.max()) > 127:
            raise ConfigurationError(
                f"{checkpoint.folder}: tensor {block.name}.qzeros holds a zero point beyond 8 bits"
            )
        return Part(codes_OI.contiguous(), scales.T, zeros_GO.to(torch.int8).T)

    def _groups(self, block: Block) -> int:
        return -(-block.num_inputs // self.group_size) if self.group_size else 1


def choose_gptq(path: Path, quantization: Mapping[str, Any]) -> GptqFormat:
    """Raises ConfigurationError."""
    bits, group_size = quantization.get("bits"), quantization.get("group_size")
    version = quantization.get("checkpoint_format") or "gptq"
    if bits not in (4, 8) or version not in ZERO_OFFSETS:
        raise ConfigurationError(
            f"{path}: of gptq checkpoints only those with bits 4 or 8 and checkpoint_format gptq or gptq_v2 are "
            f"supported, not bits {json.dumps(bits)} and {json.dumps(version)}; use the float16 or bfloat16 checkpoint"
        )
    if type(group_size) is not int or (group_size != -1 and (group_size < 1 or group_size % 32)):
        raise ConfigurationError(
            f"{path}: quantization_config.group_size must be a multiple of 32, or -1, got {json.dumps(group_size)}"
        )
    return GptqFormat(
        bits=bits,
        group_size=max(group_size, 0),
        is_reordered=bool(quantization.get("desc_act")),
        zero_offset=ZERO_OFFSETS[version],
    )
