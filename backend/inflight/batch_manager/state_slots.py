"""Slots for the states of sequences, by their numbers: which hold a snapshot that others may start on.

A snapshot is what recurrent layers know behind a prefix; it is found by the hash of the prefix's last block, and only
as long as that block is cached. Slots are given away like blocks: those that hold nothing first, then the snapshot
whose last use is longest ago. A slot that somebody holds is never given away. The first slots are those of rows, which
are not counted here.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable


class StateSlots:
    def __init__(self, num_slots: int, first_slot: int) -> None:
        """The slots `first_slot` to `first_slot` + `num_slots` - 1."""
        self.num_slots = num_slots
        self.first_slot = first_slot
        self.reset()

    def reset(self) -> None:
        """Forget everything, because what the slots hold is no longer certain. Nobody may hold any."""
        self._blank = list(range(self.first_slot + self.num_slots - 1, self.first_slot - 1, -1))
        self._hashes: dict[int, bytes] = {}  # slot -> what it is found by
        self._slots: dict[bytes, int] = {}
        self._unheld: OrderedDict[int, None] = OrderedDict()  # snapshots, the least recently used first
        self._holds: Counter[int] = Counter()

    @classmethod
    def beside_rows(cls, max_batch_size: int, num_snapshots: int | None) -> StateSlots | None:
        """Behind those of rows and of padding; None if there are none, since no layer keeps a state."""
        return None if num_snapshots is None else cls(num_snapshots, max_batch_size + 1)

    @property
    def num_free(self) -> int:
        return len(self._blank) + len(self._unheld)

    @property
    def num_snapshots(self) -> int:
        return len(self._slots)

    def take(self) -> int:
        """A slot to write to, held once; the caller has checked `num_free`."""
        if self._blank:
            slot = self._blank.pop()
        else:
            slot, _ = self._unheld.popitem(last=False)
            del self._slots[self._hashes.pop(slot)]
        self._holds[slot] = 1
        return slot

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self._slots

    def hold_snapshot(self, block_hash: bytes) -> int:
        """Its slot, held once more."""
        slot = self._slots[block_hash]
        self.hold(slot)
        return slot

    def hold(self, slot: int) -> None:
        """Rows' slots need no hold: whoever copies from one does so before its row goes on."""
        if slot >= self.first_slot:
            self._unheld.pop(slot, None)
            self._holds[slot] += 1

    def release(self, slot: int) -> None:
        """Undo one hold. A slot that is no snapshot is blank then."""
        if slot < self.first_slot:
            return
        self._holds[slot] -= 1
        assert self._holds[slot] >= 0, f"slot {slot} was released twice"
        if not self._holds[slot]:
            del self._holds[slot]
            if slot in self._hashes:
                self._unheld[slot] = None
            else:
                self._blank.append(slot)

    def enter(self, slot: int, block_hash: bytes) -> None:
        """Let a held slot be found by the hash of the prefix behind which it was written, unless another one is."""
        if block_hash not in self._slots:
            self._hashes[slot] = block_hash
            self._slots[block_hash] = slot

    def forget(self, block_hash: bytes) -> None:
        """The prefix is not cached any more."""
        slot = self._slots.pop(block_hash, None)
        if slot is not None:
            del self._hashes[slot]
            if slot in self._unheld:
                del self._unheld[slot]
                self._blank.append(slot)

    def check(self, held: Iterable[int]) -> None:
        """Raise AssertionError unless every slot is blank, a snapshot or held, and `held` are all holds."""
        assert Counter(slot for slot in held if slot >= self.first_slot) == self._holds, "holds differ"
        assert {block_hash: slot for slot, block_hash in self._hashes.items()} == self._slots
        assert set(self._unheld) == set(self._hashes) - set(self._holds)
        slots = sorted([*self._blank, *self._hashes, *(set(self._holds) - set(self._hashes))])
        assert slots == list(range(self.first_slot, self.first_slot + self.num_slots)), "a slot is lost or there twice"
