"""The host's record of each row: its blocks and how its tokens are sampled. numpy only; the device has RowState.

A row is a place in the running batch.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from msgspec import structs

from inflight.prompt_tuning import EmbeddingTable
from inflight.runtime.staging import Staging
from inflight.sampling_config import SamplingConfig
from inflight.scheduler_output import LOG_PROBS, NO_BLOCK, NO_SLOT, NewSequence, SchedulerOutput

FLOAT_FIELDS = (
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "initial_top_p",
    "top_p_decay",
    "top_p_min",
    "typical_p",
)
"""Of a row in RowState.floats_FR. `top_p` is the one of the token to come, `initial_top_p` the request's."""

# fmt: off
(
    RANDOM, TOP_K, TOP_P, MIN_P, TOP_P_DECAYS, PENALISED, BIASED, RESTRICTED, NO_REPEATED_NGRAM, WANTS_LOG_PROBS,
    WANTS_TENSORS, TYPICAL_P, HAS_ADAPTER, WEIGHS_DRAFTS, IS_PAIR,
) = (1 << bit for bit in range(15))
# fmt: on
"""Bits for what a row needs, mostly of the sampler. RESTRICTED: some tokens may be forbidden, because of bad words or
because end tokens are not allowed before min_tokens."""


class RowTable:
    """Used only by the thread that starts steps."""

    def __init__(self, num_rows: int, max_blocks: int, filler_block: int, num_groups: int = 1) -> None:
        """`filler_block`: id of a block that is never written, which fills a block table where a row has none.
        `num_groups`: of layers, each of which has blocks of its own."""
        self.num_rows = num_rows
        self.num_groups = num_groups
        self.max_blocks = max_blocks
        self.filler_block = filler_block
        self.sequences: list[NewSequence | None] = [None] * num_rows
        self.needs = np.zeros(num_rows, dtype=np.int64)
        """For each row, the bits RANDOM to IS_PAIR."""
        self.embedding_tables: dict[int, EmbeddingTable] = {}
        """By row, of those whose prompts have tokens of their own and are not yet computed."""
        self.adapters = np.full(num_rows, NO_SLOT, dtype=np.int32)
        """Of each row, the slot of its adapter."""
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
            held = self._block_ids[work.row]
            if work.passed_blocks:
                for place in work.passed_blocks:
                    held[place] = NO_BLOCK
                places += self._entries(work.row, work.passed_blocks)
                block_ids += [self.filler_block] * len(work.passed_blocks)
            if work.new_block_ids:
                places += self._entries(work.row, range(len(held), len(held) + len(work.new_block_ids)))
                block_ids += work.new_block_ids
                held += work.new_block_ids
        if places:
            # A row may be placed and grow in one step. An index that occurs twice is harmless: its values are equal.
            staging.add("changed_blocks", np.array(places, dtype=np.int64))
            staging.add("changed_block_ids", np.array(block_ids, dtype=np.int32))

    def _entries(self, row: int, places: Iterable[int]) -> list[int]:
        """Where in RowState.block_tables the blocks at these places of a row are, of which each group has every
        `num_groups`-th."""
        first, num_groups = row * self.num_groups * self.max_blocks, self.num_groups
        return [first + place % num_groups * self.max_blocks + place // num_groups for place in places]

    def block_ids(self, row: int) -> list[int]:
        """Blocks of the sequence that has the row now and of the one that had it before."""
        return [block_id for block_id in self._block_ids[row] + self._former_block_ids[row] if block_id != NO_BLOCK]

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
        staging.add("placed_top_p_reset", np.array([s.top_p_reset_ids for s in samplings], dtype=np.int64))
        floats = [_floats(new) for new in scheduled.new_sequences]
        staging.add("placed_floats", np.array(floats, dtype=np.float32).T.copy())

    def _place(self, new: NewSequence, places: list[int], block_ids: list[int]) -> None:
        row, former = new.row, self._block_ids[new.row]
        self._former_block_ids[row] = former
        self._block_ids[row] = list(new.block_ids)
        num_written = max(len(new.block_ids), len(former))
        places += self._entries(row, range(num_written))
        block_ids += [self.filler_block if block_id == NO_BLOCK else block_id for block_id in new.block_ids]
        block_ids += [self.filler_block] * (num_written - len(new.block_ids))
        self.sequences[row] = new
        self.needs[row] = _needs(new)
        self.embedding_tables.pop(row, None)
        if new.embedding_table is not None:
            # Held apart, because a table is large and of no use once the prompt is computed.
            self.embedding_tables[row] = new.embedding_table
            self.sequences[row] = structs.replace(new, embedding_table=None)
        self.adapters[row] = new.adapter_slot


def _needs(new: NewSequence) -> int:
    sampling = new.sampling_config
    needs = 0
    if sampling.temperature > 0:
        # Greedy sampling takes the most likely token, which every filter keeps, so it needs no filter.
        needs |= RANDOM
        needs |= TOP_K * (sampling.top_k > 0) | TOP_P * (sampling.top_p < 1) | MIN_P * (sampling.min_p > 0)
        needs |= TYPICAL_P * (sampling.typical_p < 1)
        if top_p_decays(sampling):
            needs |= TOP_P | TOP_P_DECAYS
    if is_penalised(sampling):
        needs |= PENALISED
    if is_biased(sampling):
        needs |= BIASED
    if sampling.no_repeat_ngram_size:
        needs |= NO_REPEATED_NGRAM
    if new.bad_words or (new.end_ids and sampling.min_tokens):
        needs |= RESTRICTED
    if LOG_PROBS in new.outputs:
        needs |= WANTS_LOG_PROBS
    if set(new.outputs) - {LOG_PROBS}:
        needs |= WANTS_TENSORS
    if new.adapter_slot != NO_SLOT:
        needs |= HAS_ADAPTER
    if new.weighed_drafts is not None:
        needs |= WEIGHS_DRAFTS
    if new.second_text_start:
        needs |= IS_PAIR
    return needs


def is_penalised(sampling: SamplingConfig) -> bool:
    return sampling.repetition_penalty != 1 or sampling.presence_penalty != 0 or sampling.frequency_penalty != 0


def is_biased(sampling: SamplingConfig) -> bool:
    return bool(sampling.logit_bias or sampling.embedding_bias)


def needs_history(new: NewSequence) -> bool:
    """Whether the device must know all tokens of the row."""
    return bool(new.bad_words or new.sampling_config.no_repeat_ngram_size)


def top_p_decays(sampling: SamplingConfig) -> bool:
    return sampling.top_p_decay < 1 or sampling.top_p_min > sampling.top_p


def current_top_p(new: NewSequence) -> np.float32:
    """top_p of the token to come, after the generated ones that are known.

    In float32 and one token after the other, as RowState.end does it on the device: a row that starts again, after a
    pause or on other ranks, must filter with the same number to the last bit.
    """
    sampling = new.sampling_config
    initial, decay, least = map(np.float32, (sampling.top_p, sampling.top_p_decay, sampling.top_p_min))
    top_p = initial
    for token_id in new.token_ids[new.num_prompt_tokens :]:
        top_p = initial if token_id == sampling.top_p_reset_ids else np.maximum(top_p * decay, least)
        if top_p == least and sampling.top_p_reset_ids < 0:
            break
    return top_p


def _floats(new: NewSequence) -> list[float]:
    """Values of FLOAT_FIELDS."""
    sampling = new.sampling_config
    top_p = current_top_p(new) if top_p_decays(sampling) else sampling.top_p
    values = {"top_p": float(top_p), "initial_top_p": sampling.top_p}
    return [values[name] if name in values else getattr(sampling, name) for name in FLOAT_FIELDS]
