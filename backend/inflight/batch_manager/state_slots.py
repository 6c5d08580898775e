"""Slots for the states of sequences, by their numbers: which hold a snapshot that others may start on.

A snapshot is what recurrent layers know behind a prefix; it is found by the hash of the prefix's last block, and only
as long as that block is cached. Slots are given away like blocks: those that hold nothing first, then the snapshot
whose last use is longest ago. A slot that somebody holds is never given away. The first slots are those of rows, which
are not counted here.

Behind the slots of the device are those of host memory. A snapshot whose slot is given away moves there, and stays
there: who starts on it copies it straight to its row. The copies between host and device are collected for the next
step, which makes them before anything else, first all to the host. Until then a slot that is read is held.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable


class _Tier:
    """The slots of the device, or of the host, that nobody holds."""

    def __init__(self, slots: range) -> None:
        self.blank = [*reversed(slots)]
        self.snapshots: OrderedDict[int, None] = OrderedDict()
        """The least recently used first."""

    @property
    def num_free(self) -> int:
        return len(self.blank) + len(self.snapshots)


class StateSlots:
    def __init__(self, num_slots: int, first_slot: int, num_host_slots: int = 0) -> None:
        """The slots `first_slot` to `first_slot` + `num_slots` - 1, and behind them those of the host."""
        self.num_slots = num_slots
        self.first_slot = first_slot
        self.num_host_slots = num_host_slots
        self._first_host_slot = first_slot + num_slots
        self.reset()

    def reset(self) -> None:
        """Forget everything, because what the slots hold is no longer certain. Nobody may hold any."""
        self._device = _Tier(range(self.first_slot, self._first_host_slot))
        self._host = _Tier(range(self._first_host_slot, self._first_host_slot + self.num_host_slots))
        self._hashes: dict[int, bytes] = {}  # slot -> what it is found by
        self._slots: dict[bytes, int] = {}
        self._holds: Counter[int] = Counter()
        # Copies for the next step.
        self._offloads: dict[int, int] = {}  # slot of the host -> the one that is copied to it
        self._onboards: list[tuple[int, int]] = []  # (slot of the host, which is held for it; row)

    @classmethod
    def beside_rows(
        cls, max_batch_size: int, num_snapshots: int | None, num_host_snapshots: int = 0
    ) -> StateSlots | None:
        """Behind those of rows and of padding; None if there are none, since no layer keeps a state."""
        return None if num_snapshots is None else cls(num_snapshots, max_batch_size + 1, num_host_snapshots)

    def _tier(self, slot: int) -> _Tier:
        return self._device if slot < self._first_host_slot else self._host

    @property
    def num_free(self) -> int:
        """Of the device."""
        return self._device.num_free

    @property
    def num_snapshots(self) -> int:
        return len(self._slots)

    def take(self, may_offload: Callable[[bytes], bool]) -> int:
        """A slot of the device to write to, held once; the caller has checked `num_free`. `may_offload`: whether a
        snapshot that is given up for it, by its hash, moves to the host if there is a slot."""
        if self._device.blank:
            slot = self._device.blank.pop()
        else:
            slot, _ = self._device.snapshots.popitem(last=False)
            block_hash = self._hashes.pop(slot)
            del self._slots[block_hash]
            if self._host.num_free and may_offload(block_hash):
                self._offload(slot, block_hash)
        self._holds[slot] = 1
        return slot

    def _offload(self, slot: int, block_hash: bytes) -> None:
        if self._host.blank:
            host_slot = self._host.blank.pop()
        else:
            host_slot, _ = self._host.snapshots.popitem(last=False)
            del self._slots[self._hashes.pop(host_slot)]
        self._offloads[host_slot] = slot  # what was to be copied there for an earlier snapshot is not needed
        self._hashes[host_slot] = block_hash
        self._slots[block_hash] = host_slot
        self._host.snapshots[host_slot] = None

    def is_on_host(self, slot: int) -> bool:
        return slot >= self._first_host_slot

    def read(self, slot: int, row: int) -> None:
        """Copy a slot of the host, which the caller has held and holds no more, to a row's before the next step."""
        self._onboards.append((slot, row))

    def take_transfers(self) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """The copies since the last call, for the step that is launched now: (slot, slot of the host) to the host, and
        behind them (slot of the host, row). Those of the host are counted from 0."""
        first = self._first_host_slot
        offloads = [(slot, host_slot - first) for host_slot, slot in self._offloads.items()]
        onboards = [(slot - first, row) for slot, row in self._onboards]
        read, self._onboards = self._onboards, []
        self._offloads = {}
        for slot, _ in read:
            self.release(slot)
        return offloads, onboards

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
            self._tier(slot).snapshots.pop(slot, None)
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
                self._tier(slot).snapshots[slot] = None
            else:
                self._tier(slot).blank.append(slot)

    def enter(self, slot: int, block_hash: bytes) -> None:
        """Let a held slot be found by the hash of the prefix behind which it was written, unless another one of the
        device is."""
        known = self._slots.get(block_hash)
        if known is not None and self.is_on_host(known):
            self.forget(block_hash)
            known = None
        if known is None:
            self._hashes[slot] = block_hash
            self._slots[block_hash] = slot

    def forget(self, block_hash: bytes) -> None:
        """The prefix is not cached any more."""
        slot = self._slots.pop(block_hash, None)
        if slot is not None:
            del self._hashes[slot]
            tier = self._tier(slot)
            if slot in tier.snapshots:
                del tier.snapshots[slot]
                tier.blank.append(slot)
                self._offloads.pop(slot, None)

    def check(self, held: Iterable[int]) -> None:
        """Raise AssertionError unless every slot is blank, a snapshot or held, and `held` are all holds."""
        read = [slot for slot, _ in self._onboards]
        assert Counter([*read, *(slot for slot in held if slot >= self.first_slot)]) == self._holds, "holds differ"
        assert {block_hash: slot for slot, block_hash in self._hashes.items()} == self._slots
        blank = [*self._device.blank, *self._host.blank]
        unheld = [*self._device.snapshots, *self._host.snapshots]
        assert set(unheld) == set(self._hashes) - set(self._holds)
        assert all(self.is_on_host(slot) for slot in [*self._host.blank, *self._host.snapshots])
        slots = sorted([*blank, *self._hashes, *(set(self._holds) - set(self._hashes))])
        end = self._first_host_slot + self.num_host_slots
        assert slots == list(range(self.first_slot, end)), "a slot is lost or there twice"
