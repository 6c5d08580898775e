"""Weights that are codes with a scale for each group of inputs: what a format says of its tensors, and how a rank's
weight is put together of them.

Legend: I input features, O output features, G groups of inputs. A block's own have no number; the whole tensor's are in
`Block`.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from inflight.errors import ConfigurationError
from inflight.layers.weight import CodedGroups, DenseWeight, Int4Groups, Weight
from inflight.models.checkpoint import Checkpoint
from inflight.models.formats.dense import DenseFormat
from inflight.models.formats.format import Block, Target, shape_of
from inflight.models.formats.input_order import is_common, read_input_order
from inflight.models.formats.reading import CPU
from inflight_kernels import Code, CodedWeight, Inputs, join_halves, pack_int4
from inflight_kernels.moe import ExpertWeights

logger = logging.getLogger(__name__)

GROUP_UNIT = 32
"""Inputs of which groups must be made, for products that read as many at once."""
INT4_KERNEL_ON = frozenset({"cuda"})
"""Device types with a kernel for whole numbers of 4 bits (Int4Weight)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Coding:
    """What a format's codes are."""

    code: Code
    group_size: int
    """Inputs that share a scale; 0 = all of a rank's."""
    scale_dtype: torch.dtype
    has_zeros: bool = False
    inputs: Inputs = Inputs.KEPT
    """What the checkpoint wants codes multiplied with."""


@dataclass(frozen=True, slots=True)
class Part:
    """A block's codes and what their groups share."""

    codes_OI: Tensor
    """uint8, one in each byte."""
    scales_OG: Tensor
    zeros_OG: Tensor | None = None
    """int8."""


