"""How much of a sequence's beginning is cached, where groups of layers have blocks of their own."""

from __future__ import annotations

from collections.abc import Callable

from inflight.block_groups import BlockGroups
from inflight.scheduler_output import NO_BLOCK


class PrefixSearch:
    """Of one sequence. Each block is looked up once, and only if it may count."""

    def __init__(self, groups: BlockGroups, look_up: Callable[[int, int], int | None]) -> None:
        """`look_up` gives the cached block of an index and a group, None if it is not cached."""
        self._groups = groups
        self._look_up = look_up
        self._found: dict[tuple[int, int], int | None] = {}

    def longest(self, most: int) -> int:
        """Leading blocks, at most so many, on which a sequence can start: cached in groups without a window are all of
        them, in others those that are read behind them."""
        count, windows = most, self._groups.windows
        for group, window in enumerate(windows):
            if not window:
                count = next((index for index in range(count) if self._find(index, group) is None), count)
        with_windows = [group for group, window in enumerate(windows) if window]
        while count and with_windows:
            missing = max(self._last_missing(group, count) for group in with_windows)
            if missing < 0:
                break
            count = missing
        return count

    def _last_missing(self, group: int, count: int) -> int:
        """The last block that is read behind `count` blocks and not cached; -1 if all are."""
        first = self._groups.first_needed(group, count * self._groups.block_size)
        return next((index for index in range(count - 1, first - 1, -1) if self._find(index, group) is None), -1)

    def _find(self, index: int, group: int) -> int | None:
        key = (index, group)
        if key not in self._found:
            self._found[key] = self._look_up(index, group)
        return self._found[key]

    def block_ids(self, count: int) -> list[int]:
        """Of so many leading blocks, those of all groups side by side; NO_BLOCK where none is needed."""
        num_groups, num_tokens = len(self._groups), count * self._groups.block_size
        block_ids = [NO_BLOCK] * (count * num_groups)
        for group in range(num_groups):
            for index in range(self._groups.first_needed(group, num_tokens), count):
                found = self._find(index, group)
                assert found is not None, "more blocks than were found"
                block_ids[index * num_groups + group] = found
        return block_ids
