"""The host's record of each row: its blocks and how its tokens are sampled. numpy only; the device has RowState.

A row is a place in the running batch.
"""

from __future__ import annotations

import numpy as np

from inflight.request import SamplingConfig
from inflight.runtime.staging import Staging
from inflight.scheduler_output import LOG_PROBS, NewSequence, SchedulerOutput

FLOAT_FIELDS = (
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)

RANDOM, TOP_K, TOP_P, MIN_P, PENALISED, RESTRICTED, WANTS_LOG_PROBS = (1 << bit for bit in range(7))
"""Bits for the features of the sampler that a row needs. RESTRICTED: some tokens may be forbidden, because of bad words
or because end tokens are not allowed before min_tokens."""


class RowTable:
    """Used only by the thread that starts steps."""

    def __init__(self, num_rows: int, max_blocks: int, filler_block: int) -> None:
        """`filler_block`: id of a block that is never written, which fills a block table after a row's last block."""
        self.num_rows = num_rows
        self.max_blocks = max_blocks
        self.filler_block = filler_block
        self.sequences: list[NewSequence | None] = [None] * num_rows
        self.needs = np.zeros(num_rows, dtype=np.int64)
        """For each row, the bits RANDOM to WANTS_LOG_PROBS."""
        self._block_ids: list[list[int]] = [[] for _ in range(num_rows)]
        self._former_block_ids: list[list[int]] = [[] for _ in range(num_rows)]

    def update(self, scheduled: SchedulerOutput, staging: Staging) -> None:
        """Record a step's new sequences and blocks, and stage the changes for the device: see RowState.begin."""
        places: list[int] = []
        block_ids: list[int] = []
        if scheduled.new_sequences:
            self._stage_placed(scheduled, staging)
            for new in scheduled.new_sequences:
                self._place(new, places, block_ids)
        for work in scheduled.rows:
            if work.new_block_ids:
                held = self._block_ids[work.row]
                first = work.row * self.max_blocks + len(held)
                places += range(first, first + len(work.new_block_ids))
                block_ids += work.new_block_ids
                held += work.new_block_ids
        if places:
            # A row may be placed and grow in one step. An index that occurs twice is harmless: its values are equal.
            staging.add("changed_blocks", np.array(places, dtype=np.int64))
            staging.add("changed_block_ids", np.array(block_ids, dtype=np.int32))

    def block_ids(self, row: int) -> list[int]:
        """Blocks of the sequence that has the row now and of the one that had it before."""
        return self._block_ids[row] + self._former_block_ids[row]

    @staticmethod
    def _stage_placed(scheduled: SchedulerOutput, staging: Staging) -> None:
        starts = {work.row: work.start for work in scheduled.rows}
        rows = [new.row for new in scheduled.new_sequences]
        samplings = [new.sampling_config for new in scheduled.new_sequences]
        staging.add("placed_rows", np.array(rows, dtype=np.int64))
        staging.add("placed_lengths", np.array([starts.get(row, 0) for row in rows], dtype=np.int64))
        # The kernels take the seed's 64 bits as a signed number.
        staging.add("placed_seeds", np.array([s.seed - (s.seed >> 63 << 64) for s in samplings], dtype=np.int64))
        staging.add("placed_top_k", np.array([s.top_k for s in samplings], dtype=np.int32))
        floats = [[getattr(sampling, name) for sampling in samplings] for name in FLOAT_FIELDS]
        staging.add("placed_floats", np.array(floats, dtype=np.float32))

    def _place(self, new: NewSequence, places: list[int], block_ids: list[int]) -> None:
        row, former = new.row, self._block_ids[new.row]
        self._former_block_ids[row] = former
        self._block_ids[row] = list(new.block_ids)
        num_written = max(len(new.block_ids), len(former))
        first = row * self.max_blocks
        places += range(first, first + num_written)
        block_ids += new.block_ids
        block_ids += [self.filler_block] * (num_written - len(new.block_ids))
        self.sequences[row] = new
        self.needs[row] = _needs(new)


def _needs(new: NewSequence) -> int:
    sampling = new.sampling_config
    needs = 0
    if sampling.temperature > 0:
        # Greedy sampling takes the most likely token, which every filter keeps, so it needs no filter.
        needs |= RANDOM
        needs |= TOP_K * (sampling.top_k > 0) | TOP_P * (sampling.top_p < 1) | MIN_P * (sampling.min_p > 0)
    if is_penalised(sampling):
        needs |= PENALISED
    if new.bad_words or (new.end_ids and sampling.min_tokens):
        needs |= RESTRICTED
    if LOG_PROBS in new.outputs:
        needs |= WANTS_LOG_PROBS
    return needs


def is_penalised(sampling: SamplingConfig) -> bool:
    return sampling.repetition_penalty != 1 or sampling.presence_penalty != 0 or sampling.frequency_penalty != 0
