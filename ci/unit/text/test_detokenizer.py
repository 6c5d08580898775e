"""Text from tokens: the same however they arrive, whole characters only, and cut at stop strings."""

from __future__ import annotations

import fake_tokenizer
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import models, pre_tokenizers

from inflight.text.byte_tokens import alphabet
from inflight.text.detokenizer import Detokenizer
from inflight.text.stop_strings import StopStrings, StopStringSearch
from inflight.text.text_decoder import ByteLevelDecoder, NeighbourDecoder, make_text_decoder, prompt_text
from inflight.text.tokenizer import Tokenizer, TokenizerFailed

SCRIPTS = [
    "the cat. ",
    "naïve é",
    "Привет",
    "Ελλάδα",
    "שלום",
    "हिन्दी",
    "தமிழ்",
    "ภาษาไทย",
    "中国人民很好",
    "日本語",
    "한국어 각",
]
EMOJI = ["👩‍👩‍👧‍👦", "🏳️‍🌈", "👍🏽", "🇩🇪", "e\u0301\u0323", "\u202e\u200d\ufeff", "\ufffd", "▁"]
TEXT = st.lists(
    st.one_of(st.sampled_from([*SCRIPTS, *EMOJI]), st.text(st.characters(codec="utf-8"), max_size=8)), max_size=6
).map("".join)
every_kind = pytest.mark.parametrize("make", fake_tokenizer.EVERY_KIND)


def library_text(tokenizer: Tokenizer, ids: list[int]) -> str:
    """The library's own decoding of them all at once."""
    text: str = tokenizer._backend.decode(ids)
    return text


def mended_text(tokenizer: Tokenizer, ids: list[int]) -> str:
    """The same, but that of a run of bytes only those become U+FFFD of which no character is made."""
    tokens: list[str] = []
    pending = b""
    for token_id in [token for token in ids if token not in tokenizer.special_ids]:
        token = tokenizer.token(token_id)
        part = tokenizer.byte_tokens.read(token)
        if part is None:
            tokens += [*whole(tokenizer, pending), token]
            pending = b""
        else:
            pending += part
    return tokenizer.join([*tokens, *whole(tokenizer, pending)])


def whole(tokenizer: Tokenizer, run: bytes) -> list[str]:
    return tokenizer.byte_tokens.write(run.decode("utf-8", tokenizer.byte_tokens.errors)) if run else []


def stream(
    tokenizer: Tokenizer, ids: list[int], stop: tuple[str, ...] = (), prompt: tuple[int, ...] = (), step: int = 1
):
    """The pieces of an output whose tokens come `step` at a time, and the detokenizer that made them."""
    detokenizer = Detokenizer(make_text_decoder(tokenizer, list(prompt)), StopStrings(list(stop)))
    pieces = [detokenizer.push(ids[start : start + step]) for start in range(0, len(ids), step)]
    return [*pieces, detokenizer.flush()], detokenizer


@every_kind
@given(data=st.data(), text=TEXT)
@settings(max_examples=150, deadline=None)
def test_wherever_an_output_begins_it_goes_on_to_the_text_of_the_whole(make, data, text: str) -> None:
    """Also in the middle of a character, and with special tokens between its bytes; no piece ends inside one."""
    tokenizer = make()
    ids = tokenizer.encode_plain(text)
    for place in data.draw(st.lists(st.integers(0, len(ids)), max_size=3)):
        ids.insert(place, tokenizer.end_ids[0])
    start = data.draw(st.integers(0, len(ids)))
    pieces, _ = stream(tokenizer, ids[start:], prompt=tuple(ids[:start]), step=data.draw(st.integers(1, 5)))
    before = prompt_text(tokenizer, ids[:start])
    assert before + "".join(pieces) == library_text(tokenizer, ids)
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in [before, *pieces])


