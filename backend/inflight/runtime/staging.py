"""Arrays on their way to the device: many small ones as one copy for each dtype. Knows no meaning of theirs."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Array = npt.NDArray[Any]


class Staging:
    """Collects named arrays of one step; `ship` brings all of them to the device without waiting for it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._arrays: dict[str, Array] = {}

    def add(self, name: str, array: Array) -> None:
        """`array` must not change afterwards: on a CPU its memory is what the step reads."""
        self._arrays[name] = array

    def ship(self) -> dict[str, Tensor]:
        if self._device.type == "cpu":
            return {name: torch.from_numpy(array) for name, array in self._arrays.items()}
        shipped: dict[str, Tensor] = {}
        for dtype in {array.dtype for array in self._arrays.values()}:
            shipped.update(self._ship_dtype({n: a for n, a in self._arrays.items() if a.dtype == dtype}))
        return shipped

    def _ship_dtype(self, arrays: dict[str, Array]) -> dict[str, Tensor]:
        packed = np.concatenate([array.reshape(-1) for array in arrays.values()])
        # torch's pinned allocator keeps the buffer from being used again before the copy is done.
        pinned = torch.from_numpy(packed).pin_memory()
        on_device = pinned.to(self._device, non_blocking=True)
        parts: dict[str, Tensor] = {}
        start = 0
        for name, array in arrays.items():
            parts[name] = on_device[start : start + array.size].view(array.shape)
            start += array.size
        return parts
