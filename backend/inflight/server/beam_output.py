"""What one sequence of a beam search holds, on its way to the client. Each result replaces the one before."""

from __future__ import annotations

from collections.abc import Callable

from inflight.result import FinishReason, Result
from inflight.server.sequence_output import Prompt, SequenceOutput
from inflight.server.tensors.chunk import Chunk
from inflight.text.detokenizer import Detokenizer


class BeamOutput(SequenceOutput):
    """As SequenceOutput, but each chunk holds everything: any beam may be given up for another. Tokens become text only
    when a chunk is taken."""

    def __init__(self, index: int, make_detokenizer: Callable[[], Detokenizer], echo: Prompt | None) -> None:
        super().__init__(index, make_detokenizer(), None)
        self._make_detokenizer = make_detokenizer
        self._echo = echo
        self._latest: Result | None = None

    def has_something_to_show(self, waits_for_text: bool) -> bool:
        return self._latest is not None

    def add(self, result: Result) -> None:
        """Forget what was not delivered yet for `result`, which holds more."""
        if self.is_finished:
            return
        self._latest = result
        self.num_tokens = len(result.output_token_ids)
        if result.is_sequence_final:
            self.finish_reason = result.finish_reason or FinishReason.LENGTH

    def take_chunk(self, num_input_tokens: int, unfinished: str) -> Chunk:
        result, self._latest = self._latest, None
        self.has_streamed = self.has_streamed or not self.is_finished
        self.is_delivered = self.is_finished
        whole = SequenceOutput(self._index, self._make_detokenizer(), self._echo)
        if result is not None:
            whole.add(result)
        return whole.take_chunk(num_input_tokens, self.finish_reason.wire or unfinished)
