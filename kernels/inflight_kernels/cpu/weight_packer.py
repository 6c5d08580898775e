"""Packs the weights of a network's programs, each once, and frees the tensors that they were read into.

A packed weight is laid out for products that read it once and in order; native/panels.h and codes.h draw the layouts.
Legend: O output features, I input features, G groups of them, P panels of 32 outputs, S steps of 32 inputs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from inflight_kernels.cpu.huge_pages import HugePageArena
from inflight_kernels.cpu.library import NativeLibrary
from inflight_kernels.cpu.matrix import MAX_GROUP_SIZE, InputFormat, Matrix, SharedFormat, WeightFormat, plain_matrix
from inflight_kernels.cpu.recorded_values import STEP
from inflight_kernels.cpu.recording import Bias, ByTap, Constant, Grouping, Recording, Weight
from inflight_kernels.matmul.coded_weight import Code, CodedWeight, Inputs, join_halves

SHARED_FORMATS = {
    torch.float32: SharedFormat.F32,
    torch.float16: SharedFormat.F16,
    torch.bfloat16: SharedFormat.BF16,
    torch.int8: SharedFormat.INT8,
}
INTEGER_STEP = 64
"""Inputs of a step of whole numbers."""
FP8_UNIT = 2.0**8
"""C++ reads codes of fp8 as float16 has their bits: numbers that are smaller by this."""


class WeightMemory(Protocol):
    """Where packed weights lie, or those of a network and the packed ones. A HugePageArena is one."""

    is_filled: bool
    """What is taken holds its values already, and cannot be written to."""

    def take(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        """(num_elements) from a cache line on: zeros, or values."""
        ...

    def release(self, tensor: Tensor) -> None:
        """Free a tensor of the network, which nobody reads any more."""
        ...


class WeightPacker:
    def __init__(
        self, library: NativeLibrary, recordings: Iterable[Recording], memory: WeightMemory | None = None
    ) -> None:
        """`recordings`: of all programs that are to be made. `memory`: None = new memory for packed weights."""
        self._library = library
        self._memory = memory or HugePageArena()
        self._matrices: dict[Weight, tuple[Matrix, tuple[Tensor, ...]]] = {}
        """And the memory that they point at."""
        self._copies: dict[Bias | ByTap, Tensor] = {}
        constants = {
            value: _constants(value)
            for recording in recordings
            for operation in recording.operations
            for value in operation.fields.values()
            if isinstance(value, Constant | Weight | Bias | ByTap)
        }
        self._readers = Counter(_storage(each) for of_one in constants.values() for each in of_one)
        """What still reads each storage. An embedding that is also the head is read as it is, so it stays."""

    def pack(self, weight: Weight) -> Matrix:
        """Its panels. Where gate and up are joined, both have zeros up to a multiple of 32 outputs."""
        if weight not in self._matrices:
            self._matrices[weight] = self._pack(weight)
            self._release(weight)
        return self._matrices[weight][0]

    def copy(self, value: Bias | ByTap) -> int:
        """The address of its elements. Where gate and up are joined, a bias has zeros up to a multiple of 32 behind
        both."""
        if value not in self._copies:
            tensor = self._shaped(value.constant)
            if isinstance(value, ByTap):
                tensor = tensor.t().float()
            elif value.gated:
                tensor = _join_bias(tensor)
            self._copies[value] = self._kept(tensor)
            self._release(value)
        return self._copies[value].data_ptr()

    def _release(self, value: Weight | Bias | ByTap) -> None:
        for constant in _constants(value):
            storage = _storage(constant)
            self._readers[storage] -= 1
            if not self._readers[storage]:
                # The network's parts still hold the tensor, but memory is to hold a weight only once.
                self._memory.release(constant.tensor)

    def _pack(self, weight: Weight) -> tuple[Matrix, tuple[Tensor, ...]]:
        values = self._shaped(weight.values)
        if weight.grouping is None:
            packed = pack_weight(self._library, values, self._memory, gated=weight.gated)
            return plain_matrix(packed, -(-weight.num_inputs // STEP) * STEP), (packed,)
        return self._pack_codes(values, weight.grouping, gated=weight.gated)

    def _pack_codes(self, codes: Tensor, grouping: Grouping, *, gated: bool) -> tuple[Matrix, tuple[Tensor, ...]]:
        scales = self._shaped(grouping.scales)
        zeros = None if grouping.zeros is None else self._shaped(grouping.zeros)
        weight = CodedWeight(grouping.code, codes, scales, zeros, grouping.group_size, grouping.inputs)
        num_inputs = -(-weight.shape[-1] // STEP) * STEP
        group_size, repeats = num_inputs if scales.shape[-1] == 1 else grouping.group_size, 1
        if grouping.inputs is Inputs.KEPT:
            group_size, repeats = _group_sizes(num_inputs, group_size, scales.shape[-1])
        shared = (_unit_scales(weight), *([] if zeros is None else [zeros]))
        tensors = (
            self._kept(PANELS[grouping.inputs](weight, gated)),
            *(self._kept(_panels_of_groups(of_group, repeats, gated)) for of_group in shared),
        )
        matrix = Matrix(
            values=tensors[0].data_ptr(),
            scales=tensors[1].data_ptr(),
            zeros=None if zeros is None else tensors[2].data_ptr(),
            format=WeightFormat[grouping.code.name],
            inputs=InputFormat[grouping.inputs.name],
            scale_format=SHARED_FORMATS[shared[0].dtype],
            zero_format=SHARED_FORMATS[shared[-1].dtype],
            num_inputs=num_inputs,
            num_groups=scales.shape[-1] * repeats,
            group_size=group_size,
        )
        return matrix, tensors

    def _shaped(self, constant: Constant) -> Tensor:
        """Its values, or nothing but its shape, if it may have been freed."""
        return constant.tensor.to("meta") if self._memory.is_filled else constant.tensor

    def _kept(self, values: Tensor) -> Tensor:
        """In the memory of packed weights."""
        memory = self._memory.take(values.numel(), values.dtype)
        return memory if self._memory.is_filled else memory.copy_(values.flatten())


def pack_weight(library: NativeLibrary, weight: Tensor, memory: WeightMemory, *, gated: bool = False) -> Tensor:
    """`weight` (O, I), or several of that shape one after the other, as panels, taken from `memory`. It has the
    library's type. With zeros up to a multiple of 32 inputs. `gated`: gate above up, whose panels are joined, with
    zeros up to a multiple of 32 outputs of each."""
    if weight.dtype != library.dtype:
        raise ValueError(f"cannot pack {weight.dtype}, the library is for {library.dtype}")
    matrices = weight.view(-1, *weight.shape[-2:])
    num_outputs, num_inputs = _padded(matrices[0], gated).shape
    size = library.functions.inflight_packed_size(num_outputs, num_inputs)
    packed = memory.take(len(matrices) * size, library.dtype)
    if not memory.is_filled:
        for matrix_OI, panels in zip(matrices, packed.split(size), strict=True):
            padded_OI = _padded(matrix_OI, gated).contiguous()
            library.functions.inflight_pack(
                padded_OI.data_ptr(), num_outputs, num_inputs, gated, torch.get_num_threads(), panels.data_ptr()
            )
    return packed


def _panels_of_codes(weight: CodedWeight, gated: bool) -> Tensor:
    """(P, bytes of a panel) uint8, the panels of several weights one after the other."""
    codes = weight.codes_by_column()
    codes = F.pad(codes, (0, -codes.shape[-1] % STEP), value=weight.code.of_zero)
    panels = _by_panel(codes, gated, weight.code.of_zero)
    # Panel, step, tile, line, row of the line, output.
    lines = panels.view(len(panels), 2, 16, -1, 16, 2).permute(0, 3, 1, 4, 5, 2)
    if weight.code.bits == 8:
        return lines.flatten(1)
    # Panel, step, tile, four lines, one of them, row of the line, output: words of an output, two halves of 16 bits.
    words = lines.unflatten(3, (4, 4)).permute(0, 1, 2, 3, 6, 5, 4)
    return join_halves(words).flatten(1)


def _panels_of_integers(weight: CodedWeight, gated: bool) -> Tensor:
    """The same for products of whole numbers."""
    codes = weight.codes_by_column()
    panels = _by_panel(F.pad(codes, (0, -codes.shape[-1] % INTEGER_STEP)), gated, 0)
    # Panel, step, tile, line, output, input of the line.
    lines = panels.view(len(panels), 2, 16, -1, 16, 4).permute(0, 3, 1, 4, 2, 5)
    if weight.code is Code.INT8:
        return lines.flatten(1)
    pairs = (lines ^ 8).unflatten(3, (8, 2))
    return (pairs[:, :, :, :, 0] | pairs[:, :, :, :, 1] << 4).flatten(1)


PANELS = {Inputs.KEPT: _panels_of_codes, Inputs.INT8: _panels_of_integers}


def _panels_of_groups(of_group: Tensor, repeats: int, gated: bool) -> Tensor:
    """(P, G, 32) of (…, O, G), each group `repeats` times."""
    return _by_panel(of_group.repeat_interleave(repeats, -1), gated, 0).transpose(1, 2)


def _by_panel(values: Tensor, gated: bool, padding: int) -> Tensor:
    """(P, 32, columns) of (…, O, columns): outputs in the order of panels, with `padding` where there is none."""
    matrices = values.reshape(-1, *values.shape[-2:])
    if gated:
        # Sixteen outputs of gate, sixteen of up.
        halves = matrices.view(len(matrices), 2, -1, matrices.shape[-1])
        halves = F.pad(halves, (0, 0, 0, -halves.shape[2] % STEP), value=padding)
        joined = halves.unflatten(2, (-1, 16)).transpose(1, 2)
        return joined.reshape(-1, STEP, matrices.shape[-1])
    padded = F.pad(matrices, (0, 0, 0, -matrices.shape[1] % STEP), value=padding)
    return padded.reshape(-1, STEP, matrices.shape[-1])


def _group_sizes(num_inputs: int, group_size: int, num_groups: int) -> tuple[int, int]:
    """Inputs of a group as C++ has it, and how many of those each group becomes."""
    if group_size <= MAX_GROUP_SIZE and num_groups > 1:
        return group_size, 1
    if num_groups == 1:
        size = min(MAX_GROUP_SIZE, num_inputs)
        return size, -(-num_inputs // size)
    size = max(size for size in range(STEP, MAX_GROUP_SIZE + 1, STEP) if group_size % size == 0)
    return size, group_size // size


def _unit_scales(weight: CodedWeight) -> Tensor:
    """Of the numbers that C++ reads."""
    return weight.scales.float() * FP8_UNIT if weight.code is Code.FP8 else weight.scales


def _constants(value: Constant | Weight | Bias | ByTap) -> tuple[Constant, ...]:
    match value:
        case Weight():
            return value.constants
        case Bias() | ByTap():
            return (value.constant,)
        case Constant():
            return (value,)


def _padded(matrix_OI: Tensor, gated: bool) -> Tensor:
    return _pad(_join(matrix_OI) if gated else matrix_OI, 1)


def _join(gate_up: Tensor) -> Tensor:
    """Gate above up, each with zeros up to a multiple of 32."""
    return _pad(gate_up.view(2, gate_up.shape[0] // 2, *gate_up.shape[1:]), 1).flatten(0, 1)


def _join_bias(gate_up: Tensor) -> Tensor:
    """(…, 2, O) flat: the same of biases."""
    halves = gate_up.unflatten(-1, (2, -1))
    return _pad(halves, halves.dim() - 1).flatten()


def _pad(tensor: Tensor, dim: int) -> Tensor:
    """Zeros after the end of `dim`, up to a multiple of 32."""
    more = -tensor.shape[dim] % STEP
    return F.pad(tensor, (*(0, 0) * (tensor.dim() - 1 - dim), 0, more)) if more else tensor


def _storage(constant: Constant) -> int:
    return constant.tensor.untyped_storage().data_ptr()
