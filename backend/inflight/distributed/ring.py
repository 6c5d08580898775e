"""A ring of chunks in shared memory: one writer broadcasts messages, and each of n readers takes every one, in order.

    bytes 0          192        384                4096
          | reader 0 | reader 1 | ... | (padding)  | chunk 0 | chunk 1 | ... | chunk c - 1 |

    reader r    | written | read | arrived |       64 bytes each
    chunk       | length | message ... |           8 bytes, then as many as the length says

Message k = 0, 1, 2, ... goes into chunk k modulo c. Each reader has three semaphores:

    written    messages that it may still read: 0 at first; the writer posts each message, the reader waits for it
    read       chunks that it leaves to the writer: c at first; the reader posts each that it has read, the writer waits
               for one of every reader before it writes
    arrived    for a barrier: the reader posts that it is there, the writer waits for it

So they are the flags of every chunk for every reader, as counts: whoever comes too early sleeps, the order of memory is
the semaphores', and no flag is ever reset. The memory is sparse: pages exist once a message has been in them, which for
short messages is one page a chunk. Knows neither ranks nor what a message is.
"""

from __future__ import annotations

import mmap
import os
import select
import struct
from collections.abc import Mapping
from dataclasses import dataclass

from inflight.distributed.semaphore import NUM_BYTES, SharedSemaphore

CHUNK_BYTES = 10 << 20
"""Longest message."""
NUM_CHUNKS = 10
LOOK_SECONDS = 1.0
"""How often a sleeper looks whether the other process is still there."""

LENGTH = struct.Struct("=q")
OTHER_WAY = -1
"""In place of a length: the message comes in another way."""
PAGE = 4096
SEMAPHORES = ("written", "read", "arrived")


@dataclass(frozen=True, slots=True)
class RingShape:
    """What the processes agree on."""

    num_readers: int
    chunk_bytes: int = CHUNK_BYTES
    num_chunks: int = NUM_CHUNKS

    @property
    def num_bytes(self) -> int:
        return self.chunk_offset(self.num_chunks)

    def chunk_offset(self, chunk: int) -> int:
        """Byte at which the chunk of this number begins."""
        header = self.num_readers * len(SEMAPHORES) * NUM_BYTES
        return -(-header // PAGE) * PAGE + chunk * -(-(self.chunk_bytes + LENGTH.size) // PAGE) * PAGE


class Peer:
    """The process at the other end of a ring."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        try:
            self._pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            self._pidfd = -1

    def check(self) -> None:
        """Raises ConnectionError if it has ended."""
        if self._pidfd >= 0:
            poll = select.poll()
            poll.register(self._pidfd, select.POLLIN)
            if not poll.poll(0):
                return
        raise ConnectionError(f"process {self._pid} of another rank has ended")

    def close(self) -> None:
        if self._pidfd >= 0:
            os.close(self._pidfd)


class _ReaderPlace:
    """A reader's three semaphores, with the process that is waited for: the reader's, or on the reader the writer's."""

    def __init__(self, memory: mmap.mmap, reader: int, peer: Peer) -> None:
        first = reader * len(SEMAPHORES) * NUM_BYTES
        self.written, self.read, self.arrived = (
            SharedSemaphore(memory, first + number * NUM_BYTES) for number in range(len(SEMAPHORES))
        )
        self.peer = peer

    def wait(self, semaphore: SharedSemaphore) -> None:
        """Raises ConnectionError if the other process ends meanwhile."""
        while not semaphore.wait(LOOK_SECONDS):
            self.peer.check()


class RingWriter:
    """The writer's end. To be made before any reader's."""

    def __init__(self, memory: mmap.mmap, shape: RingShape, reader_pids: Mapping[int, int]) -> None:
        """`memory`: at least `shape.num_bytes`, zeros. `reader_pids`: process of each reader; those that are not in it
        do not take part."""
        self._memory = memory
        self._shape = shape
        self._readers = [_ReaderPlace(memory, reader, Peer(pid)) for reader, pid in reader_pids.items()]
        for reader in self._readers:
            reader.written.initialise(0)
            reader.read.initialise(shape.num_chunks)
            reader.arrived.initialise(0)
        self._next = 0

    def write(self, message: bytes | None) -> None:
        """Pass on a message of at most `chunk_bytes`; None: it comes in another way. Waits while a reader has left no
        chunk; raises ConnectionError if that one has ended."""
        offset = self._shape.chunk_offset(self._next)
        for reader in self._readers:
            reader.wait(reader.read)
        if message is None:
            LENGTH.pack_into(self._memory, offset, OTHER_WAY)
        else:
            assert len(message) <= self._shape.chunk_bytes
            LENGTH.pack_into(self._memory, offset, len(message))
            self._memory[offset + LENGTH.size : offset + LENGTH.size + len(message)] = message
        for reader in self._readers:
            reader.written.post()
        self._next = (self._next + 1) % self._shape.num_chunks

    def await_readers(self) -> None:
        """Return once every reader has arrived once more. Raises ConnectionError if one has ended instead."""
        for reader in self._readers:
            reader.wait(reader.arrived)

    def close(self) -> None:
        for reader in self._readers:
            reader.peer.close()


class RingReader:
    """One reader's end. To be made once the writer's exists."""

    def __init__(self, memory: mmap.mmap, shape: RingShape, reader: int, writer_pid: int) -> None:
        """`memory`: the writer's, mapped here."""
        self._memory = memory
        self._shape = shape
        self._place = _ReaderPlace(memory, reader, Peer(writer_pid))
        self._next = 0

    def read(self) -> bytes | None:
        """The next message; None if it comes in another way. Raises ConnectionError if the writer has ended and wrote
        no more."""
        self._place.wait(self._place.written)
        offset = self._shape.chunk_offset(self._next)
        (length,) = LENGTH.unpack_from(self._memory, offset)
        message = None if length == OTHER_WAY else self._memory[offset + LENGTH.size : offset + LENGTH.size + length]
        self._place.read.post()
        self._next = (self._next + 1) % self._shape.num_chunks
        return message

    def arrive(self) -> None:
        self._place.arrived.post()

    def close(self) -> None:
        self._place.peer.close()
