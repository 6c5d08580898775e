"""The weights of one rank in memory that outlives it, so that a relaunched rank, a spare or another replica maps what
the first one has read and packed.

The network is loaded in the same way either way: it takes its tensors one after the other, at equal places. In sealed
memory they hold their values already, and neither is the checkpoint read nor is anything packed. Memory that was filled
from other files, or taken in another order, is never used.

Legend: weights are taken plain (as the network's parts hold them) and then, where C++ computes, packed; the plain ones
that it has no use for are given back, and are holes for all who map them.
"""

from __future__ import annotations

import hashlib
import logging
import math
import threading
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from inflight.distributed.sealed_memory import (
    HUGE_PAGE_BYTES,
    Region,
    SealedMemory,
    collapse,
    create_sealable_memory,
)
from inflight.distributed.shared_memory import open_place
from inflight.errors import InsufficientMemory, UnusableWeights

logger = logging.getLogger(__name__)

REGION_BYTES = 256 * 2**20
WAIT_SECONDS = 60.0
"""For another rank that reads the same weights, as long as it has not read more of them: it may be suspended."""
ALIGNMENT = 64
"""A cache line."""
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


class _Header(msgspec.Struct, frozen=True):
    """What the memory was filled with."""

    identity: str
    layout: str
    """Digest of all that was taken."""


class SharedWeights:
    """Implements inflight_kernels.cpu.WeightMemory. For CPUs."""

    def __init__(self, memory: SealedMemory, identity: str) -> None:
        self.is_filled = memory.is_sealed
        """Whether tensors hold their values when they are taken. They cannot be written to then."""
        self._memory = memory
        self._identity = identity
        self._layout = hashlib.blake2b(digest_size=16)
        self._region: Region | None = None
        self._used = 0
        """Bytes of `_region`."""
        self._taken: list[tuple[int, int]] = []
        """Address and bytes of each tensor but those that were given back."""

    @classmethod
    def open(cls, place: str, identity: str) -> SharedWeights | None:
        """`place`: of memory that another process of this user holds, "" = there is none on this machine.
        `identity`: of what the weights are made of. None if they are to be in memory of this rank's own. If this rank
        is to fill it, nobody else can open it before `finish`."""
        descriptor = open_place(place) if place else -1
        if descriptor < 0:
            return None
        try:
            memory = SealedMemory(descriptor, WAIT_SECONDS)
        except TimeoutError as error:
            logger.info("the weights in shared memory are not used: %s", error)
            return None
        reason = ""
        if memory.is_sealed:
            if msgspec.json.decode(memory.header(), type=_Header).identity != identity:
                reason = "they were read from other files"
        elif not keeps_huge_pages():
            reason = "shared memory cannot be on huge pages here, and steps would be slower"
        if reason:
            logger.info("the weights in shared memory are not used: %s", reason)
            memory.close()
            return None
        return cls(memory, identity)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor for a plain weight; see take."""
        return self.take(math.prod(shape), dtype).view(shape)

    def take(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        """(num_elements), zeros if they do not hold values, from a cache line on. Raises InsufficientMemory, and
        UnusableWeights if the memory was filled for something else."""
        num_bytes = num_elements * dtype.itemsize
        self._layout.update(f"{num_elements} {dtype} ".encode())
        if not num_bytes:
            return torch.empty(0, dtype=dtype)
        try:
            region, start = self._find_room(num_bytes)
            if not self.is_filled:
                self._memory.allocate(region, start, num_bytes)
        except ValueError:
            raise _other_layout() from None
        except OSError as error:
            raise InsufficientMemory(f"there is no room for the weights in shared memory: {error}") from None
        self._taken.append((region.address + start, num_bytes))
        return torch.frombuffer(region.memory[start : start + num_bytes], dtype=dtype)

    def release(self, tensor: Tensor) -> None:
        """A tensor that was taken is not read any more."""
        extent = tensor.data_ptr(), tensor.nbytes
        self._taken.remove(extent)
        if not self.is_filled:
            self._memory.remove(*extent)

    def finish(self, identity: str) -> None:
        """All weights are loaded: others may map them. `identity`: what it is now. Raises UnusableWeights if the
        files have changed meanwhile, or if the memory was filled for something else."""
        layout = self._layout.hexdigest()
        if self.is_filled:
            if msgspec.json.decode(self._memory.header(), type=_Header).layout != layout:
                raise _other_layout()
            logger.info("weights are mapped from shared memory")
        elif identity != self._identity:
            # Unsealed memory is another rank's to fill, so it cannot be kept either.
            raise UnusableWeights("the checkpoint was changed while it was read")
        else:
            try:
                self._memory.seal(msgspec.json.encode(_Header(identity, layout)))
            except OSError as error:
                # It stays locked as long as this rank lives: whoever opened it would fill it anew.
                logger.warning("others cannot map the weights, because the system does not seal them: %s", error)
                return
        self._memory.close()
        threading.Thread(target=_collapse, args=(self._taken,), name="inflight-weight-pages", daemon=True).start()

    def _find_room(self, num_bytes: int) -> tuple[Region, int]:
        start = -(-self._used // ALIGNMENT) * ALIGNMENT
        if self._region is None or start + num_bytes > self._region.num_bytes:
            self._region, start = self._memory.map(max(num_bytes, REGION_BYTES)), 0
        self._used = start + num_bytes
        return self._region, start


def keeps_huge_pages() -> bool:
    """Whether shared memory can be on huge pages if private memory can. Tried with a page."""
    try:
        if "[never]" in HUGE_PAGES.read_text(encoding="ascii"):
            return True
    except OSError:
        return True
    memory = SealedMemory(create_sealable_memory())
    region = memory.map(HUGE_PAGE_BYTES)
    memory.allocate(region, 0, HUGE_PAGE_BYTES)
    region.memory[0] = 1
    memory.close()
    return collapse(region.address, HUGE_PAGE_BYTES)


def _collapse(extents: list[tuple[int, int]]) -> None:
    """Beside the first steps: 1 GB takes 2.4 s (Xeon in a virtual machine, 2026-11-22), once; for those who map it
    later, moments. Adjacent tensors are one range, and holes between them none, which would be filled."""
    joined: list[tuple[int, int]] = []
    for address, num_bytes in extents:
        if joined and 0 <= address - sum(joined[-1]) < ALIGNMENT:
            joined[-1] = joined[-1][0], address + num_bytes - joined[-1][0]
        else:
            joined.append((address, num_bytes))
    for address, num_bytes in joined:
        for start in range(address, address + num_bytes, 32 * HUGE_PAGE_BYTES):
            collapse(start, min(32 * HUGE_PAGE_BYTES, address + num_bytes - start))


def _other_layout() -> UnusableWeights:
    return UnusableWeights("the weights in shared memory are laid out for other code: they must be read anew")
