"""The host's half of drafting: what the draft model computes at a step's beginning, before the network verifies.

Its first pass takes the step's prefills, so that it has the keys and values of every prompt, and of each row that it
drafts for the tokens that it has not seen and the next one. Each later pass takes one more draft of the rows that want
more. Rows that decode without it are not computed: it catches up with them when it drafts for them.

Legend: M rows that it drafts for, those with most drafts first, padding included.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from msgspec import structs

from inflight.runtime.drafts import LAST_SAMPLED, are_drafted
from inflight.runtime.staging import Array, Staging
from inflight.runtime.step_sizes import StepSizes
from inflight.scheduler_output import RowWork

if TYPE_CHECKING:
    from inflight.runtime.step_input import StepInput


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftPasses:
    first: StepInput
    num_rows: list[int]
    """M of each later pass."""


def drafted_works(works: list[RowWork]) -> list[RowWork]:
    """Those that the draft model drafts for, in its order."""
    drafted = [work for work in works if work.num_sampled > 1 and are_drafted(work)]
    return sorted(drafted, key=lambda work: -work.num_tokens)


def first_works(works: list[RowWork], drafted: list[RowWork]) -> list[RowWork]:
    """What the first pass computes."""
    prefills = [structs.replace(work, num_sampled=0) for work in works if work.is_prefill]
    return prefills + [_catch_up(work) for work in drafted]


def _catch_up(work: RowWork) -> RowWork:
    """The row's tokens that the draft model has not seen, and the next one, after which it samples the first draft."""
    is_known = len(work.token_ids) == work.num_tokens
    token_ids = [*work.unseen_token_ids, work.token_ids[0] if is_known else LAST_SAMPLED]
    start = work.start - len(work.unseen_token_ids)
    kept = [(len(work.unseen_token_ids), slot) for index, slot in work.kept_states if index == 0]
    return RowWork(row=work.row, start=start, num_tokens=len(token_ids), token_ids=token_ids, kept_states=kept)


def later_rows(drafted: list[RowWork], sizes: StepSizes) -> list[int]:
    """M of each pass behind the first."""
    lengths = [len(work.drafts) for work in drafted]
    return [sizes.padded(sum(length > number for length in lengths)) for number in range(1, max(lengths, default=0))]


def stage_passes(
    staging: Staging, rows: Array, starts: Array, sampling_rows: Array, drafted: list[RowWork], sizes: StepSizes
) -> None:
    """Send where the first pass begins in each of its `rows`; which of its `sampling_rows` each of the M is; and how
    many drafts that one gets, 0 for padding."""
    staging.add("draft_pass_rows", rows)
    staging.add("draft_pass_starts", starts)
    if not drafted:
        return
    places = {row: place for place, row in enumerate(sampling_rows.tolist())}
    order = np.arange(sizes.padded(len(drafted)), dtype=np.int64)
    lengths = np.zeros_like(order)
    order[: len(drafted)] = [places[work.row] for work in drafted]
    lengths[: len(drafted)] = [len(work.drafts) for work in drafted]
    staging.add("draft_order", order)
    staging.add("draft_lengths", lengths)


def stage_states(staging: Staging, works: list[RowWork], drafted: list[RowWork], sizes: StepSizes) -> None:
    """Send where a draft model that keeps states of sequences keeps them: `draft_kept`, of each pass behind the first
    the slot of each of the M, -1 = none; and the slots of other states that are kept, into which it copies what it
    knows of the row, because it does not compute the token."""
    rows = {work.row for work in drafted}
    carried = [
        (work.row, slot)
        for work in works
        for index, slot in work.kept_states
        if not work.is_prefill and (work.row not in rows or index == len(work.drafts))
    ]
    if carried:
        sources, destinations = zip(*carried, strict=True)
        staging.add("draft_states_from", np.array(sources, dtype=np.int64))
        staging.add("draft_states_to", np.array(destinations, dtype=np.int64))
    num_passes = max((len(work.drafts) for work in drafted), default=0)
    if num_passes:
        kept = np.full((num_passes, sizes.padded(len(drafted))), -1, dtype=np.int32)
        for place, work in enumerate(drafted):
            for index, slot in work.kept_states:
                if 0 < index < len(work.drafts):
                    kept[index, place] = slot
        staging.add("draft_kept", kept.reshape(-1))
