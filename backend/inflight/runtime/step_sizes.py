"""The few sizes to which a step's batch is padded, so that a GPU gets the same shapes and addresses again and again.

Padding consists of rows of length 0, whose keys and values are not stored and whose samples are discarded. It costs a
GPU little, and equal shapes are what the replay of a CUDA graph needs. On a CPU, steps are not padded, because it would
compute every padding row.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

PADDED_DEVICES = frozenset({"cuda"})
"""Types of devices on which steps are padded."""


@dataclass(frozen=True, slots=True)
class StepSizes:
    """Numbers of rows, in rising order; empty = steps are not padded."""

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
        """The smallest size that holds `count` rows; 0 stays 0."""
        return self.num_rows[bisect_left(self.num_rows, count)] if self.num_rows and count else count
