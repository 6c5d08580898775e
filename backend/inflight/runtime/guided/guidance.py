"""Which rows follow grammars, and their masks: one on every rank, with the outputs on the leader alone."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from inflight.distributed.rank_group import RankGroup
from inflight.runtime.drafts import num_kept
from inflight.runtime.guided.grammars import Grammars, GrammarState
from inflight.runtime.guided.outputs import Mask, Output, Work
from inflight.runtime.guided.token_mask import StepMask
from inflight.runtime.row_companions import AccompaniedRow, RowCompanions
from inflight.scheduler_output import NewSequence

NO_GRAMMAR = "the grammar of this request is not there: guided decoding is not supported by this engine"


@dataclass(frozen=True, slots=True)
class Guide:
    """What a row follows; on the leader with its output."""

    output: Output | None = None

    def wait(self, count: int) -> list[Mask]:
        return [Mask(b"", NO_GRAMMAR)] * count if self.output is None else self.output.wait(count)


GuidedRow = AccompaniedRow[Guide]


class StepMasks(msgspec.Struct, frozen=True):
    """What the leader tells the other ranks in each step with guided rows: an entry of `bits` for each place in which
    one samples, row by row."""

    bits: list[bytes]
    """Empty = all tokens: for a place that has no mask."""
    errors: dict[int, str]
    """Index of `bits` -> sentence, of places whose token cannot be used."""
    forced: dict[int, list[int]]
    """Row -> tokens."""


_masks = msgspec.msgpack.Decoder(StepMasks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Guided:
    """What a step's grammars say."""

    mask: StepMask
    refused: dict[int, str]
    """Place -> sentence, for a place whose token cannot be used: its row cannot go on, unless this is behind a draft
    that is not accepted."""
    forced: dict[int, list[int]]
    """Row -> what it most likely samples next, from this step on, because its grammar leaves the text no choice. Only
    where that was not known before."""


class Guidance:
    def __init__(self, group: RankGroup, grammars: Grammars | None, vocab_size: int) -> None:
        """`grammars`: on the leader; None = it has none, so every row with a grammar is refused."""
        self._group = group
        self._grammars = grammars
        self._everything = b"\xff" * (-(-vocab_size // 32) * 4)
        self._begun: list[Work] = []  # of outputs that the step being launched begins
        self._rows = RowCompanions(self._guide)

    def begin(
        self, new_sequences: list[NewSequence], sampling_rows: list[int], drafts: dict[int, list[int]]
    ) -> list[GuidedRow]:
        """See RowCompanions."""
        rows = self._rows.begin(new_sequences, sampling_rows, drafts)
        work, self._begun = self._begun, []
        for each in rows:
            if each.companion.output is not None:
                more = each.companion.output.begin_step(each.drafts)
                work += [] if more is None else [more]
        self._submit(work)
        return rows

    def find(self, rows: list[GuidedRow]) -> Guided:
        """The masks of a step, and what comes with them, once they are found. Collective."""
        if self._group.rank == 0:
            of_rows = [each.companion.wait(1 + len(each.drafts)) for each in rows]
            masks = [mask for found in of_rows for mask in found]
            firsts = zip(rows, (found[0] for found in of_rows), strict=True)
            told = StepMasks(
                bits=[mask.bits for mask in masks],
                errors={index: mask.error for index, mask in enumerate(masks) if mask.error},
                forced={each.row: mask.forced for each, mask in firsts if mask.forced},
            )
            if self._group.size > 1:
                self._group.broadcast(msgspec.msgpack.encode(told))
        else:
            told = _masks.decode(self._group.broadcast(None))
        places = [place for each in rows for place in each.places]
        return Guided(
            mask=StepMask.of(places, [bits or self._everything for bits in told.bits]),
            refused={places[index]: error for index, error in told.errors.items()},
            forced=told.forced,
        )

    def advance(self, rows: list[GuidedRow], token_ids: list[int]) -> None:
        """Take in the tokens of a step, by place; the masks of the step after it are computed from now on."""
        work = []
        for each in rows:
            if each.companion.output is not None:
                sampled = token_ids[each.place : each.place + 1 + len(each.drafts)]
                work.append(each.companion.output.advance(sampled[: num_kept(each.drafts, sampled)]))
        self._submit(work)

    def _guide(self, new: NewSequence) -> Guide | None:
        if new.guided_decoding_params is None:
            return None
        grammar = None if self._grammars is None else self._grammars.find(new.guided_decoding_params)
        if self._grammars is None or grammar is None or grammar.state is not GrammarState.READY:
            return Guide()
        output = self._grammars.start(grammar, new.end_ids)
        self._begun.append(output.begin(new.token_ids[new.num_prompt_tokens :]))
        return Guide(output)

    def _submit(self, work: list[Work]) -> None:
        if self._grammars is not None and work:
            self._grammars.submit(work)