@every_kind
@given(data=st.data(), stop=st.lists(st.text("abt he\ufffd", min_size=1, max_size=4), max_size=3))
@settings(max_examples=150, deadline=None)
def test_any_tokens_after_any_prompt_in_any_grouping_give_the_text_of_the_whole(make, data, stop: list[str]) -> None:
    """Also tokens that are not UTF-8 at all, which a model with random weights produces."""
    tokenizer = make()
    ids = data.draw(st.lists(st.integers(0, tokenizer._backend.get_vocab_size() - 1), max_size=40))
    start = data.draw(st.integers(0, len(ids)))
    prompt, output = tuple(ids[:start]), ids[start:]
    plain, _ = stream(tokenizer, output, prompt=prompt)
    assert prompt_text(tokenizer, ids[:start]) + "".join(plain) == mended_text(tokenizer, ids)
    together, all_at_once = stream(tokenizer, output, tuple(stop), prompt, max(len(output), 1))
    apart, grouped = stream(tokenizer, output, tuple(stop), prompt, data.draw(st.integers(1, 7)))
    assert "".join(apart) == "".join(together)
    assert (grouped.num_tokens, grouped.is_stopped) == (all_at_once.num_tokens, all_at_once.is_stopped)


def test_an_output_in_byte_tokens_after_a_prompt_in_byte_tokens() -> None:
    tokenizer = fake_tokenizer.sentencepiece_tokenizer()
    output = tokenizer.encode_plain("人民很好")[1:]  # without the space that begins a text
    pieces, _ = stream(tokenizer, output, prompt=tuple(tokenizer.encode("中国")))
    assert pieces == ["", "", "人", "", "", "民", "", "", "很", "", "", "好", ""]


def test_a_character_that_is_whole_is_kept_whatever_bytes_follow() -> None:
    """The library would turn the whole run of bytes into U+FFFD, of which a part was shown long ago."""
    tokenizer = fake_tokenizer.sentencepiece_tokenizer()
    byte = {value: tokenizer._backend.token_to_id(f"<0x{value:02X}>") for value in range(256)}
    ids = [byte[value] for value in [*"中".encode(), 0xFF, *"国".encode()[:2]]]
    assert stream(tokenizer, ids)[0] == ["", "", "中", "\ufffd", "", "", "\ufffd\ufffd"]


@given(ids=st.lists(st.integers(0, 256), max_size=60))
@settings(max_examples=200, deadline=None)
def test_byte_level_pieces_equal_the_librarys_own_decoding(ids: list[int]) -> None:
    tokenizer = fake_tokenizer.byte_tokenizer()
    assert "".join(stream(tokenizer, ids)[0]) == library_text(tokenizer, ids)


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
    for make in fake_tokenizer.EVERY_KIND:
        tokenizer = make()
        ids = [*tokenizer.encode_plain("ab"), *tokenizer.end_ids, *tokenizer.encode_plain("ab")]
        assert fake_tokenizer.END not in "".join(stream(tokenizer, ids)[0])


def test_the_decoder_fits_the_tokenizer() -> None:
    assert isinstance(make_text_decoder(fake_tokenizer.merged_byte_tokenizer(), []), ByteLevelDecoder)
    assert isinstance(make_text_decoder(fake_tokenizer.sentencepiece_tokenizer(), []), NeighbourDecoder)
    assert isinstance(make_text_decoder(fake_tokenizer.stripped_byte_tokenizer(), []), NeighbourDecoder)


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
    detokenizer = Detokenizer(make_text_decoder(tokenizer, []), StopStrings(["."]), min_tokens=3)
    assert detokenizer.push(list(b"a..b.c")) == "a..b"
    assert detokenizer.is_stopped and detokenizer.num_tokens == 5


def test_each_byte_has_the_character_that_tokenizers_gives_it() -> None:
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    assert sorted(alphabet()) == sorted(level.alphabet())
    for code in (*range(0x800), 0x10000, 0x40000, 0x80000, 0xC0000, 0x10FFFF):  # whose bytes are all that UTF-8 has
        ((written, _),) = level.pre_tokenize_str(chr(code))
        assert written == "".join(alphabet()[byte] for byte in chr(code).encode())
