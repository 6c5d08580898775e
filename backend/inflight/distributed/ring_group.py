"""A RankGroup over a ring in shared memory, for the ranks on the leader's machine; by sockets for all others.

The sockets let the ranks join, and carry what the ring does not: messages longer than a chunk, and everything for ranks
that cannot map the leader's memory. A rank that waits sleeps. To be used from one thread only.
"""

from __future__ import annotations

import logging

from inflight.distributed.ring import CHUNK_BYTES, NUM_CHUNKS, RingReader, RingShape, RingWriter
from inflight.distributed.shared_memory import share_memory
from inflight.distributed.sockets import SocketRankGroup

logger = logging.getLogger(__name__)


class RingRankGroup:
    """Implements rank_group.RankGroup."""

    def __init__(
        self, sockets: SocketRankGroup, *, chunk_bytes: int = CHUNK_BYTES, num_chunks: int = NUM_CHUNKS
    ) -> None:
        """`sockets`: of the same ranks, from now on this group's. Collective."""
        self.rank = sockets.rank
        self.size = sockets.size
        self.several_hosts = sockets.several_hosts
        self._sockets = sockets
        self._writer: RingWriter | None = None
        self._reader: RingReader | None = None
        self._chunk_bytes = chunk_bytes
        shape = RingShape(self.size - 1, chunk_bytes, num_chunks)
        shared = share_memory(sockets, shape.num_bytes)
        self._far = shared.absent
        """Ranks that the ring does not reach."""
        if self.rank == 0:
            assert shared.memory is not None
            readers = {rank - 1: pid for rank, pid in enumerate(shared.pids) if rank > 0 and pid}
            self._writer = RingWriter(shared.memory, shape, readers)
        sockets.barrier()  # the writer prepares the memory
        if self.rank > 0 and self.rank not in self._far:
            assert shared.memory is not None
            self._reader = RingReader(shared.memory, shape, self.rank - 1, shared.pids[0])

    def broadcast(self, payload: bytes | None) -> bytes:
        """See RankGroup. Raises ConnectionError if a rank is lost, as far as this one notices."""
        if self._writer is not None:
            assert payload is not None
            fits = len(payload) <= self._chunk_bytes
            self._writer.write(payload if fits else None)
            self._sockets.send(payload, self._far if fits else range(1, self.size))
            return payload
        message = self._reader.read() if self._reader is not None else None
        return self._sockets.receive() if message is None else message

    def barrier(self) -> None:
        if self._writer is not None:
            self._writer.await_readers()
            self._sockets.await_arrivals(self._far)
            self.broadcast(b"")
            return
        if self._reader is not None:
            self._reader.arrive()
        else:
            self._sockets.arrive()
        self.broadcast(None)

    def close(self) -> None:
        for end in (self._writer, self._reader):
            if end is not None:
                end.close()
        self._sockets.close()

    def abort(self) -> None:
        """Nothing to do: the others notice the end of this process."""
