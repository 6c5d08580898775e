"""Sums and gathers over the ranks of one machine, in C++ through memory that all of them have mapped.

native/rank_segment.h draws that memory and says why no meeting is missed. Layers in C++ use it from there: with meta
tensors the calls are recorded (recorder.py). Knows neither how the ranks got the memory nor what they compute.
"""

from __future__ import annotations

import ctypes
import mmap
from ctypes import CDLL
from dataclasses import dataclass, field

import torch
from torch import Tensor

from inflight_kernels.dispatch import recorder_of


def segment_bytes(library: CDLL, size: int) -> int:
    """Bytes of memory, zeros at first, that `size` ranks need."""
    return int(library.inflight_segment_bytes(size))


@dataclass(frozen=True, slots=True)
class RankPlace:
    """The memory that the ranks share, and which of them this is."""

    address: int
    rank: int
    size: int
    memory: object = field(compare=False, repr=False)
    """Stays mapped as long as this lives."""


class SharedMemoryCollectives:
    """One rank's end. Calls are collective: every rank makes them in the same order, on tensors of the same shape.

    A waiting rank spins for some microseconds and then sleeps, for ever if another one is gone; either way other Python
    threads run meanwhile. For one thread at a time.
    """

    def __init__(self, library: CDLL, memory: mmap.mmap, rank: int, size: int, start: int = 0) -> None:
        """`memory`: shared by all ranks, theirs are `segment_bytes` from `start` on; stays mapped as long as this
        lives."""
        held = (ctypes.c_char * len(memory)).from_buffer(memory)
        self._place = RankPlace(ctypes.addressof(held) + start, rank, size, held)
        self._native_place = (self._place.address, rank, size)
        self._gather = library.inflight_gather
        self._sums = {torch.float32: library.inflight_sum_float32, torch.bfloat16: library.inflight_sum_bfloat16}

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum of every rank's `x`: added up in rank order in float32 and rounded once, so the same bits on all ranks.

        Written over `x`, on a CPU, of any floating-point type up to 32 bits.
        """
        if x.is_meta:
            recorded: Tensor = recorder_of(x).all_reduce(x, self._place)
            return recorded
        if x.dtype not in self._sums or not x.is_contiguous():
            return x.copy_(self.all_reduce(x.float().contiguous()))
        self._sums[x.dtype](*self._native_place, x.data_ptr(), x.numel())
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """Every rank's `x` (..., n), on a CPU, side by side in the last dimension: (..., n * size), in rank order."""
        if x.is_meta:
            recorded: Tensor = recorder_of(x).all_gather(x, self._place)
            return recorded
        x = x.contiguous()
        out = x.new_empty(*x.shape[:-1], x.shape[-1] * self._place.size)
        row_bytes = x.shape[-1] * x.element_size()
        self._gather(*self._native_place, x.data_ptr(), x.numel() // max(x.shape[-1], 1), row_bytes, out.data_ptr())
        return out
