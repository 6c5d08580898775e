"""What one sequence of a beam search holds, for readers of the library. Each result replaces the one before."""

from __future__ import annotations

from collections.abc import Callable

from inflight.executor.front.request_output import CompletionOutput
from inflight.executor.front.sequence_output import Seen, SequenceOutput
from inflight.executor.postprocess.messages import Piece
from inflight.result import Result
from inflight.text.detokenizer import Detokenizer


class BeamOutput(SequenceOutput):
    """As SequenceOutput. Any beam may be given up for another, so all of its text and tokens are new at each look."""

    def __init__(self, index: int, make_detokenizer: Callable[[], Detokenizer] | None = None) -> None:
        super().__init__(index)
        self._make_detokenizer = make_detokenizer

    def add(self, result: Result, piece: Piece | None = None) -> None:
        if not self.is_finished:
            self._token_ids, self._log_probs, self._text = [], [], ""
            self._detokenizer = None if self._make_detokenizer is None else self._make_detokenizer()
            super().add(result, piece)

    def look(self, seen: Seen) -> tuple[CompletionOutput, Seen]:
        output, _ = super().look(Seen())
        return output, Seen()
