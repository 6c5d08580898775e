"""Texts that are to be continued, as tokens. All the work that grows with a prompt's text is done here."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from inflight.asking.ask import Illustrated, Prompt, TextPair
from inflight.asking.refusal import Kind, Refusal, context_too_long
from inflight.request_limits import RequestLimits
from inflight.text.tokenizer import Tokenizer

if TYPE_CHECKING:  # it loads what chats need, and most processes of tritonserver serve none
    from inflight.asking.pair_template import PairTemplate


class EncodedPair(msgspec.Struct, frozen=True, kw_only=True):
    token_ids: list[int]
    second_text_start: int = 0
    """See Request."""
    num_before: int
    """Tokens before the second text."""
    num_behind: int
    """Tokens behind it, which are kept if it is cut."""


class PromptEncoder:
    """Safe to use from several threads."""

    def __init__(
        self, tokenizer: Tokenizer | None, max_text_bytes: int | None = None, pair_template: PairTemplate | None = None
    ) -> None:
        """`tokenizer`: None = texts are refused. `max_text_bytes`: None = the length of texts has been checked.
        `pair_template`: None = the tokenizer joins the texts of a pair."""
        self._tokenizer = tokenizer
        self._max_text_bytes = max_text_bytes
        self._pair_template = pair_template

    def encode(
        self, prompt: Prompt, limits: RequestLimits, *, add_special_tokens: bool = True, is_cut: bool = False
    ) -> list[int]:
        """`is_cut`: whether what is too long is cut at its end, and not refused. Raises Refusal: a text that cannot fit
        is refused before it is tokenised, which would take long."""
        if isinstance(prompt, TextPair):
            return self.encode_pair(prompt, limits).token_ids
        if isinstance(prompt, Illustrated):
            return self.encode(prompt.text, limits, add_special_tokens=add_special_tokens, is_cut=is_cut)
        if not isinstance(prompt, str):
            return prompt
        if not prompt:
            raise Refusal("prompt", "{0} is empty: give at least one character or token")
        tokenizer = self._needed()
        prompt = self._beginning(prompt, limits.max_input_len) if is_cut else prompt
        self._check_length(prompt, limits)
        return (tokenizer.encode if add_special_tokens else tokenizer.encode_plain)(prompt)

    def encode_pair(self, pair: TextPair, limits: RequestLimits, *, is_cut: bool = False) -> EncodedPair:
        """`is_cut`: see `encode`, of the second text. Raises Refusal."""
        if not pair.first or not pair.second:
            raise Refusal("prompt", "{0} holds an empty text: give at least one character")
        second = self._beginning(pair.second, limits.max_input_len) if is_cut else pair.second
        for text in (pair.first, second):
            self._check_length(text, limits)
        if self._pair_template is not None:
            return self._in_template(self._pair_template, TextPair(pair.first, second), is_cut=is_cut)
        token_ids, start = self._needed().encode_pair(pair.first, second)
        num_behind = self.num_behind(token_ids, limits)
        return EncodedPair(token_ids=token_ids, second_text_start=start, num_before=start, num_behind=num_behind)

    def _in_template(self, template: PairTemplate, pair: TextPair, *, is_cut: bool) -> EncodedPair:
        """The tokens of the whole text. Where it is to be cut they are divided at the end of the second one."""
        encode = self._needed().encode_plain
        whole = encode(template.render(pair))
        if not is_cut:
            return EncodedPair(token_ids=whole, num_before=0, num_behind=0)
        before, behind = template.around(pair.first)
        last = encode(behind)
        if whole[len(whole) - len(last) :] != last:  # tokens of the text's end reach beyond it
            whole = encode(before + pair.second) + last
        return EncodedPair(token_ids=whole, num_before=len(encode(before)), num_behind=len(last))

    def num_tokens_before(self, text: str) -> int:
        """Tokens of what another text stands behind, without the one that would end it, as sentence-transformers counts
        them."""
        tokenizer = self._needed()
        token_ids = tokenizer.encode(text)
        return len(token_ids) - (token_ids[-1] in tokenizer.special_ids)

    def num_behind(self, token_ids: list[int], limits: RequestLimits) -> int:
        """Tokens that end a text and no part of it: one of an encoder's, and where the tokenizer adds it."""
        return int(not limits.is_causal or token_ids[-1] in self._needed().special_ids)

    def encode_beginning(self, text: str, limits: RequestLimits, most: int) -> list[int]:
        """The leading `most` tokens of a text, at most `max_input_len`; of an encoder's the last one is that which ends
        it. Raises Refusal."""
        token_ids = self.encode(self._beginning(text, most), limits)
        num_behind = self.num_behind(token_ids, limits) if limits.pooled else 0
        return shortened(token_ids, most, num_behind)

    def _beginning(self, text: str, most: int) -> str:
        """Without what stands behind the first `most` tokens for sure."""
        per_token = self._needed().max_bytes_per_token
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
        most = self._needed().max_bytes_per_token
        if most is not None and num_bytes > most * limits.max_input_len:
            raise context_too_long(limits.max_seq_len, -(-num_bytes // most))

    def _needed(self) -> Tokenizer:
        if self._tokenizer is None:
            raise Refusal("prompt", "{0} is text and there is no tokenizer: give token ids")
        return self._tokenizer


def shortened(token_ids: list[int], most: int, num_behind: int) -> list[int]:
    """The leading tokens and the `num_behind` last ones, if there are more than `most`."""
    if len(token_ids) <= most:
        return token_ids
    return [*token_ids[: max(most - num_behind, 0)], *token_ids[len(token_ids) - num_behind :]]
