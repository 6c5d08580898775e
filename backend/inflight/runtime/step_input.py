"""One step's numbers: a SchedulerOutput laid out as arrays, then as tensors on the device. Knows no network.

Legend: T tokens of the step, N decoding rows, P prefilling rows, S rows that sample, in batch order.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from inflight.runtime.row_table import RowTable
from inflight.runtime.sampling_input import SamplingInput, SamplingPlan
from inflight.runtime.staging import Array, Staging
from inflight.scheduler_output import NewSequence, ScheduledSequence, SchedulerOutput


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInput:
    """Everything the device half of a step needs."""

    new_sequences: list[NewSequence]
    scrubbed_block_ids: list[int]
    """Blocks to be rid of NaN and infinity before anything else."""
    changed_blocks: Tensor | None
    """int64, flat places of the block table that change, and int32, the block ids they take."""
    changed_block_ids: Tensor | None
    token_ids_T: Tensor
    """int64; the first N are filled in on the device."""
    positions_T: Tensor
    slot_mapping_T: Tensor
    rows: Tensor
    """int64 (N + P), the row of each sequence of the step."""
    seq_lens: Tensor
    """int32 (N + P)."""
    prefill_start_loc: Tensor
    """int32 (P + 1)."""
    num_decodes: int
    num_prefills: int
    decode_blocks: int
    """Blocks of the longest decoding row."""
    prefill_blocks: int
    max_prefill_len: int
    sampling_tokens_S: Tensor | None
    """int64, which of the T tokens sample; None = all."""
    sampling: SamplingInput | None
    """None = no row samples."""


def prepare_step(
    scheduled: SchedulerOutput,
    table: RowTable,
    block_size: int,
    vocab_size: int,
    device: torch.device,
    scrubbed_block_ids: list[int],
) -> StepInput:
    """Bring `table` up to date, lay the step out and send it to `device` in one copy a dtype, without waiting."""
    staging = Staging(device)
    changed_blocks, changed_block_ids = table.update(scheduled)
    if changed_blocks.size:
        staging.add("changed_blocks", changed_blocks)
        staging.add("changed_block_ids", changed_block_ids)
    decodes, prefills = scheduled.decodes, scheduled.prefills
    parts = [*decodes, *prefills]
    rows = np.array([part.row for part in parts], dtype=np.int64)
    starts = np.array([part.start for part in parts], dtype=np.int64)
    counts = np.array([part.num_tokens for part in parts], dtype=np.int64)
    seq_lens = starts + counts
    num_decodes = len(decodes)
    ends = np.cumsum(counts)
    staging.add("rows", rows)
    staging.add("seq_lens", seq_lens.astype(np.int32))
    staging.add("prefill_start_loc", _start_loc(counts[num_decodes:]))

    # A token's place in its sequence: its place in the step, less its sequence's place in the step, plus the start.
    positions = np.arange(ends[-1] if parts else 0) - np.repeat(ends - counts - starts, counts)
    token_rows = np.repeat(rows, counts)
    blocks = table.block_table[token_rows, positions // block_size].astype(np.int64)
    staging.add("positions", positions)
    staging.add("slot_mapping", blocks * block_size + positions % block_size)
    staging.add("token_ids", _token_ids(prefills, num_decodes, len(positions)))

    samples = np.array([part.samples for part in parts], dtype=bool)
    sampling_tokens = ends[samples] - 1
    if len(sampling_tokens) < len(positions):
        staging.add("sampling_tokens", sampling_tokens)
    plan = SamplingPlan(rows[samples], seq_lens[samples], table)
    plan.stage(staging, vocab_size)
    arrays = staging.ship()
    return StepInput(
        new_sequences=scheduled.new_sequences,
        scrubbed_block_ids=scrubbed_block_ids,
        changed_blocks=arrays.get("changed_blocks"),
        changed_block_ids=arrays.get("changed_block_ids"),
        token_ids_T=arrays["token_ids"],
        positions_T=arrays["positions"],
        slot_mapping_T=arrays["slot_mapping"],
        rows=arrays["rows"],
        seq_lens=arrays["seq_lens"],
        prefill_start_loc=arrays["prefill_start_loc"],
        num_decodes=num_decodes,
        num_prefills=len(prefills),
        decode_blocks=_longest(seq_lens[:num_decodes], block_size),
        prefill_blocks=_longest(seq_lens[num_decodes:], block_size),
        max_prefill_len=int(counts[num_decodes:].max(initial=0)),
        sampling_tokens_S=arrays.get("sampling_tokens"),
        sampling=plan.finish(arrays),
    )


def _start_loc(counts: Array) -> Array:
    start_loc = np.zeros(len(counts) + 1, dtype=np.int32)
    np.cumsum(counts, out=start_loc[1:])
    return start_loc


def _token_ids(prefills: list[ScheduledSequence], num_decodes: int, num_tokens: int) -> Array:
    """Prompt tokens behind room for the tokens that only the device knows."""
    token_ids = np.zeros(num_tokens, dtype=np.int64)
    place = num_decodes
    for part in prefills:
        assert part.token_ids is not None, "a prefill names its tokens"
        token_ids[place : place + part.num_tokens] = part.token_ids
        place += part.num_tokens
    return token_ids


def _longest(seq_lens: Array, block_size: int) -> int:
    return -(-int(seq_lens.max(initial=0)) // block_size)
