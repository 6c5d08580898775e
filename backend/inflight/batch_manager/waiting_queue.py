"""Sequences that wait for a row, by their `order`, smallest first. Knows neither rows nor memory.

`pop` and `push` take logarithmic time, so a step of a long queue costs hardly more than that of a short one. The head
may be set aside, so that others overtake it, and gets its place back later.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from inflight.batch_manager.sequence import Order, Sequence, SequenceStatus


class WaitingQueue:
    """A heap. A sequence that finishes while it waits stays in the heap and is skipped when it becomes the head."""

    def __init__(self) -> None:
        self._heap: list[tuple[Order, Sequence]] = []
        self._aside: list[tuple[Order, Sequence]] = []
        self._num_waiting = 0
        self.num_paused = 0

    def __len__(self) -> int:
        return self._num_waiting

    def __iter__(self) -> Iterator[Sequence]:
        """In no particular order, but the same on every rank."""
        return (sequence for _, sequence in (*self._heap, *self._aside) if not sequence.is_finished)

    def push(self, sequence: Sequence) -> None:
        """`sequence.order` must be unique and must not change while the sequence waits."""
        heapq.heappush(self._heap, (sequence.order, sequence))
        self._count(sequence, 1)

    def head(self) -> Sequence:
        """The next sequence. Raises IndexError if none waits, but for those aside."""
        while self._heap[0][1].is_finished:
            heapq.heappop(self._heap)
        return self._heap[0][1]

    @property
    def has_head(self) -> bool:
        """False if none waits, or all that do are aside."""
        while self._heap and self._heap[0][1].is_finished:
            heapq.heappop(self._heap)
        return bool(self._heap)

    @property
    def num_aside(self) -> int:
        return len(self._aside)

    def set_aside(self) -> None:
        """Let the head wait outside the order, until `return_aside`."""
        self.head()
        self._aside.append(heapq.heappop(self._heap))

    def return_aside(self) -> None:
        """Give all that were set aside their places back."""
        for entry in self._aside:
            heapq.heappush(self._heap, entry)
        self._aside.clear()

    def pop(self) -> Sequence:
        """Take the head out."""
        sequence = self.head()
        heapq.heappop(self._heap)
        self._count(sequence, -1)
        return sequence

    def discard(self, sequence: Sequence) -> None:
        """Count a waiting sequence as gone, because it is about to become finished."""
        self._count(sequence, -1)
        if len(self._heap) > 64 and len(self._heap) > 2 * self._num_waiting:
            self._heap = [entry for entry in self._heap if not entry[1].is_finished and entry[1] is not sequence]
            heapq.heapify(self._heap)

    def _count(self, sequence: Sequence, change: int) -> None:
        self._num_waiting += change
        if sequence.status is SequenceStatus.PAUSED:
            self.num_paused += change
