"""How host memory is taken before it is used."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterable

from torch import Tensor

MADV_POPULATE_WRITE = 23
"""From mman.h, since Linux 5.14."""
CHUNK_BYTES = 64 * 2**20
"""Taken at a time. Other threads that need memory wait no longer than that takes, some 20 ms."""


def occupy(tensors: Iterable[Tensor]) -> None:
    """Take the memory of contiguous tensors of the host now. What they hold stays, also what is written meanwhile. On
    systems that cannot do that, their memory is taken when it is written."""
    madvise = ctypes.CDLL(None).madvise  # lets other threads of Python run, unlike mmap's own
    for tensor in tensors:
        start = tensor.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
        end = tensor.data_ptr() + tensor.nbytes
        for begin in range(start, end, CHUNK_BYTES):
            num_bytes = min(CHUNK_BYTES, end - begin)
            if madvise(ctypes.c_void_p(begin), ctypes.c_size_t(num_bytes), MADV_POPULATE_WRITE):
                return
