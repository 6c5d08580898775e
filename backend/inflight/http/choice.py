"""One choice of an answer while its tokens arrive: its text, its log probabilities, and how it ended."""

from __future__ import annotations

from collections.abc import Container
from typing import NamedTuple

from inflight.result import FinishReason, NamedTensor, Result
from inflight.text.detokenizer import Detokenizer

FINISH_REASONS = {
    FinishReason.END_ID: "stop",
    FinishReason.STOP_WORDS: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.TIMED_OUT: "length",
}
TIME_OUT = "timeout"
"""The stop reason of an answer that its time has cut."""


class TokenLogProb(NamedTuple):
    """A token with its log probability, and the likeliest tokens in its place."""

    token_id: int
    log_prob: float | None
    """None for the first token of a prompt."""
    top: list[tuple[int, float]]
    """In falling order."""


class Choice:
    """One sequence of one engine request."""

    __slots__ = (
        "_detokenizer",
        "_keeps_ids",
        "_keeps_stop",
        "_stop_ids",
        "_wants_log_probs",
        "finish_reason",
        "index",
        "log_probs",
        "num_tokens",
        "stop_reason",
        "token_ids",
    )

    def __init__(
        self,
        index: int,
        detokenizer: Detokenizer,
        *,
        stop_ids: Container[int] = (),
        keeps_stop: bool = False,
        wants_log_probs: bool = False,
        keeps_ids: bool = False,
    ) -> None:
        """`stop_ids`: end tokens that the request named. `keeps_stop`: whether the text holds what has ended it.
        `wants_log_probs`, `keeps_ids`: whether `log_probs` and `token_ids` are kept."""
        self.index = index
        self.num_tokens = 0
        self.finish_reason = ""
        """Empty until it ends."""
        self.stop_reason: str | int | None = None
        """The stop string or the token of `stop_ids` that has ended it."""
        self.log_probs: list[TokenLogProb] = []
        """Of tokens since they were last taken."""
        self.token_ids: list[int] = []
        """The same of their ids."""
        self._detokenizer = detokenizer
        self._stop_ids = stop_ids
        self._keeps_stop = keeps_stop
        self._wants_log_probs = wants_log_probs
        self._keeps_ids = keeps_ids

    def add(self, result: Result) -> str:
        """The text that new tokens complete. What follows its end is ignored."""
        if self.finish_reason:
            return ""
        token_ids, detokenizer = result.output_token_ids, self._detokenizer
        is_ended = result.finish_reason is FinishReason.END_ID
        num_before = detokenizer.num_tokens
        text = detokenizer.push(token_ids[:-1] if is_ended and not self._keeps_stop else token_ids)
        num_new = len(token_ids)
        if result.is_sequence_final and not detokenizer.is_stopped:
            text += detokenizer.flush()
            self._finish(result)
        elif detokenizer.is_stopped:
            num_new = detokenizer.num_tokens - num_before
        if detokenizer.is_stopped:
            self.finish_reason, self.stop_reason = "stop", detokenizer.stop_string
        self.num_tokens += num_new
        if self._keeps_ids:
            self.token_ids += token_ids[:num_new]
        if self._wants_log_probs:
            self.log_probs += read_log_probs(result, num_new)
        return text

    @property
    def is_plain(self) -> bool:
        """Whether its text is all that is made of its tokens, and they end it only by themselves."""
        return not (self._wants_log_probs or self._keeps_ids or self._detokenizer.may_stop)

    def extend(self, token_ids: list[int]) -> str:
        """The text of tokens that do not end a plain choice."""
        self.num_tokens += len(token_ids)
        return self._detokenizer.push(token_ids)

    def take_token_ids(self) -> list[int]:
        taken, self.token_ids = self.token_ids, []
        return taken

    def take_log_probs(self) -> list[TokenLogProb]:
        taken, self.log_probs = self.log_probs, []
        return taken

    def _finish(self, result: Result) -> None:
        self.finish_reason = FINISH_REASONS[result.finish_reason]
        if result.finish_reason is FinishReason.TIMED_OUT:
            self.stop_reason = TIME_OUT
        elif result.finish_reason is FinishReason.END_ID and result.output_token_ids[-1] in self._stop_ids:
            self.stop_reason = result.output_token_ids[-1]


def read_log_probs(result: Result, count: int) -> list[TokenLogProb]:
    """Of the first `count` tokens of a result."""
    return _joined(result, "", result.output_token_ids[:count], result.log_probs[:count])


def read_prompt_log_probs(result: Result, prompt_ids: list[int]) -> list[TokenLogProb]:
    """Of the prompt's tokens, from the result that brings them; [] if this is another one."""
    tensor = _find(result, "prompt_log_probs")
    if tensor is None:
        return []
    return [TokenLogProb(prompt_ids[0], None, []), *_joined(result, "prompt_", prompt_ids[1:], tensor.array().tolist())]


def _joined(result: Result, prefix: str, token_ids: list[int], log_probs: list[float]) -> list[TokenLogProb]:
    """Tokens with the rows of the tensors of the likeliest tokens, which have at least as many."""
    names, values = _find(result, f"{prefix}top_token_ids"), _find(result, f"{prefix}top_log_probs")
    tops: list[list[tuple[int, float]]] = [[] for _ in token_ids]
    if names is not None and values is not None:
        rows = zip(names.array().tolist(), values.array().tolist(), strict=True)
        tops = [list(zip(ids, numbers, strict=True)) for ids, numbers in rows][: len(token_ids)]
    return list(map(TokenLogProb, token_ids, log_probs, tops))


def _find(result: Result, name: str) -> NamedTensor | None:
    return next((tensor for tensor in result.tensors if tensor.name == name), None)
