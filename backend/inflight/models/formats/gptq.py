"""Weights of 4 or 8 bits of GPTQ."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from inflight.errors import ConfigurationError
from inflight.models.checkpoint import Checkpoint
from inflight.models.formats.coded import CodedFormat, Coding, Part
from inflight.models.formats.format import Block
from inflight.models.formats.reading import CPU, read_block
from inflight.models.formats.words import WORD_DTYPES, centred, numbers_of, read_words
from inflight_kernels import Code

logger = logging.getLogger(__name__)

SCALE_DTYPES = ("F16", "BF16")
ZERO_OFFSETS = {"gptq": 1, "gptq_v2": 0}
"""What zero points are stored less."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GptqFormat(CodedFormat):
    """For each layer `qweight` (I * bits / 32, O), int32 with neighbouring inputs in a word, `qzeros`
    (G, O * bits / 32) likewise along outputs, `scales` (G, O), float, and `g_idx` (I), the group of each input, which
    may be missing where groups are of neighbours."""

    bits: int
    group_size: int
    """0 = all inputs."""
    is_reordered: bool
    """Groups are of inputs with similar activations (desc_act). No product here reads inputs in that order: such
    weights become floats."""
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

    def check(self, checkpoint: Checkpoint, block: Block) -> None:
        """See CodedFormat."""
        groups, in_word = self._groups(block), 32 // self.bits
        checkpoint.check(f"{block.name}.qweight", (block.num_inputs // in_word, block.num_outputs), WORD_DTYPES)
        checkpoint.check(f"{block.name}.qzeros", (groups, block.num_outputs // in_word), WORD_DTYPES)
        checkpoint.check(f"{block.name}.scales", (groups, block.num_outputs), SCALE_DTYPES)
        if f"{block.name}.g_idx" in checkpoint:
            checkpoint.check(f"{block.name}.g_idx", (block.num_inputs,), WORD_DTYPES)

    @property
    def can_keep_codes(self) -> bool:
        """See CodedFormat."""
        return not self.is_reordered

    def dequantized(self, checkpoint: Checkpoint, blocks: Sequence[Block]) -> Tensor:
        """See CodedFormat."""
        if self.is_reordered:
            return torch.cat([self._in_any_groups(checkpoint, block) for block in blocks])
        return CodedFormat.dequantized(self, checkpoint, blocks)

    def read_part(self, checkpoint: Checkpoint, block: Block, device: torch.device) -> Part:
        """See CodedFormat."""
        size = self.group_size or block.num_inputs
        # Of one group for all inputs each rank has the same.
        groups = range(block.inputs.start // size, -(-block.inputs.stop // size))
        codes_OI, scales_OG, zeros_OG = self._read(checkpoint, block, block.inputs, groups, device)
        if f"{block.name}.g_idx" in checkpoint:
            of_input = self._groups_of_inputs(checkpoint, block)
            if not torch.equal(of_input, torch.arange(block.num_inputs, dtype=torch.int32) // size):
                raise ConfigurationError(
                    f"{checkpoint.folder}: tensor {block.name}.g_idx has groups of inputs that are not neighbours, and "
                    "quantization_config.desc_act is not true; set it to true"
                )
        return Part(codes_OI, scales_OG, zeros_OG)

    def _in_any_groups(self, checkpoint: Checkpoint, block: Block) -> Tensor:
        """(O, I) float32, of inputs whose groups are anywhere."""
        codes_OI, scales_OG, zeros_OG = self._read(checkpoint, block, block.inputs, range(self._groups(block)), CPU)
        of_input = self._groups_of_inputs(checkpoint, block)[block.inputs.start : block.inputs.stop].long()
        if len(of_input) and not 0 <= int(of_input.min()) <= int(of_input.max()) < scales_OG.shape[1]:
            raise ConfigurationError(f"{checkpoint.folder}: tensor {block.name}.g_idx names groups that are not there")
        numbers = self.coding.code.numbers()[codes_OI.int()]
        return (numbers - zeros_OG[:, of_input]) * scales_OG.float()[:, of_input]

    def _groups_of_inputs(self, checkpoint: Checkpoint, block: Block) -> Tensor:
        count = (block.num_inputs,)
        return read_block(checkpoint, f"{block.name}.g_idx", count, (0,), count, torch.int32, WORD_DTYPES)

    def _read(
        self, checkpoint: Checkpoint, block: Block, inputs: range, groups: range, device: torch.device
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Codes of these inputs, scales and zeros of these groups: (O, I), (O, G), (O, G)."""
        in_word, total_groups, outputs = 32 // self.bits, self._groups(block), block.outputs
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
        return codes_OI.contiguous(), scales.T, zeros_GO.to(torch.int8).T

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
    is_reordered = bool(quantization.get("desc_act"))
    if is_reordered:
        logger.warning("the weights are dequantised: their groups are of inputs with similar activations (desc_act)")
    return GptqFormat(
        bits=bits, group_size=max(group_size, 0), is_reordered=is_reordered, zero_offset=ZERO_OFFSETS[version]
    )
