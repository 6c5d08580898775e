"""Text from tokens: the same however they arrive, whole characters only, and cut at stop strings."""

from __future__ import annotations

import fake_tokenizer
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import models, pre_tokenizers

from inflight.server.detokenizer import Detokenizer
from inflight.server.stop_strings import StopStrings, StopStringSearch
from inflight.server.text_decoder import ByteLevelDecoder, WindowDecoder, make_text_decoder
from inflight.server.tokenizer import Tokenizer, TokenizerFailed

TOKENIZERS = [
    fake_tokenizer.byte_tokenizer,
    fake_tokenizer.merged_byte_tokenizer,
    fake_tokenizer.sentencepiece_tokenizer,
]
TEXT = st.text(st.characters(codec="utf-8"), max_size=40)


def stream(
    tokenizer: Tokenizer, ids: list[int], stop: tuple[str, ...] = (), prompt: tuple[int, ...] = (), step: int = 1
):
    """The pieces of an output whose tokens come `step` at a time, and the detokenizer that made them."""
    detokenizer = Detokenizer(make_text_decoder(tokenizer, list(prompt)), list(stop))
    pieces = [detokenizer.push(ids[start : start + step]) for start in range(0, len(ids), step)]
    return [*pieces, detokenizer.flush()], detokenizer


@pytest.mark.parametrize("make", TOKENIZERS)
@given(text=TEXT, step=st.integers(1, 5))
@settings(max_examples=200, deadline=None)
def test_pieces_make_up_the_text_and_none_holds_half_a_character(make, text: str, step: int) -> None:
    tokenizer = make()
    prompt = tokenizer.encode("the")
    ids = tokenizer.encode_plain(text)
    pieces, _ = stream(tokenizer, ids, prompt=tuple(prompt), step=step)
    whole = tokenizer.decode(prompt + ids)
    assert "".join(pieces) == whole[len(tokenizer.decode(prompt)) :]
    if "\ufffd" not in text:
        assert all("\ufffd" not in piece for piece in pieces)


@pytest.mark.parametrize("make", TOKENIZERS)
@given(
    data=st.data(), step=st.integers(1, 7), stop=st.lists(st.text("abt he\ufffd", min_size=1, max_size=4), max_size=3)
)
@settings(max_examples=200, deadline=None)
def test_any_tokens_in_any_grouping_give_the_same_text(make, data, step: int, stop: list[str]) -> None:
    """Also tokens that are not UTF-8 at all, which a model with random weights produces."""
    tokenizer = make()
    ids = data.draw(st.lists(st.integers(0, 256), max_size=40))
    together, all_at_once = stream(tokenizer, ids, tuple(stop), step=max(len(ids), 1))
    apart, grouped = stream(tokenizer, ids, tuple(stop), step=step)
    assert "".join(apart) == "".join(together)
    assert (grouped.num_tokens, grouped.is_stopped) == (all_at_once.num_tokens, all_at_once.is_stopped)


@given(ids=st.lists(st.integers(0, 256), max_size=60))
@settings(max_examples=200, deadline=None)
def test_byte_level_pieces_equal_the_librarys_own_decoding(ids: list[int]) -> None:
    tokenizer = fake_tokenizer.byte_tokenizer()
    assert "".join(stream(tokenizer, ids)[0]) == tokenizer.decode(ids)


def test_a_panic_of_the_library_is_an_error_like_any_other() -> None:
    """It comes as a BaseException, which would end the thread that answers everybody."""
    backend = tokenizers.Tokenizer(models.BPE(vocab={"a": 0, "b": 1}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(r"(a+)+b"), "isolated")
    tokenizer = Tokenizer(backend, [])
    with pytest.raises(TokenizerFailed):
        tokenizer.encode("a" * 40 + "c")


def test_a_character_is_shown_with_its_last_byte() -> None:
    tokenizer = fake_tokenizer.byte_tokenizer()
    pieces, _ = stream(tokenizer, list("a🙂b".encode()))
    assert pieces == ["a", "", "", "", "🙂", "b", ""]


def test_an_incomplete_character_shows_at_the_end_as_a_replacement() -> None:
    pieces, _ = stream(fake_tokenizer.byte_tokenizer(), list("🙂".encode()[:3]))
    assert "".join(pieces) == "\ufffd"


def test_a_word_keeps_the_space_before_it() -> None:
    tokenizer = fake_tokenizer.sentencepiece_tokenizer()
    prompt = [tokenizer._backend.token_to_id("▁the")]
    ids = [tokenizer._backend.token_to_id(piece) for piece in ("▁cat", "▁sat")]
    assert stream(tokenizer, ids, prompt=tuple(prompt))[0] == [" cat", " sat", ""]


def test_special_tokens_are_not_text() -> None:
    for make in TOKENIZERS:
        tokenizer = make()
        ids = [*tokenizer.encode_plain("ab"), *tokenizer.end_ids, *tokenizer.encode_plain("ab")]
        assert fake_tokenizer.END not in "".join(stream(tokenizer, ids)[0])


def test_the_decoder_fits_the_tokenizer() -> None:
    assert isinstance(make_text_decoder(fake_tokenizer.merged_byte_tokenizer(), []), ByteLevelDecoder)
    assert isinstance(make_text_decoder(fake_tokenizer.sentencepiece_tokenizer(), []), WindowDecoder)


@given(text=st.text("ab", max_size=30), stops=st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4))
@settings(max_examples=500, deadline=None)
def test_a_stop_string_ends_the_text_where_a_plain_search_says(text: str, stops: list[str]) -> None:
    """The one that is complete first ends it; of several complete at once, the longest."""
    ends = [(text.find(stop) + len(stop), -len(stop)) for stop in stops if stop in text]
    end, negative_length = min(ends, default=(len(text), 0))
    search = StopStringSearch(StopStrings(stops))
    shown = ""
    stopped = False
    for char in text:
        piece, stopped = search.push(char)
        shown += piece
        if stopped:
            break
    if not stopped:
        shown += search.flush()
    assert (shown, stopped) == (text[: end + negative_length], bool(ends))


def test_only_what_may_become_a_stop_string_is_held_back() -> None:
    search = StopStringSearch(StopStrings(["END", "NEVER"]))
    assert search.push("the E") == ("the ", False)
    assert search.push("N") == ("", False)
    assert search.push("X") == ("ENX", False)
    assert search.push("EN") == ("", False)
    assert search.push("D and more") == ("", True)


def test_a_stop_string_across_tokens_leaves_the_rest_untaken() -> None:
    tokenizer = fake_tokenizer.byte_tokenizer()
    pieces, detokenizer = stream(tokenizer, list(b"one. two. three"), stop=(". t",), step=6)
    assert "".join(pieces) == "one"
    assert detokenizer.is_stopped and detokenizer.num_tokens == len("one. t")


def test_stop_strings_wait_for_min_tokens() -> None:
    tokenizer = fake_tokenizer.byte_tokenizer()
    detokenizer = Detokenizer(make_text_decoder(tokenizer, []), ["."], min_tokens=3)
    assert detokenizer.push(list(b"a..b.c")) == "a..b"
    assert detokenizer.is_stopped and detokenizer.num_tokens == 5
