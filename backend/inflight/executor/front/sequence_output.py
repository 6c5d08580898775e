"""One sequence of a request as it grows in the caller's process: tokens, and text made of them when it is needed.

Text is made when somebody looks, on the thread that looks; only a sequence with stop strings is read as it comes,
because they may end it. Or it comes with the tokens, from a postprocessing worker. Takes no lock and knows no readers
but for the place up to which each has seen.
"""

from __future__ import annotations

from typing import NamedTuple

from inflight.executor.front.request_output import CompletionOutput
from inflight.executor.postprocess.messages import NOT_STOPPED, Piece
from inflight.result import FinishReason, Result
from inflight.text.detokenizer import Detokenizer


class Seen(NamedTuple):
    """How much of a sequence a reader has had."""

    num_tokens: int = 0
    num_chars: int = 0


class SequenceOutput:
    """Written by one thread and read by others, which must not do so at the same time."""

    def __init__(self, index: int, detokenizer: Detokenizer | None = None, *, has_stop_strings: bool = False) -> None:
        """Without a `detokenizer` there is no text."""
        self.is_finished = False
        """Nothing will be added."""
        self._index = index
        self._detokenizer = detokenizer
        self._has_stop_strings = has_stop_strings
        self._token_ids: list[int] = []
        self._log_probs: list[float] = []
        self._cumulative_logprob = 0.0
        self._finish_reason = FinishReason.NOT_FINISHED
        self._decoding_iter = 0
        self._text = ""
        self._is_flushed = False

    def add(self, result: Result, piece: Piece | None = None) -> None:
        """Take new tokens, and the `piece` of text that they complete if this sequence has no detokenizer. What follows
        a stop string is dropped."""
        if self.is_finished:
            return
        self._token_ids += result.output_token_ids
        self._log_probs += result.log_probs
        self._cumulative_logprob = result.cum_log_prob
        self._finish_reason = result.finish_reason
        self.is_finished = result.is_sequence_final or result.is_final
        self._decoding_iter = result.decoding_iter
        if piece is not None:
            self._text += piece.text
            if piece.stopped_after != NOT_STOPPED:
                self._stop_after(piece.stopped_after)
        if self._has_stop_strings:
            self._read()

    def look(self, seen: Seen) -> tuple[CompletionOutput, Seen]:
        """A copy of what has come, for a reader who has `seen` that much of it, and how much it has seen now."""
        self._read()
        output = CompletionOutput(
            index=self._index,
            text=self._text,
            text_diff=self._text[seen.num_chars :],
            token_ids=list(self._token_ids),
            token_ids_diff=self._token_ids[seen.num_tokens :],
            log_probs=list(self._log_probs),
            cumulative_logprob=self._cumulative_logprob,
            finish_reason=self._finish_reason,
            decoding_iter=self._decoding_iter,
        )
        return output, Seen(len(self._token_ids), len(self._text))

    def _read(self) -> None:
        """Make text of the tokens that came since the last time."""
        detokenizer = self._detokenizer
        if detokenizer is None or self._is_flushed:
            return
        self._text += detokenizer.push(self._token_ids[detokenizer.num_tokens :])
        if self.is_finished and not detokenizer.is_stopped:
            self._text += detokenizer.flush()
        self._is_flushed = self.is_finished
        if detokenizer.is_stopped:
            self._stop_after(detokenizer.num_tokens)

    def _stop_after(self, num_tokens: int) -> None:
        self._cumulative_logprob -= sum(self._log_probs[num_tokens:])
        del self._token_ids[num_tokens:], self._log_probs[num_tokens:]
        self._finish_reason = FinishReason.STOP_WORDS
        self.is_finished = self._is_flushed = True
