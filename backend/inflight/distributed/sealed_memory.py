"""Memory that one process fills and others then map, none of which can write to it any more.

It is a file without a name (memfd). Whoever opens it first fills it, and nobody else can open it meanwhile. When it is
whole the kernel seals it against every change; a process that ends before leaves it unsealed, and the next one begins
anew.

    header    of the process that has filled it, up to a page; written last
    regions   as they were mapped, each on whole huge pages; only what is written takes memory

Does not know what is kept in it.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import time
from dataclasses import dataclass

HEADER_BYTES = mmap.PAGESIZE
HUGE_PAGE_BYTES = 2 * 2**20
LOOK_SECONDS = 0.01
SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
MAP_FIXED, MADV_REMOVE, MADV_COLLAPSE = 0x10, 9, 25
"""From mman.h. MADV_COLLAPSE exists since Linux 6.1, and does not ask what the administrator has set for huge pages."""

_libc = ctypes.CDLL(None, use_errno=True)  # lets other threads of Python run, unlike the methods of mmap.mmap
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def create_sealable_memory() -> int:
    """A descriptor of empty memory for this user's processes."""
    descriptor = os.memfd_create("inflight-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.fchmod(descriptor, 0o600)
    return descriptor


@dataclass(frozen=True, slots=True)
class Region:
    """A part of the memory as this process has mapped it."""

    offset: int
    address: int
    num_bytes: int
    memory: memoryview
    """Keeps it mapped."""


class SealedMemory:
    def __init__(self, descriptor: int, seconds: float = 0.0) -> None:
        """Takes the descriptor over. Waits while another process fills the memory, however long that takes. Raises
        TimeoutError if it has not grown for `seconds`."""
        self._descriptor = descriptor
        self._regions: list[Region] = []
        self._end = HUGE_PAGE_BYTES
        size, deadline = -1, 0.0
        while not _lock(descriptor):
            if (found := os.fstat(descriptor).st_blocks) != size:
                size, deadline = found, time.monotonic() + seconds
            elif time.monotonic() >= deadline:
                os.close(descriptor)
                raise TimeoutError("another process fills this memory")
            time.sleep(LOOK_SECONDS)
        self.is_sealed = _is_sealed(descriptor)
        if not self.is_sealed:
            os.ftruncate(descriptor, 0)  # of what a process has left that ended too early

    def header(self) -> bytes:
        """What its filler has written at the beginning of sealed memory."""
        return os.pread(self._descriptor, HEADER_BYTES, 0).rstrip(b"\0")

    def map(self, num_bytes: int) -> Region:
        """The next region, of `num_bytes` or a few more. Raises ValueError behind the end of sealed memory, OSError if
        it cannot be mapped."""
        num_bytes = -(-num_bytes // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
        offset, self._end = self._end, self._end + num_bytes
        if not self.is_sealed:
            os.ftruncate(self._descriptor, self._end)
        elif os.fstat(self._descriptor).st_size < self._end:
            raise ValueError("the sealed memory ends before")
        # The system aligns only what it would give huge pages by itself.
        reserved = mmap.mmap(-1, num_bytes + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        start = ctypes.addressof(ctypes.c_char.from_buffer(reserved))
        address = -(-start // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
        memory = memoryview(reserved)[address - start :][:num_bytes]
        region = Region(offset, address, num_bytes, memory)
        protection = mmap.PROT_READ if self.is_sealed else mmap.PROT_READ | mmap.PROT_WRITE
        _map_at(region, self._descriptor, protection)
        self._regions.append(region)
        return region

    def allocate(self, region: Region, start: int, num_bytes: int) -> None:
        """Take the memory of a part of a region now: a write to memory that is not there any more would end this
        process. Raises OSError if it is short."""
        os.posix_fallocate(self._descriptor, region.offset + start, num_bytes)

    def remove(self, address: int, num_bytes: int) -> None:
        """Give whole pages of a region back, where the system can; they read as zeros then."""
        first = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (address + num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if end > first:
            _libc.madvise(first, end - first, MADV_REMOVE)

    def seal(self, header: bytes) -> None:
        """Nobody can change it from now on, this process included. Raises OSError."""
        assert not self.is_sealed and len(header) <= HEADER_BYTES
        os.ftruncate(self._descriptor, max(self._end, HUGE_PAGE_BYTES))
        os.pwrite(self._descriptor, header, 0)
        # A mapping counts as one that writes by the descriptor that it was made with.
        reader = os.open(f"/proc/self/fd/{self._descriptor}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            for region in self._regions:
                _map_at(region, reader, mmap.PROT_READ)
        finally:
            os.close(reader)
        fcntl.fcntl(self._descriptor, fcntl.F_ADD_SEALS, SEALS)
        self.is_sealed = True

    def close(self) -> None:
        """Let others open it. What is mapped stays."""
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)  # processes that were forked meanwhile hold the descriptor, too
        os.close(self._descriptor)


def collapse(address: int, num_bytes: int) -> bool:
    """Put the whole huge pages of a range on such pages; False if that is not possible now."""
    first = -(-address // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    end = (address + num_bytes) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    return end <= first or not _libc.madvise(first, end - first, MADV_COLLAPSE)


def _is_sealed(descriptor: int) -> bool:
    return bool(fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_WRITE)


def _lock(descriptor: int) -> bool:
    """Whether this process may use the memory now, alone if it is not sealed. The lock goes with the process."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        if not _is_sealed(descriptor):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # a shared lock is lost if this fails
    except BlockingIOError:
        return False
    return True


def _map_at(region: Region, descriptor: int, protection: int) -> None:
    """In place of what is mapped there."""
    arguments = (region.address, region.num_bytes, protection, mmap.MAP_SHARED | MAP_FIXED, descriptor, region.offset)
    if _libc.mmap(*arguments) != region.address:
        raise OSError(ctypes.get_errno(), "shared memory cannot be mapped")
