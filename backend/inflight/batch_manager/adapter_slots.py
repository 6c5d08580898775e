"""Which low-rank adapter is in which slot of the device. Knows numbers of adapters, not their weights.

An adapter that a sequence with a row uses stays where it is. The others stay until their slot is needed; the one whose
last sequence left first goes first. Equal calls lead to equal slots, on every rank.
"""

from __future__ import annotations

from collections import OrderedDict

from inflight.batch_manager.sequence import Sequence
from inflight.scheduler_output import NO_SLOT


class AdapterSlots:
    def __init__(self, num_slots: int) -> None:
        self._free = list(range(num_slots))[::-1]
        self._slots: dict[int, int] = {}  # uid -> slot
        self._num_users: dict[int, int] = {}  # uid -> sequences with a row; those that have none are in `_idle`
        self._idle: OrderedDict[int, None] = OrderedDict()  # uids, the first to leave first

    def has_room(self, sequence: Sequence) -> bool:
        """Whether `take` would find a slot."""
        adapter = sequence.request.loaded_adapter
        return adapter is None or adapter.uid in self._slots or bool(self._free or self._idle)

    def take(self, sequence: Sequence) -> tuple[int, int] | None:
        """Give the sequence the slot of its adapter. Returns (slot, uid) if the slot must be filled first."""
        adapter = sequence.request.loaded_adapter
        if adapter is None:
            return None
        uid, load = adapter.uid, None
        if uid not in self._slots:
            if not self._free:
                former, _ = self._idle.popitem(last=False)
                self._free.append(self._slots.pop(former))
            self._slots[uid] = self._free.pop()
            load = (self._slots[uid], uid)
        self._idle.pop(uid, None)
        self._num_users[uid] = self._num_users.get(uid, 0) + 1
        sequence.adapter_slot = self._slots[uid]
        return load

    def release(self, sequence: Sequence) -> bool:
        """The sequence has lost its row. True if its adapter's slot may go to another one now."""
        adapter = sequence.request.loaded_adapter
        if adapter is None or sequence.adapter_slot == NO_SLOT:
            return False
        sequence.adapter_slot = NO_SLOT
        self._num_users[adapter.uid] -= 1
        if self._num_users[adapter.uid]:
            return False
        del self._num_users[adapter.uid]
        self._idle[adapter.uid] = None
        return True

    def reset(self) -> None:
        """Nothing is known of what the slots hold: fill them anew. No sequence may use one."""
        assert not self._num_users, "reset() with adapters in use"
        self._free += self._slots.values()
        self._slots.clear()
        self._idle.clear()

    def check(self, sequences: list[Sequence]) -> None:
        """Raise AssertionError unless exactly `sequences`, those with rows, use slots, each that of its adapter."""
        users: dict[int, int] = {}
        for sequence in sequences:
            adapter = sequence.request.loaded_adapter
            if adapter is not None:
                users[adapter.uid] = users.get(adapter.uid, 0) + 1
                assert sequence.adapter_slot == self._slots[adapter.uid]
        assert users == self._num_users
        assert set(self._idle) == set(self._slots) - set(users)
        assert len({*self._free, *self._slots.values()}) == len(self._free) + len(self._slots)
