"""Blocks and states of whole prompts in host memory, on their way from the ranks that computed them to those that need
them.

Each rank holds its own part. What it exports lies in memory without a name, which other processes of this user can map
and which is gone with the last of them. What has arrived is memory that somebody else filled. Steps copy both ways; who
sends and receives are other threads, which is why all methods may be called by any thread. Knows no sockets.
"""

from __future__ import annotations

import logging
import mmap
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from inflight.available_memory import available_memory
from inflight.runtime.state_store import SPARE_CPU_BYTES, StateShape, StateStore
from inflight.runtime.unit_bytes import UnitBytes
from inflight.scheduler_output import Arrival, Export

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ExportedBlocks:
    """Those of one prompt, one after the other, and behind them the state behind it."""

    num_blocks: int
    memory: mmap.mmap
    descriptor: int
    """Of the memory, in this process; closed when they are dropped."""
    device: int
    inode: int
    """Of the file that the descriptor is of, by which others know that they have opened that one."""
    since: float
    """When they were exported; time.monotonic()."""

    @classmethod
    def allocate(cls, num_blocks: int, num_bytes: int) -> ExportedBlocks:
        """Raises OSError if the system has no room for them."""
        descriptor = os.memfd_create("inflight-prompt")
        try:
            os.fchmod(descriptor, 0o600)
            os.posix_fallocate(descriptor, 0, num_bytes)
            memory, status = mmap.mmap(descriptor, num_bytes), os.fstat(descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        return cls(num_blocks, memory, descriptor, status.st_dev, status.st_ino, time.monotonic())

    @property
    def num_bytes(self) -> int:
        return len(self.memory)


class PromptBlocks:
    def __init__(self, store: StateStore, shape: StateShape, max_tokens: int) -> None:
        """`max_tokens`: of all prompts that wait to be fetched; the oldest are dropped for new ones."""
        self.unit_bytes = shape.block_bytes, shape.slot_bytes
        """Of a block, and of a sequence's state; of both as `shape` has them."""
        self.scales = tuple(spec.scales for spec in shape.specs)
        """Of each layer: whoever reads the blocks needs the same."""
        self.on_export: Callable[[], None] = lambda: None
        """Called by the thread that computes, when a prompt is ready to be fetched."""
        self._blocks = UnitBytes(store.block_tensors)
        self._states = UnitBytes(store.slot_tensors)
        self._max_blocks = max_tokens // shape.block_size * len(shape.windows)
        self._lock = threading.Lock()
        self._exported: dict[bytes, ExportedBlocks] = {}  # by key, the oldest first
        self._num_blocks = 0  # of these
        self._arrived: dict[int, Tensor] = {}  # by request id

    def num_bytes(self, num_blocks: int) -> int:
        """Of a prompt of so many blocks. At least one, also of stages whose layers keep nothing: memory of none cannot
        be mapped."""
        return max(num_blocks * self._blocks.num_bytes + self._states.num_bytes, 1)

    def has_memory(self, num_bytes: int) -> bool:
        """Whether the host has so much. The system kills a process that takes more than its control group may have."""
        return num_bytes <= available_memory() - SPARE_CPU_BYTES

    # -- in steps ------------------------------------------------------------------------------------------------------

    def export(self, prompts: list[Export]) -> None:
        """Copy them out, of none more than `max_tokens`. One that finds no memory is left out: who asks for it is told
        that it is gone."""
        for prompt in prompts:
            num_blocks = len(prompt.blocks)
            num_bytes = self.num_bytes(num_blocks)
            try:
                exported = ExportedBlocks.allocate(num_blocks, num_bytes) if self.has_memory(num_bytes) else None
            except OSError:
                exported = None
            if exported is None:
                logger.warning("there is no memory to hand over the %d blocks of a prompt", num_blocks)
                continue
            memory = torch.frombuffer(exported.memory, dtype=torch.uint8)
            for index, block_id in enumerate(prompt.blocks):
                self._blocks.read(block_id, self._block(memory, index))
            if self._states.num_bytes:
                self._states.read(prompt.slot, self._state(memory))
            with self._lock:
                while self._num_blocks + num_blocks > self._max_blocks:
                    self._discard(next(iter(self._exported)))
                self._exported[prompt.key] = exported
                self._num_blocks += num_blocks
        if prompts:
            self.on_export()

    def place(self, arrivals: list[Arrival]) -> None:
        """Copy what has arrived to the device, and give up the rest."""
        for arrival in arrivals:
            with self._lock:
                memory = self._arrived.pop(arrival.request_id)
            for index, block_id in arrival.blocks:
                self._blocks.write(self._block(memory, index), block_id)
            for slot in arrival.slots if self._states.num_bytes else ():
                self._states.write(self._state(memory), slot)

    def _block(self, memory: Tensor, index: int) -> Tensor:
        return memory[index * self._blocks.num_bytes : (index + 1) * self._blocks.num_bytes]

    def _state(self, memory: Tensor) -> Tensor:
        return memory[len(memory) - self._states.num_bytes :]

    # -- for who sends them --------------------------------------------------------------------------------------------

    def exported(self, key: bytes) -> ExportedBlocks | None:
        """None if it is not there yet, or not any more."""
        with self._lock:
            return self._exported.get(key)

    def discard(self, key: bytes) -> None:
        """It was fetched, or has waited too long."""
        with self._lock:
            if key in self._exported:
                self._discard(key)

    def expire(self, since: float) -> float | None:
        """Drop what was exported before then. Returns when the oldest of the others was."""
        with self._lock:
            while self._exported:
                key, exported = next(iter(self._exported.items()))
                if exported.since > since:
                    return exported.since
                self._discard(key)
        return None

    @property
    def num_exported(self) -> int:
        return len(self._exported)

    def _discard(self, key: bytes) -> None:
        exported = self._exported.pop(key)
        self._num_blocks -= exported.num_blocks
        os.close(exported.descriptor)

    # -- for who receives them -----------------------------------------------------------------------------------------

    def arrive(self, request_id: int, memory: mmap.mmap | bytearray) -> None:
        """The blocks of a request's prompt are here."""
        with self._lock:
            self._arrived[request_id] = torch.frombuffer(memory, dtype=torch.uint8)

    def drop(self, request_id: int) -> None:
        """The request is over, or never gets so far."""
        with self._lock:
            self._arrived.pop(request_id, None)

    @property
    def num_arrived(self) -> int:
        return len(self._arrived)

    def close(self) -> None:
        with self._lock:
            for key in list(self._exported):
                self._discard(key)
            self._arrived.clear()
