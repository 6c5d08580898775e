"""How a step verifies drafts: tokens that the host has guessed, behind a row's next token.

Each of the row's tokens takes a place of its own in the batch, as if it were a row that decodes: with the same blocks,
each with one token more before it. All keys and values of a layer are written before its attention, so that a place
finds those of the tokens before it in the cache. It is computed by the same kernels as without drafts, beside more
rows, and samples with the randomness of its own position. Then drafts are accepted as long as each equals what was
sampled in the place before.

Drafts that the draft model makes are on the device only. Until they come to the host with the step's results, the host
names them by number (`number_drafts`); the device puts each where its number stands (see DraftModel).

The host finds out what is accepted (`accepted`), so the device does not know how long the row is now: the host sends
the length and the token with the row's next work. What was written behind the accepted drafts is overwritten by it.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from msgspec import structs

from inflight.runtime.row_table import PENALISED, RowTable, needs_history
from inflight.runtime.staging import Array, Staging
from inflight.scheduler_output import DRAFTED, RowWork, SchedulerOutput

LAST_SAMPLED = -1
"""Stands for the token that the row sampled last, whose id only the device knows."""


def find_drafts(works: list[RowWork], max_places: int) -> dict[int, list[int]]:
    """Row -> drafts that it verifies. Raises ValueError for rows that sample several tokens in another way, or if the
    step has more places than the batch."""
    drafted = [work for work in works if work.num_sampled > 1]
    if not drafted:
        return {}
    for work in drafted:
        if work.num_sampled != work.num_tokens or work.is_prefill:
            raise ValueError(f"row {work.row} samples {work.num_sampled} tokens, which are not a token and its drafts")
    num_places = len(works) + sum(work.num_tokens - 1 for work in drafted)
    if num_places > max_places:
        raise ValueError(f"rows and drafts take {num_places} places of a batch of {max_places}")
    return {work.row: work.drafts for work in drafted}


def are_drafted(work: RowWork) -> bool:
    """Whether the draft model makes the row's drafts."""
    return bool(work.token_ids) and work.token_ids[-1] == DRAFTED


def number_drafts(works: list[RowWork], rows: list[int], width: int) -> list[RowWork]:
    """The works, with the drafts of the draft model numbered: token id DRAFTED - n stands for the step's draft n.

    `rows`: those that it drafts for, in its order; `width`: drafts that each of its passes makes, padding included.
    """
    first = {row: place for place, row in enumerate(rows)}
    numbered: list[RowWork] = []
    for work in works:
        if work.row in first:
            drafts = [DRAFTED - first[work.row] - number * width for number in range(len(work.drafts))]
            known = work.token_ids[: len(work.token_ids) - len(drafts)]
            work = structs.replace(work, token_ids=[*known, *drafts])
        numbered.append(work)
    return numbered


def fill_in(drafts: dict[int, list[int]], made: list[int]) -> None:
    """Replace numbers by the drafts that the draft model has made."""
    for row, tokens in drafts.items():
        drafts[row] = [made[DRAFTED - token] if token <= DRAFTED else token for token in tokens]


def spread(works: list[RowWork]) -> tuple[list[RowWork], Array]:
    """The works, those with drafts as one for each token; and how many tokens its row brings before each."""
    places: list[RowWork] = []
    offsets: list[int] = []
    for work in works:
        if work.num_sampled <= 1:
            places.append(work)
            offsets.append(0)
            continue
        known = [[token] for token in work.token_ids]
        for offset, token_ids in enumerate(known if len(known) == work.num_tokens else [[], *known]):
            place = RowWork(
                row=work.row,
                start=work.start + offset,
                num_tokens=1,
                token_ids=token_ids,
                is_chosen=bool(token_ids),
                kept_states=[(0, slot) for index, slot in work.kept_states if index == offset],
            )
            places.append(place)
            offsets.append(offset)
    return places, np.array(offsets, dtype=np.int64)


def stage_lengths(staging: Staging, works: list[RowWork], uncertain_rows: set[int]) -> None:
    """Send the length of each row that is among `uncertain_rows`, and take it out of there."""
    found = [work for work in works if work.row in uncertain_rows]
    if not found:
        return
    uncertain_rows.difference_update(work.row for work in found)
    staging.add("known_rows", np.array([work.row for work in found], dtype=np.int64))
    staging.add("known_lengths", np.array([work.start for work in found], dtype=np.int64))


def stage_drafts(staging: Staging, table: RowTable, works: list[RowWork]) -> None:
    """Send the drafts of rows whose history decides what may be sampled, to be written there before the step samples.

    Behind the accepted ones later tokens overwrite them, before anything reads there.
    """
    rows: list[int] = []
    positions: list[int] = []
    tokens: list[int] = []
    for work in works:
        sequence = table.sequences[work.row]
        if work.num_sampled > 1 and sequence is not None and needs_history(sequence):
            first = work.start + 1
            rows += [work.row] * len(work.drafts)
            positions += range(first, first + len(work.drafts))
            tokens += work.drafts
    if rows:
        staging.add("draft_rows", np.array(rows, dtype=np.int64))
        staging.add("draft_positions", np.array(positions, dtype=np.int64))
        staging.add("draft_tokens", np.array(tokens, dtype=np.int64))


def stage_counted(staging: Staging, table: RowTable, sampling_rows: Array, drafts: dict[int, list[int]]) -> None:
    """Send, for rows with penalties, which drafts count as output in the place of each of their tokens."""
    places: list[int] = []
    tokens: list[int] = []
    num_before: dict[int, int] = {}
    for place, row in enumerate(sampling_rows.tolist()):
        if row in drafts and table.needs[row] & PENALISED:
            before = num_before.get(row, 0)
            num_before[row] = before + 1
            places += [place] * before
            tokens += drafts[row][:before]
    if places:
        staging.add("counted_places", np.array(places, dtype=np.int64))
        staging.add("counted_tokens", np.array(tokens, dtype=np.int64))


def stage_rejected(staging: Staging, scheduled: SchedulerOutput, rejected: dict[int, list[int]]) -> None:
    """Send the tokens that rows with penalties sampled behind their accepted drafts, to be counted no longer, and take
    them out of `rejected` (row -> tokens). A row that is placed anew has new counts."""
    for new in scheduled.new_sequences:
        rejected.pop(new.row, None)
    found = [(row, token) for row in [work.row for work in scheduled.rows] for token in rejected.pop(row, [])]
    if found:
        rows, tokens = zip(*found, strict=True)
        staging.add("rejected_rows", np.array(rows, dtype=np.int64))
        staging.add("rejected_tokens", np.array(tokens, dtype=np.int64))


def accepted(
    drafts: dict[int, list[int]], rows: list[int], order: Iterable[int], token_ids: list[int]
) -> list[tuple[list[int], list[int]]]:
    """For each row that samples, in the order of the step's answers: its places, and those of them whose tokens are
    kept. `rows` and `token_ids` of each place, as the batch has them; `order`: the places in the order of the answers.
    """
    places, found, start = list(order), [], 0
    while start < len(places):
        guessed = drafts.get(rows[places[start]], [])
        own = places[start : start + 1 + len(guessed)]
        start += len(own)
        found.append((own, own[: num_kept(guessed, [token_ids[place] for place in own])]))
    return found


def num_kept(drafts: list[int], sampled: list[int]) -> int:
    """How many of the tokens that a row has sampled are its next ones: the first, and those behind accepted drafts."""
    for count, (draft, token_id) in enumerate(zip(drafts, sampled, strict=False), 1):
        if draft != token_id:
            return count
    return len(sampled)
