"""Which rows follow grammars, and their masks: one on every rank, with the matchers on the leader alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from inflight.distributed.rank_group import RankGroup
from inflight.runtime.guided.grammar import CRASHED, Grammar, Matcher
from inflight.runtime.guided.grammars import Grammars
from inflight.runtime.guided.messages import Mask
from inflight.runtime.guided.token_mask import StepMask
from inflight.runtime.row_companions import AccompaniedRow, RowCompanions
from inflight.scheduler_output import NewSequence


@dataclass(frozen=True, slots=True)
class Guide:
    """What a row follows; on the leader with its matcher."""

    grammar: Grammar | None = None
    matcher: Matcher | None = None

    def advance(self, token_id: int) -> None:
        if self.grammar is not None and self.matcher is not None:
            self.grammar.advance(self.matcher, token_id)

    def wait(self) -> Mask:
        if self.grammar is None or self.matcher is None:
            return Mask(0, b"", CRASHED)
        return self.grammar.wait(self.matcher)

    def close(self) -> None:
        if self.grammar is not None and self.matcher is not None:
            self.grammar.close_matcher(self.matcher)


GuidedRow = AccompaniedRow[Guide]


class StepMasks(msgspec.Struct, frozen=True):
    """What the leader tells the other ranks in each step with guided rows, one entry for each."""

    bits: list[bytes]
    """All tokens for a row with an error."""
    errors: list[str]
    """Sentences; empty for a row with a mask."""


_masks = msgspec.msgpack.Decoder(StepMasks)


class Guidance:
    def __init__(self, group: RankGroup, grammars: Grammars | None, vocab_size: int) -> None:
        """`grammars`: on the leader; None = it has none, so every row with a grammar is refused."""
        self._group = group
        self._grammars = grammars
        self._everything = b"\xff" * (-(-vocab_size // 32) * 4)
        self._rows = RowCompanions(self._guide, Guide.close)

    def begin(self, new_sequences: list[NewSequence], sampling_rows: list[int]) -> list[GuidedRow]:
        """See RowCompanions."""
        return self._rows.begin(new_sequences, sampling_rows)

    def mask(self, rows: list[GuidedRow]) -> tuple[StepMask, dict[int, str]]:
        """The masks of a step, and row -> sentence for those that have none. Collective.

        Waits for the grammars, each within the limits of its time.
        """
        if self._group.rank == 0:
            masks = [each.companion.wait() for each in rows]
            told = StepMasks(
                bits=[self._everything if mask.error else mask.bits for mask in masks],
                errors=[mask.error for mask in masks],
            )
            if self._group.size > 1:
                self._group.broadcast(msgspec.msgpack.encode(told))
        else:
            told = _masks.decode(self._group.broadcast(None))
        refused = {each.row: error for each, error in zip(rows, told.errors, strict=True) if error}
        return StepMask.of([each.place for each in rows], told.bits), refused

    def advance(self, rows: list[GuidedRow], token_ids: Sequence[int]) -> None:
        """Take in the tokens of a step, by place; the masks of the step after it are computed from now on."""
        for each in rows:
            each.companion.advance(token_ids[each.place])
        for grammar in {id(each.companion.grammar): each.companion.grammar for each in rows}.values():
            if grammar is not None:
                grammar.send()

    def _guide(self, new: NewSequence) -> Guide | None:
        if new.guided_decoding_params is None:
            return None
        grammar = None if self._grammars is None else self._grammars.find(new.guided_decoding_params)
        if grammar is None:
            return Guide()
        return Guide(grammar, grammar.make_matcher(new.token_ids[new.num_prompt_tokens :], new.end_ids))
