"""Log probabilities as JSON: lists of tokens for chats, parallel lists for completions."""

from __future__ import annotations

from typing import Any

from inflight.http.choice import TokenLogProb
from inflight.text.token_texts import TokenTexts

LOWEST = -9999.0
"""Stands for minus infinity, which JSON does not have."""


class LogProbWriter:
    def __init__(self, texts: TokenTexts, *, as_ids: bool = False, shows_special: bool = False) -> None:
        """`as_ids`: whether tokens are shown as "token_id:17", which no two share. `shows_special`: whether the text
        holds special tokens."""
        self._texts, self._as_ids, self._shows_special = texts, as_ids, shows_special

    def of_chat(self, entries: list[TokenLogProb]) -> dict[str, Any]:
        content = [
            {
                **self._token(entry.token_id, entry.log_prob),
                "top_logprobs": [self._token(token_id, log_prob) for token_id, log_prob in entry.top],
            }
            for entry in entries
        ]
        return {"content": content}

    def of_completion(self, entries: list[TokenLogProb], offset: int) -> dict[str, Any]:
        """`offset`: characters of the choice's text before these tokens."""
        offsets = []
        for entry in entries:
            offsets.append(offset)
            offset += self._length(entry.token_id)
        return {
            "tokens": [self._name(entry.token_id) for entry in entries],
            "token_logprobs": [None if entry.log_prob is None else max(entry.log_prob, LOWEST) for entry in entries],
            "top_logprobs": [self._top(entry) for entry in entries],
            "text_offset": offsets,
        }

    def num_chars(self, entries: list[TokenLogProb]) -> int:
        """By how much `of_completion` has counted on."""
        return sum(self._length(entry.token_id) for entry in entries)

    def _length(self, token_id: int) -> int:
        """Characters of the text that a token takes."""
        is_hidden = self._texts.is_special(token_id) and not self._shows_special
        return 0 if is_hidden else len(self._texts.text(token_id))

    def _top(self, entry: TokenLogProb) -> dict[str, float] | None:
        """The likeliest, and the token itself. Of tokens with the same text the first stands there."""
        if entry.log_prob is None:
            return None
        found: dict[str, float] = {}
        for token_id, log_prob in [*entry.top, (entry.token_id, entry.log_prob)]:
            found.setdefault(self._name(token_id), max(log_prob, LOWEST))
        return found

    def _token(self, token_id: int, log_prob: float | None) -> dict[str, Any]:
        value = LOWEST if log_prob is None else max(log_prob, LOWEST)
        return {"token": self._name(token_id), "logprob": value, "bytes": list(self._texts.data(token_id))}

    def _name(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self._as_ids else self._texts.text(token_id)
