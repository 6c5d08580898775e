"""Packs the weights of a network's programs, each once, and frees the tensors that they were read into.

A packed weight is laid out for products that read it once and in order; native/panels.h draws the layout.
Legend: O output features, I input features.
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
from inflight_kernels.cpu.recorded_values import STEP
from inflight_kernels.cpu.recording import Constant, Recording, Weight


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
        self._packed: dict[Weight, Tensor] = {}
        constants = {
            value
            for recording in recordings
            for operation in recording.operations
            for value in operation.fields.values()
            if isinstance(value, Constant | Weight)
        }
        self._readers = Counter(_storage(value.constant if isinstance(value, Weight) else value) for value in constants)
        """What still reads each storage. An embedding that is also the head is read as it is, so it stays."""

    def pack(self, weight: Weight) -> Tensor:
        """A weight as panels, a bias as it is; where gate and up are joined, both with zeros up to a multiple of 32."""
        if weight not in self._packed:
            tensor, storage = weight.constant.tensor, _storage(weight.constant)
            self._packed[weight] = self._pack(tensor, weight.gated)
            self._readers[storage] -= 1
            if not self._readers[storage]:
                # The network's parts still hold the tensor, but memory is to hold a weight only once.
                self._memory.release(tensor)
        return self._packed[weight]

    def _pack(self, tensor: Tensor, gated: bool) -> Tensor:
        if self._memory.is_filled:
            tensor = tensor.to("meta")  # only its shape counts: it may have been freed
        if gated:
            halves = tensor.view(2, tensor.shape[0] // 2, *tensor.shape[1:])
            tensor = _pad(halves, 1).flatten(0, 1)
        if tensor.dim() == 1:
            bias = self._memory.take(tensor.numel(), tensor.dtype)
            return bias if self._memory.is_filled else bias.copy_(tensor)
        return pack_weight(self._library, _pad(tensor, 1), self._memory, gated=gated)


def pack_weight(library: NativeLibrary, weight_OI: Tensor, memory: WeightMemory, *, gated: bool = False) -> Tensor:
    """`weight_OI` as panels, taken from `memory`. It has the library's type, and I is a multiple of 32. `gated`: gate
    above up, whose panels are joined; O is then a multiple of 32."""
    num_outputs, num_inputs = weight_OI.shape
    if weight_OI.dtype != library.dtype or num_inputs % STEP or (gated and num_outputs % STEP):
        raise ValueError(
            f"cannot pack {weight_OI.dtype} {tuple(weight_OI.shape)}: {library.dtype}, multiples of {STEP}"
        )
    packed = memory.take(library.functions.inflight_packed_size(num_outputs, num_inputs), library.dtype)
    if memory.is_filled:
        return packed
    weight_OI = weight_OI.contiguous()
    library.functions.inflight_pack(
        weight_OI.data_ptr(), num_outputs, num_inputs, gated, torch.get_num_threads(), packed.data_ptr()
    )
    return packed


def _pad(tensor: Tensor, dim: int) -> Tensor:
    """Zeros after the end of `dim`, up to a multiple of 32."""
    more = -tensor.shape[dim] % STEP
    return F.pad(tensor, (*(0, 0) * (tensor.dim() - 1 - dim), 0, more)) if more else tensor


def _storage(constant: Constant) -> int:
    return constant.tensor.untyped_storage().data_ptr()
