"""Brings a step's arrays from the host to the device without waiting for it. Does not know what they mean."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Array = npt.NDArray[Any]

ALIGNMENT = 16
"""Bytes: the widest load of a kernel. triton compiles another kernel for an address that is no multiple of it."""
RING_SIZE = 2
"""Pinned buffers: one that is written while the copy from the other may still be under way."""


class Staging:
    """The named arrays that a step brings, in the order in which they lie on the device."""

    def __init__(self) -> None:
        self.arrays: dict[str, Array] = {}

    def add(self, name: str, array: Array) -> None:
        """`array` must not change afterwards: on a CPU its memory is what the step reads."""
        self.arrays[name] = array


class InputBuffer:
    """A step's arrays on the device: packed, copied with one copy, and always at the same addresses if the arrays
    before them are as long. What is not packed stays in the host's memory, where a CPU reads it."""

    def __init__(self, capacity: int, device: torch.device, *, packs: bool) -> None:
        """`capacity`: bytes. An array for which they do not suffice is copied on its own."""
        self._device = device
        self._packs = packs
        if packs:
            self._memory = torch.zeros(capacity, dtype=torch.uint8, device=device)
            self._ring = [_HostBuffer(capacity, device) for _ in range(RING_SIZE)]

    def load(self, arrays: dict[str, Array]) -> dict[str, Tensor]:
        """Overwrite the buffer with a step's arrays, and return them as tensors.

        Must be called where steps run (on a CPU on the thread that computes, on a GPU under its stream), so that the
        step before has read its arrays first.
        """
        if not self._packs:
            return {name: torch.from_numpy(array) for name, array in arrays.items()}
        places, end = _places(arrays, len(self._memory))
        packed = np.zeros(end, dtype=np.uint8)
        for name, place in places.items():
            packed[place : place + arrays[name].nbytes] = np.ascontiguousarray(arrays[name]).reshape(-1).view(np.uint8)
        buffer = self._ring.pop(0)
        self._ring.append(buffer)
        buffer.copy(packed, self._memory)
        return {name: self._on_device(array, places.get(name)) for name, array in arrays.items()}

    def _on_device(self, array: Array, place: int | None) -> Tensor:
        host = torch.from_numpy(array)
        if place is None:
            return to_host_tensor(array, self._device).to(self._device, non_blocking=True)
        return self._memory[place : place + array.nbytes].view(host.dtype).view(array.shape)


class _HostBuffer:
    """Pinned memory from which a copy to the GPU may be under way; for a CPU ordinary memory."""

    def __init__(self, capacity: int, device: torch.device) -> None:
        self._memory = torch.zeros(capacity, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._copied = torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def copy(self, packed: Array, target: Tensor) -> None:
        """Copy `packed` (uint8) to the beginning of `target`, once the copy before is done."""
        if self._copied is not None:
            self._copied.synchronize()
        part = self._memory[: len(packed)]
        part.copy_(torch.from_numpy(packed))
        target[: len(packed)].copy_(part, non_blocking=True)
        if self._copied is not None:
            self._copied.record()


def _places(arrays: dict[str, Array], capacity: int) -> tuple[dict[str, int], int]:
    """Where each array begins among at most `capacity` bytes, for those that find room; and where the last one ends."""
    places: dict[str, int] = {}
    end = 0
    for name, array in arrays.items():
        begin = -(-end // ALIGNMENT) * ALIGNMENT
        if begin + array.nbytes <= capacity:
            places[name], end = begin, begin + array.nbytes
    return places, end


def to_host_tensor(array: Array, device: torch.device) -> Tensor:
    """`array` as a tensor that can be copied to `device` without waiting; on a CPU in the same memory."""
    tensor = torch.from_numpy(array)
    # torch's pinned allocator keeps the memory from being used again before the copy is done.
    return tensor.pin_memory() if device.type == "cuda" else tensor
