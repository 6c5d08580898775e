"""What the host knows of each row: its blocks and how its tokens are to be picked. numpy only; the device has RowState.

A row is a place in the running batch. Fields are arrays over the rows, so that a step picks its rows in one go.
"""

from __future__ import annotations

import numpy as np

from inflight.runtime.staging import Array
from inflight.scheduler_output import NewSequence, SchedulerOutput

FLOAT_FIELDS = (
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)


class RowTable:
    """Written and read by the thread that launches steps."""

    def __init__(self, num_rows: int, max_blocks: int, filler_block: int) -> None:
        """`filler_block` stands in a block table behind a row's last block: a block that nobody writes."""
        self.filler_block = filler_block
        self.block_table = np.full((num_rows, max_blocks), filler_block, dtype=np.int32)
        self.num_blocks = np.zeros(num_rows, dtype=np.int64)
        self.sequences: list[NewSequence | None] = [None] * num_rows
        self.floats = np.zeros((len(FLOAT_FIELDS), num_rows), dtype=np.float32)
        self.top_k = np.zeros(num_rows, dtype=np.int32)
        self.seeds = np.zeros(num_rows, dtype=np.int64)
        self.num_prompt_tokens = np.zeros(num_rows, dtype=np.int64)
        self.is_random = np.zeros(num_rows, dtype=bool)
        self.is_penalised = np.zeros(num_rows, dtype=bool)
        self.is_restricted = np.zeros(num_rows, dtype=bool)
        """Some tokens may be impossible: bad words, or end tokens that must wait for min_tokens."""
        self.wants_log_probs = np.zeros(num_rows, dtype=bool)
        self._former_block_ids: list[list[int]] = [[] for _ in range(num_rows)]

    def update(self, scheduled: SchedulerOutput) -> tuple[Array, Array]:
        """Take in a step's new sequences and blocks.

        Returns what changed in the block table: flat indices, int64, and the block ids now there, int32.
        """
        changes: list[tuple[int, int, int]] = []
        for new in scheduled.new_sequences:
            changes.append(self._place(new))
        for part in scheduled.decodes:
            if part.new_block_ids:
                changes.append(self._append(part.row, part.new_block_ids))
        for part in scheduled.prefills:
            if part.new_block_ids:
                changes.append(self._append(part.row, part.new_block_ids))
        if not changes:
            return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int32)
        width = self.block_table.shape[1]
        index = np.concatenate([np.arange(row * width + start, row * width + stop) for row, start, stop in changes])
        # A row may be placed and grow in one step: equal values for a doubled index are harmless.
        return index, self.block_table.reshape(-1)[index]

    def block_ids(self, row: int) -> list[int]:
        """Blocks of whoever holds the row now and of who held it before."""
        ids: list[int] = self.block_table[row, : self.num_blocks[row]].tolist()
        return ids + self._former_block_ids[row]

    def _place(self, new: NewSequence) -> tuple[int, int, int]:
        row, count = new.row, len(new.block_ids)
        self._former_block_ids[row] = self.block_table[row, : self.num_blocks[row]].tolist()
        stop = max(count, int(self.num_blocks[row]))
        self.block_table[row, :count] = new.block_ids
        self.block_table[row, count:stop] = self.filler_block
        self.num_blocks[row] = count
        self.sequences[row] = new
        sampling = new.sampling_config
        self.floats[:, row] = [getattr(sampling, field) for field in FLOAT_FIELDS]
        self.top_k[row] = sampling.top_k
        # The kernels take the seed's 64 bits as a signed number.
        self.seeds[row] = sampling.seed - (sampling.seed >> 63 << 64)
        self.num_prompt_tokens[row] = new.num_prompt_tokens
        self.is_random[row] = sampling.temperature > 0
        self.is_penalised[row] = (
            sampling.repetition_penalty != 1 or sampling.presence_penalty != 0 or sampling.frequency_penalty != 0
        )
        self.is_restricted[row] = bool(new.bad_words or (new.end_ids and sampling.min_tokens))
        self.wants_log_probs[row] = new.return_log_probs
        return row, 0, stop

    def _append(self, row: int, block_ids: list[int]) -> tuple[int, int, int]:
        start = int(self.num_blocks[row])
        stop = start + len(block_ids)
        self.block_table[row, start:stop] = block_ids
        self.num_blocks[row] = stop
        return row, start, stop
