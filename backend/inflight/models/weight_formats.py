"""How a checkpoint stores the weight of a matrix product, and how a rank reads its part of it.

Knows neither layers' names nor how they split. Legend: I input features, O output features.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from inflight.errors import ConfigurationError
from inflight.layers.weight import DenseWeight, Int4Groups, Weight
from inflight.models.checkpoint import Checkpoint
from inflight_kernels import repack_awq

DEQUANTIZED_ON = frozenset({"cpu"})
"""Device types whose weights are dequantised when they are read. A CPU has no product of 4-bit weights: it would
dequantise them at every step."""
OUTPUTS_OF_WORD = 8
"""Output features that a word of 32 bits of an AWQ checkpoint holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """The rows and columns of one weight (O, I) in the checkpoint that a rank reads."""

    name: str
    """Of the layer: the names of its tensors without their ending."""
    num_outputs: int
    num_inputs: int
    """Both of the whole weight."""
    outputs: range
    inputs: range


class WeightFormat(Protocol):
    """The format of the weights of all layers of a checkpoint."""

    def read(
        self,
        checkpoint: Checkpoint,
        blocks: Sequence[Block],
        dtype: torch.dtype,
        device: torch.device,
        empty: Callable[[int, int], Tensor],
    ) -> Weight:
        """One weight with the outputs of all `blocks`, which have the same number of inputs.

        `dtype` is that of the activations. `empty`: makes the tensor (O, I) of a dense weight. Raises
        ConfigurationError if the checkpoint does not hold the tensors, or if the format cannot be divided at the
        borders of the blocks.
        """
        ...


@dataclass(frozen=True, slots=True)
class DenseFormat:
    """`<name>.weight` (O, I), of any float type."""

    def read(
        self,
        checkpoint: Checkpoint,
        blocks: Sequence[Block],
        dtype: torch.dtype,
        device: torch.device,
        empty: Callable[[int, int], Tensor],
    ) -> DenseWeight:
        """See WeightFormat."""
        for block in blocks:
            checkpoint.check(f"{block.name}.weight", (block.num_outputs, block.num_inputs))
        values_OI = empty(*_shape(blocks))
        row = 0
        for block in blocks:
            checkpoint.copy_into(
                values_OI[row : row + len(block.outputs)],
                f"{block.name}.weight",
                (block.num_outputs, block.num_inputs),
                (block.outputs.start, block.inputs.start),
            )
            row += len(block.outputs)
        return DenseWeight(values_OI)


@dataclass(frozen=True, slots=True)
class AwqFormat:
    """4-bit weights as AWQ stores them: for each layer `qweight` (I, O / 8) and `qzeros` (I / group_size, O / 8), int32
    with eight outputs in a word, and `scales` (I / group_size, O), float16. Layers that have a `weight` instead, since
    they were not quantised, are dense.
    """

    group_size: int

    def read(
        self,
        checkpoint: Checkpoint,
        blocks: Sequence[Block],
        dtype: torch.dtype,
        device: torch.device,
        empty: Callable[[int, int], Tensor],
    ) -> Weight:
        """See WeightFormat."""
        if f"{blocks[0].name}.weight" in checkpoint:
            return DenseFormat().read(checkpoint, blocks, dtype, device, empty)
        if dtype not in (torch.float16, torch.bfloat16):
            raise ConfigurationError(
                f"{checkpoint.folder}: 4-bit weights are computed in float16 or bfloat16, not in "
                f"{str(dtype).removeprefix('torch.')}; set dtype to one of them"
            )
        for block in blocks:
            self._check_borders(checkpoint, block)
        qweight = self._read_tensor(checkpoint, blocks, "qweight", 1, torch.int32, device)
        qzeros = self._read_tensor(checkpoint, blocks, "qzeros", self.group_size, torch.int32, device)
        scales = self._read_tensor(checkpoint, blocks, "scales", self.group_size, dtype, device)
        if device.type not in DEQUANTIZED_ON:
            return Int4Groups(repack_awq(qweight, qzeros, scales))
        values_OI = empty(*_shape(blocks))
        if checkpoint.is_read:
            values_OI.copy_(repack_awq(qweight, qzeros, scales).dequantize())
        return DenseWeight(values_OI)

    def _read_tensor(
        self,
        checkpoint: Checkpoint,
        blocks: Sequence[Block],
        kind: str,
        inputs_of_row: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> Tensor:
        """The blocks' parts of their tensors `kind`, side by side."""
        outputs_of_column, dtypes = (1, ("F16",)) if kind == "scales" else (OUTPUTS_OF_WORD, ("I32",))
        shapes = [(block.num_inputs // inputs_of_row, block.num_outputs // outputs_of_column) for block in blocks]
        for block, shape in zip(blocks, shapes, strict=True):
            checkpoint.check(f"{block.name}.{kind}", shape, dtypes)
        parts = []
        for block, shape in zip(blocks, shapes, strict=True):
            size = (len(block.inputs) // inputs_of_row, len(block.outputs) // outputs_of_column)
            starts = (block.inputs.start // inputs_of_row, block.outputs.start // outputs_of_column)
            part = torch.empty(size, dtype=dtype, device=device)
            checkpoint.copy_into(part, f"{block.name}.{kind}", shape, starts, dtypes)
            parts.append(part)
        return torch.cat(parts, dim=1)

    def _check_borders(self, checkpoint: Checkpoint, block: Block) -> None:
        for what, features, total, unit in (
            ("inputs", block.inputs, block.num_inputs, self.group_size),
            ("outputs", block.outputs, block.num_outputs, OUTPUTS_OF_WORD),
        ):
            if features.start % unit or len(features) % unit or total % unit:
                raise ConfigurationError(
                    f"{checkpoint.folder}: the {total} {what} of {block.name} are quantised in groups of {unit}, "
                    f"and one rank's share of them, {len(features)}, is not a whole number of groups; "
                    "choose another tensor_parallel_size"
                )


def _shape(blocks: Sequence[Block]) -> tuple[int, int]:
    """(O, I) of the weight of all blocks."""
    return sum(len(block.outputs) for block in blocks), len(blocks[0].inputs)


def choose_weight_format(path: Path, quantization: Mapping[str, Any] | None) -> WeightFormat:
    """The format that `quantization_config`, of the config.json at `path`, describes; dense if there is none.

    Raises ConfigurationError for formats that are not supported.
    """
    if not quantization:
        return DenseFormat()
    method = quantization.get("quant_method", "unknown")
    if method != "awq":
        raise ConfigurationError(
            f"{path}: quantized checkpoints ({method}) are not supported, except those of awq; "
            "use the float16, bfloat16 or float32 one"
        )
    group_size = quantization.get("group_size", quantization.get("q_group_size"))
    bits = quantization.get("bits", quantization.get("w_bit"))
    version = str(quantization.get("version", "gemm")).lower()
    if (bits, version, quantization.get("zero_point", True)) != (4, "gemm", True):
        raise ConfigurationError(
            f"{path}: of awq checkpoints only those with bits 4, version gemm and zero_point true are supported, "
            f"not bits {bits}, version {version} and zero_point {quantization.get('zero_point')}"
        )
    if type(group_size) is not int or group_size < 1 or group_size % 32:
        raise ConfigurationError(f"{path}: quantization_config.group_size must be a multiple of 32, got {group_size!r}")
    return AwqFormat(group_size)
