"""The few sizes that a step's tensors have, so that a device sees the same shapes and addresses again and again.

A step is filled up with padding: rows of length 0, whose keys and values go nowhere and whose samples are discarded.
Padding costs a GPU little, and lets it replay what it was launched with before. A CPU would compute every padded row.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

PADDED_DEVICES = frozenset({"cuda"})
"""Types of devices on which steps are padded."""


@dataclass(frozen=True, slots=True)
class StepSizes:
    """Numbers of rows, rising; without any, each step is as large as it is."""

    num_rows: tuple[int, ...] = ()

    @classmethod
    def of(cls, device_type: str, max_batch_size: int) -> StepSizes:
        """1, 2, 4, then multiples of 8, up to `max_batch_size`."""
        if device_type not in PADDED_DEVICES:
            return cls()
        sizes = [size for size in (1, 2, 4, *range(8, max_batch_size, 8)) if size < max_batch_size]
        return cls((*sizes, max_batch_size))

    @property
    def pads(self) -> bool:
        return bool(self.num_rows)

    def padded(self, count: int) -> int:
        """The smallest size that holds `count` rows; none stay none."""
        return self.num_rows[bisect_left(self.num_rows, count)] if self.num_rows and count else count
