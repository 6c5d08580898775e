"""Texts that are to be continued, as tokens. All the work that grows with a prompt's text is done here."""

from __future__ import annotations

from inflight.asking.ask import Prompt, TextPair
from inflight.asking.refusal import Kind, Refusal, context_too_long
from inflight.request_limits import RequestLimits
from inflight.text.tokenizer import Tokenizer


class PromptEncoder:
    """Safe to use from several threads."""

    def __init__(self, tokenizer: Tokenizer, max_text_bytes: int | None = None) -> None:
        """`max_text_bytes`: None = the length of texts has been checked."""
        self._tokenizer = tokenizer
        self._max_text_bytes = max_text_bytes

    def encode(
        self, prompt: Prompt, limits: RequestLimits, *, add_special_tokens: bool = True, is_cut: bool = False
    ) -> list[int]:
        """`is_cut`: whether what is too long is cut at its end, and not refused. Raises Refusal: a text that cannot fit
        is refused before it is tokenised, which would take long."""
        if isinstance(prompt, TextPair):
            return self.encode_pair(prompt, limits)[0]
        if not isinstance(prompt, str):
            return prompt
        if not prompt:
            raise Refusal("prompt", "{0} is empty: give at least one character or token")
        prompt = self._beginning(prompt, limits.max_input_len) if is_cut else prompt
        self._check_length(prompt, limits)
        encode = self._tokenizer.encode if add_special_tokens else self._tokenizer.encode_plain
        return encode(prompt)

    def encode_pair(self, pair: TextPair, limits: RequestLimits, *, is_cut: bool = False) -> tuple[list[int], int]:
        """With the place where the second text begins, see Tokenizer. `is_cut`: see `encode`, of the second text.
        Raises Refusal."""
        if not pair.first or not pair.second:
            raise Refusal("prompt", "{0} holds an empty text: give at least one character")
        second = self._beginning(pair.second, limits.max_input_len) if is_cut else pair.second
        for text in (pair.first, second):
            self._check_length(text, limits)
        return self._tokenizer.encode_pair(pair.first, second)

    def encode_beginning(self, text: str, limits: RequestLimits, most: int) -> list[int]:
        """The leading `most` tokens of a text, at most `max_input_len`; of an encoder's the last one is that which ends
        it. Raises Refusal."""
        token_ids = self.encode(self._beginning(text, most), limits)
        if limits.pooled and len(token_ids) > most:
            return [*token_ids[: most - 1], token_ids[-1]]
        return token_ids[:most]

    def _beginning(self, text: str, most: int) -> str:
        """Without what stands behind the first `most` tokens for sure."""
        per_token = self._tokenizer.max_bytes_per_token
        if per_token is None:
            return text
        return text.encode("utf-8", "surrogatepass")[: most * per_token].decode("utf-8", "ignore")

    def _check_length(self, text: str, limits: RequestLimits) -> None:
        if self._max_text_bytes is None:
            return
        num_bytes = len(text.encode("utf-8", "surrogatepass"))
        if num_bytes > self._max_text_bytes:
            sentence = f"the prompt has {num_bytes} bytes, more than max_text_bytes {self._max_text_bytes}"
            raise Refusal("prompt", sentence, kind=Kind.TOO_LARGE)
        most = self._tokenizer.max_bytes_per_token
        if most is not None and num_bytes > most * limits.max_input_len:
            raise context_too_long(limits.max_seq_len, -(-num_bytes // most))
