"""The places for requests in progress: as many as the server takes at a time."""

from __future__ import annotations

from collections import Counter


class Places:
    """Half of them is shared out to the keys, so that none can take all; the other half is for whoever comes first."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._num_keys = 0
        self._num_kept = 0
        """For each key."""
        self._num_common = count
        """Free ones that are kept for nobody; negative where more are taken than before a change of the keys."""
        self._num_taken: Counter[int | None] = Counter()
        """By key."""

    def share(self, num_keys: int) -> None:
        """There are so many keys now; with 0 or 1 whoever asks may take all."""
        if num_keys == self._num_keys:
            return
        self._num_keys = num_keys
        self._num_kept = self._count // (2 * num_keys) if num_keys > 1 else 0
        beyond = sum(max(taken - self._num_kept, 0) for taken in self._num_taken.values())
        self._num_common = self._count - num_keys * self._num_kept - beyond

    def num_taken(self, key: int | None) -> int:
        return self._num_taken[key]

    def take(self, key: int | None) -> bool:
        """Whether there was one."""
        if self._num_taken[key] >= self._num_kept:
            if self._num_common <= 0:
                return False
            self._num_common -= 1
        self._num_taken[key] += 1
        return True

    def give_back(self, key: int | None) -> None:
        """One that was taken."""
        self._num_taken[key] -= 1
        if self._num_taken[key] >= self._num_kept:
            self._num_common += 1
