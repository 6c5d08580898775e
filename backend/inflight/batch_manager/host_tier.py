"""Cached blocks in host memory: which slots they have, and the copies between them and the device.

Knows no tensor: the copies are told to the runner with the next step, which makes all of them before anything else, in
this order: device to host, host to device, device to device. Until then a slot that is read keeps its content.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from inflight.batch_manager.eviction_queue import EvictionQueue
from inflight.batch_manager.prefix_table import CachedBlock


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockTransfers:
    """Copies of whole blocks before a step, see SchedulerOutput."""

    offloads: list[tuple[int, int]] = field(default_factory=list)
    onboards: list[tuple[int, int]] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    scrubbed: list[int] = field(default_factory=list)


NO_TRANSFERS = BlockTransfers()
"""Of nearly every step. Its lists are never written to."""


class HostTier:
    """`num_blocks` slots. A block in slot s has the id `first_id` + s."""

    def __init__(self, num_blocks: int, first_id: int) -> None:
        self.num_blocks = num_blocks
        self.first_id = first_id
        self.evictable = EvictionQueue()
        """The blocks here, but for those that are being read."""
        self._blank = list(range(num_blocks - 1, -1, -1))
        self._offloads: dict[int, int] = {}  # slot -> the block of the device that is copied to it
        self._moves: dict[int, int] = {}  # block of the device -> the slot whose block moves there
        self._copies: dict[int, int] = {}  # the same where the block also stays in its slot
        self._read: dict[int, CachedBlock | None] = {}  # slots that are read before the next step -> who stays in them

    @property
    def num_used(self) -> int:
        """Slots that are taken, those included that are being read for the last time."""
        return self.num_blocks - len(self._blank)

    def holds(self, block: CachedBlock) -> bool:
        return block.block_id >= self.first_id

    def take_slot(self, priority: int) -> tuple[int, CachedBlock | None] | None:
        """A slot for a block of this priority, and the block that has to go for it, which the caller forgets; None if
        all that could go are worth more."""
        if self._blank:
            return self._blank.pop(), None
        if not len(self.evictable) or self.evictable.lowest_priority > priority:
            return None
        dropped = self.evictable.pop()
        return dropped.block_id - self.first_id, dropped

    def place(self, block: CachedBlock, slot: int) -> None:
        """Move a block of the device, which nobody holds, into a slot of `take_slot`."""
        self._offloads[slot] = block.block_id  # what was to be copied there for an earlier owner is not needed
        block.block_id = self.first_id + slot
        self.evictable.add(block)

    def begin_read(self, block: CachedBlock) -> None:
        """Its slot is about to be read: nobody may take it before the next step is launched."""
        slot = block.block_id - self.first_id
        if slot not in self._read:
            self.evictable.remove(block)
            self._read[slot] = block

    def copy_to(self, block_id: int, device_id: int) -> None:
        """Copy the block with this id, whose slot is being read, to the device; it stays here."""
        self._copies[device_id] = block_id - self.first_id

    def move_to(self, block: CachedBlock, device_id: int) -> None:
        """The block, whose slot is being read, is one of the device from now on."""
        slot = block.block_id - self.first_id
        self._moves[device_id] = slot
        self._read[slot] = None
        block.block_id = device_id

    def move_back(self, block: CachedBlock) -> bool:
        """Whether a block that the device gives up has not left its slot yet: then it stays there."""
        slot = self._moves.pop(block.block_id, None)
        if slot is None:
            return False
        self._read[slot] = block
        block.block_id = self.first_id + slot
        return True

    def leave(self, block: CachedBlock, device_id: int) -> None:
        """The same content is in a block of the device: its slot is free, unless it is being read."""
        slot = block.block_id - self.first_id
        if slot in self._read:
            self._read[slot] = None
        else:
            self.evictable.remove(block)
            self._blank.append(slot)
        block.block_id = device_id

    def forget_device_block(self, device_id: int) -> None:
        """Nothing is to be copied into this block of the device any more."""
        self._moves.pop(device_id, None)
        self._copies.pop(device_id, None)

    def take_copies(self) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """The copies since the last call: (block, slot) to the host, and behind them (slot, block) to the device."""
        offloads = [(device_id, slot) for slot, device_id in self._offloads.items()]
        onboards = [(slot, device_id) for device_id, slot in [*self._moves.items(), *self._copies.items()]]
        for slot, block in self._read.items():
            if block is None:
                self._blank.append(slot)
            else:
                self.evictable.add(block)
        for pending in (self._offloads, self._moves, self._copies, self._read):
            pending.clear()
        return offloads, onboards

    def blocks(self) -> list[CachedBlock]:
        """All blocks that are in slots."""
        return [*self.evictable, *(block for block in self._read.values() if block is not None)]

    def check(self) -> None:
        """Raise AssertionError unless every slot is blank, holds a block or is being read, each exactly once."""
        slots = [*self._blank, *(block.block_id - self.first_id for block in self.evictable), *self._read]
        assert sorted(slots) == list(range(self.num_blocks)), "a host block is lost or there twice"
