"""Copies arrays from the host to the device without waiting for it. Does not know what they mean."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Array = npt.NDArray[Any]


class Staging:
    """Named arrays that only some steps have: `send` copies them into new tensors, with one copy for each dtype."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._arrays: dict[str, Array] = {}

    def add(self, name: str, array: Array) -> None:
        """`array` must not change afterwards: on a CPU its memory is what the step reads."""
        self._arrays[name] = array

    def send(self) -> dict[str, Tensor]:
        if self._device.type == "cpu":
            return {name: torch.from_numpy(array) for name, array in self._arrays.items()}
        sent: dict[str, Tensor] = {}
        for dtype in {array.dtype for array in self._arrays.values()}:
            sent.update(self._send_dtype({n: a for n, a in self._arrays.items() if a.dtype == dtype}))
        return sent

    def _send_dtype(self, arrays: dict[str, Array]) -> dict[str, Tensor]:
        packed = np.concatenate([array.reshape(-1) for array in arrays.values()])
        on_device = to_host_tensor(packed, self._device).to(self._device, non_blocking=True)
        parts: dict[str, Tensor] = {}
        start = 0
        for name, array in arrays.items():
            parts[name] = on_device[start : start + array.size].view(array.shape)
            start += array.size
        return parts


class InputBuffer:
    """The numbers that every step has, always at the same addresses of the device."""

    def __init__(self, capacity: int, device: torch.device) -> None:
        """`capacity`: how many numbers the largest step has."""
        self._numbers = torch.zeros(capacity, dtype=torch.int64, device=device)

    def load(self, numbers: Tensor, sizes: list[int]) -> list[Tensor]:
        """Overwrite the buffer with a step's numbers, int64 on the host, and return it split into parts of `sizes`.

        Must be called where steps run (on a CPU on the thread that computes, on a GPU under its stream), so that the
        step before has read its numbers first.
        """
        part = self._numbers[: len(numbers)]
        part.copy_(numbers, non_blocking=True)
        return list(part.split_with_sizes(sizes))


def to_host_tensor(array: Array, device: torch.device) -> Tensor:
    """`array` as a tensor that can be copied to `device` without waiting; on a CPU in the same memory."""
    tensor = torch.from_numpy(array)
    # torch's pinned allocator keeps the memory from being used again before the copy is done.
    return tensor.pin_memory() if device.type == "cuda" else tensor