class CodedFormat(ABC):
    """Base of formats of codes. A layer of whose tensors the first is missing was not quantised: it is dense."""

    @property
    @abstractmethod
    def quantized(self) -> str:
        """See WeightFormat."""

    @property
    @abstractmethod
    def coding(self) -> Coding: ...

    @property
    def output_unit(self) -> int:
        """Outputs that cannot be divided."""
        return 1

    def size_of_groups(self, num_inputs: int) -> int:
        """Inputs that share a scale, of a rank's `num_inputs`."""
        return self.coding.group_size or -(-num_inputs // GROUP_UNIT) * GROUP_UNIT

    @property
    def ending(self) -> str:
        """Of the name of a layer's codes."""
        return "weight"

    def layers(self, checkpoint: Checkpoint) -> list[str]:
        """Names of the layers that are codes."""
        ending = f".{self.ending}"
        names = [name.removesuffix(ending) for name in checkpoint.names if name.endswith(ending)]
        return [name for name in names if not self.is_dense(checkpoint, name)]

    def shape_of_layer(self, checkpoint: Checkpoint, name: str) -> tuple[int, int]:
        """(O, I), as the shape of its codes says."""
        num_outputs, num_inputs = checkpoint.shape_of(f"{name}.{self.ending}")
        return num_outputs, num_inputs

    @abstractmethod
    def is_dense(self, checkpoint: Checkpoint, name: str) -> bool:
        """Whether the layer of that name was not quantised."""

    @abstractmethod
    def check(self, checkpoint: Checkpoint, block: Block) -> None:
        """Raise unless the tensors of the block's layer are there, of the right shapes and types."""

    @abstractmethod
    def read_part(self, checkpoint: Checkpoint, block: Block, device: torch.device) -> Part:
        """In this process's memory of `device`."""

    def groups_of_inputs(self, checkpoint: Checkpoint, name: str) -> str | None:
        """The tensor (I,) with the group of each input of the layer of that name; None if a group's are neighbours."""
        return None

    def read(self, checkpoint: Checkpoint, blocks: Sequence[Block], target: Target) -> Weight:
        """See WeightFormat."""
        if self.is_dense(checkpoint, blocks[0].name):
            return DenseFormat().read(checkpoint, blocks, target)
        orders = self._check(checkpoint, blocks)
        can_keep_codes = is_common(orders, blocks)
        if target.keeps_codes and can_keep_codes:
            return CodedGroups(self._read_codes(checkpoint, blocks, orders[0], target))
        on_gpu = target.device.type in INT4_KERNEL_ON
        if on_gpu and can_keep_codes and (orders[0] is None or self.coding.code is Code.INT4):
            return self._read_for_gpu(checkpoint, blocks, orders[0], target)
        if target.keeps_codes or on_gpu:
            logger.info("%s becomes floats: its groups are not of neighbouring inputs", blocks[0].name)
        return DenseWeight(self.read_floats(checkpoint, blocks, target))

    def read_floats(self, checkpoint: Checkpoint, blocks: Sequence[Block], target: Target) -> Tensor:
        """What the codes stand for, (O, I) of the activations' type."""
        if self.is_dense(checkpoint, blocks[0].name):
            return DenseFormat().read(checkpoint, blocks, target).values_OI
        self._check(checkpoint, blocks)
        values_OI = target.empty(*shape_of(blocks))
        self._fill_values(checkpoint, blocks, values_OI)
        return values_OI

    @property
    def has_expert_kernel(self) -> bool:
        """Whether GPUs multiply its experts."""
        return False

    def read_experts(self, checkpoint: Checkpoint, experts: Sequence[Sequence[Block]], target: Target) -> ExpertWeights:
        """The same of several weights of one shape: (E, O, I). Floats where codes are not kept, or cannot be of one of
        them."""
        orders = [self._check(checkpoint, blocks) for blocks in experts]
        if not (target.keeps_codes and all(map(is_common, orders, experts))):
            values_EOI = target.empty(len(experts), *shape_of(experts[0]))
            for blocks, values_OI in zip(experts, values_EOI, strict=True):
                self._fill_values(checkpoint, blocks, values_OI)
            return values_EOI
        weight = self._allocate(experts[0], target, (len(experts),))
        if any(order is not None for order, *_ in orders):
            permutation_EI = target.empty(len(experts), weight.shape[-1], dtype=torch.int32)
            if checkpoint.is_read and not permutation_EI.is_meta:
                for own_I, (order, *_) in zip(permutation_EI, orders, strict=True):
                    own_I.copy_(torch.arange(len(own_I)) if order is None else order)
            weight = weight._replace(permutation=permutation_EI)
        for expert, blocks in enumerate(experts):
            self._fill(checkpoint, blocks, weight.of_expert(expert))
        return weight

    def fill_rows(self, checkpoint: Checkpoint, block: Block, weight: CodedWeight) -> None:
        """Write a block's codes into the rows of a weight that are its own."""
        part = self.read_part(checkpoint, block, weight.codes.device)
        codes_OI = part.codes_OI if weight.permutation is None else part.codes_OI[:, weight.permutation]
        weight.codes.copy_(codes_OI if weight.code.bits == 8 else join_halves(codes_OI))
        weight.scales.copy_(part.scales_OG)
        if weight.zeros is not None and part.zeros_OG is not None:
            weight.zeros.copy_(part.zeros_OG)

    def dequantized(self, checkpoint: Checkpoint, blocks: Sequence[Block]) -> Tensor:
        """(O, I) float32, in the memory of this process."""
        orders = self._orders(checkpoint, blocks)
        if is_common(orders, blocks):
            return self._read_own(checkpoint, blocks, orders[0]).dequantize()
        parts = []
        for block, order in zip(blocks, orders, strict=True):
            whole = self._read_own(checkpoint, [replace(block, inputs=range(block.num_inputs))], order)
            parts.append(whole.dequantize()[:, block.inputs.start : block.inputs.stop])
        return torch.cat(parts)

    def _orders(self, checkpoint: Checkpoint, blocks: Sequence[Block]) -> list[Tensor | None]:
        """Of the inputs of each block's layer; see read_input_order."""

        def order_of(block: Block) -> Tensor | None:
            name = self.groups_of_inputs(checkpoint, block.name)
            size = self.coding.group_size or block.num_inputs
            return None if name is None else read_input_order(checkpoint, name, block.num_inputs, size)

        return [order_of(block) for block in blocks]

    def _check(self, checkpoint: Checkpoint, blocks: Sequence[Block]) -> list[Tensor | None]:
        """The orders of their inputs."""
        orders = self._orders(checkpoint, blocks)
        for block, order in zip(blocks, orders, strict=True):
            self._check_borders(checkpoint, block, order)
            self.check(checkpoint, block)
        return orders

    def _fill_values(self, checkpoint: Checkpoint, blocks: Sequence[Block], values_OI: Tensor) -> None:
        if checkpoint.is_read and not values_OI.is_meta:
            values_OI.copy_(self.dequantized(checkpoint, blocks))

    def _read_codes(
        self, checkpoint: Checkpoint, blocks: Sequence[Block], order: Tensor | None, target: Target
    ) -> CodedWeight:
        """`order`: that of the inputs of all blocks."""
        weight = self._allocate(blocks, target)
        if order is not None:
            permutation = target.empty(len(order), dtype=torch.int32)
            if checkpoint.is_read and not permutation.is_meta:
                permutation.copy_(order)
            weight = weight._replace(permutation=permutation)
        self._fill(checkpoint, blocks, weight)
        return weight

    def _read_own(
        self, checkpoint: Checkpoint, blocks: Sequence[Block], order: Tensor | None, device: torch.device = CPU
    ) -> CodedWeight:
        """In this process's memory of `device`."""

        def empty(*shape: int, dtype: torch.dtype | None = None) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        return self._read_codes(checkpoint, blocks, order, Target(dtype=torch.float32, device=device, empty=empty))

    def _fill(self, checkpoint: Checkpoint, blocks: Sequence[Block], weight: CodedWeight) -> None:
        if not checkpoint.is_read or weight.codes.is_meta:
            return
        start = 0
        for block in blocks:
            end = start + len(block.outputs)
            self.fill_rows(checkpoint, block, weight.rows(slice(start, end)))
            start = end

    def _allocate(self, blocks: Sequence[Block], target: Target, experts: tuple[int, ...] = ()) -> CodedWeight:
        coding, (num_outputs, num_inputs) = self.coding, shape_of(blocks)
        group_size = self.size_of_groups(num_inputs)
        shape = (*experts, num_outputs, -(-num_inputs // group_size))
        codes = target.empty(*experts, num_outputs, num_inputs * coding.code.bits // 8, dtype=torch.uint8)
        scales = target.empty(*shape, dtype=coding.scale_dtype)
        zeros = target.empty(*shape, dtype=torch.int8) if coding.has_zeros else None
        return CodedWeight(coding.code, codes, scales, zeros, group_size, target.inputs_of(coding.code, coding.inputs))

    def _read_for_gpu(
        self, checkpoint: Checkpoint, blocks: Sequence[Block], order: Tensor | None, target: Target
    ) -> Int4Groups:
        coding, columns = self.coding, len(blocks[0].inputs)
        if coding.code is not Code.INT4:
            raise ConfigurationError(
                f"{checkpoint.folder}: {self.quantized} weights like these are multiplied on CPUs only; use the "
                "float16 or bfloat16 checkpoint, or one that was quantised to 4 bits, or to fp8 with a scale for each "
                "output or each block of 128 inputs"
            )
        if target.dtype not in (torch.float16, torch.bfloat16):
            raise ConfigurationError(
                f"{checkpoint.folder}: 4-bit weights are computed in float16 or bfloat16, not in "
                f"{str(target.dtype).removeprefix('torch.')}; set dtype to one of them"
            )
        weight = self._read_own(checkpoint, blocks, order, target.device)
        # Whole numbers from 0 on.
        q_OI = weight.codes_by_column().bitwise_xor(8).int()
        zeros_OG = torch.zeros_like(weight.scales, dtype=torch.int32) if weight.zeros is None else weight.zeros.int()
        scales_GO, zeros_GO = weight.scales.T.to(target.dtype).contiguous(), (zeros_OG + 8).T.contiguous()
        if coding.group_size == 0 and columns % GROUP_UNIT:
            raise ConfigurationError(
                f"{checkpoint.folder}: 4-bit weights of {columns} inputs, which is not a multiple of {GROUP_UNIT}, are "
                "not multiplied on GPUs; choose another tensor_parallel_size"
            )
        permutation = None if weight.permutation is None else weight.permutation.long()
        return Int4Groups(pack_int4(q_OI, scales_GO, zeros_GO, permutation))

    def _check_borders(self, checkpoint: Checkpoint, block: Block, order: Tensor | None) -> None:
        # In another order a share of the inputs has no whole groups anyway, and becomes floats.
        unit_of_inputs = (self.coding.group_size or 1) if order is None else 1
        for what, features, total, unit in (
            ("inputs", block.inputs, block.num_inputs, unit_of_inputs),
            ("outputs", block.outputs, block.num_outputs, self.output_unit),
        ):
            is_whole = len(features) == total
            if features.start % unit or (not is_whole and len(features) % unit):
                raise ConfigurationError(
                    f"{checkpoint.folder}: the {total} {what} of {block.name} are quantised in groups of {unit}, "
                    f"and one rank's share of them, {len(features)}, is not a whole number of groups; "
                    "choose another tensor_parallel_size"
                )
