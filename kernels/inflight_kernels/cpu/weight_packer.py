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
        if tensor.dim() == 1:
            bias = _join(tensor) if gated else tensor
            memory = self._memory.take(bias.numel(), bias.dtype)
            return memory if self._memory.is_filled else memory.copy_(bias)
        return pack_weight(self._library, tensor, self._memory, gated=gated)


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


def _padded(matrix_OI: Tensor, gated: bool) -> Tensor:
    return _pad(_join(matrix_OI) if gated else matrix_OI, 1)


def _join(gate_up: Tensor) -> Tensor:
    """Gate above up, each with zeros up to a multiple of 32."""
    return _pad(gate_up.view(2, gate_up.shape[0] // 2, *gate_up.shape[1:]), 1).flatten(0, 1)


def _pad(tensor: Tensor, dim: int) -> Tensor:
    """Zeros after the end of `dim`, up to a multiple of 32."""
    more = -tensor.shape[dim] % STEP
    return F.pad(tensor, (*(0, 0) * (tensor.dim() - 1 - dim), 0, more)) if more else tensor


def _storage(constant: Constant) -> int:
    return constant.tensor.untyped_storage().data_ptr()
