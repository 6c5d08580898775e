"""The text of single tokens, for each kind of tokenizer."""

from __future__ import annotations

import pytest
from fake_tokenizer import byte_tokenizer, gemma_tokenizer, sentencepiece_tokenizer, wordpiece_tokenizer

from inflight.text.token_texts import TokenTexts
from inflight.text.tokenizer import Tokenizer


def ids(tokenizer: Tokenizer, *tokens: str) -> list[int]:
    return [next(i for i in range(600) if tokenizer.token(i) == token) for token in tokens]


@pytest.mark.parametrize("tokenizer", [sentencepiece_tokenizer(), gemma_tokenizer()])
def test_a_word_keeps_the_space_in_front_and_a_byte_is_a_byte(tokenizer: Tokenizer) -> None:
    texts = TokenTexts(tokenizer)
    word, byte, special = ids(tokenizer, "▁the", "<0xE4>", "<end>")
    assert (texts.text(word), texts.data(byte), texts.text(byte)) == (" the", b"\xe4", "\ufffd")
    assert (texts.text(special), texts.is_special(special)) == ("<end>", True)


def test_bytes_of_a_byte_level_vocabulary() -> None:
    texts = TokenTexts(byte_tokenizer())
    assert [texts.data(byte) for byte in (0, 97, 0xE4)] == [b"\0", b"a", b"\xe4"]
    assert texts.data(10_000) == b""


def test_the_rest_of_a_word_has_no_space() -> None:
    tokenizer = wordpiece_tokenizer()
    texts = TokenTexts(tokenizer)
    rest = next(i for i in range(600) if (tokenizer.token(i) or "").startswith("##"))
    token = tokenizer.token(rest)
    assert token is not None
    assert texts.text(rest) == token.removeprefix("##")


@pytest.mark.parametrize("keeps", [False, True])
def test_a_stop_string_may_be_kept_and_is_named(keeps: bool) -> None:
    from inflight.text.detokenizer import Detokenizer
    from inflight.text.stop_strings import StopStrings
    from inflight.text.text_decoder import make_text_decoder

    decoder = make_text_decoder(byte_tokenizer(), [])
    detokenizer = Detokenizer(decoder, StopStrings([", w", "xyz"]), keeps_stop_string=keeps)
    assert detokenizer.push([*b"Hello, world"]) == ("Hello, w" if keeps else "Hello")
    assert detokenizer.stop_string == ", w"
