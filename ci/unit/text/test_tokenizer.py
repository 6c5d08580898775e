"""What the tokenizer says of itself before it has seen a text, and what it leaves other threads while it works."""

from __future__ import annotations

import itertools
import sys
import threading
import time
import unicodedata
from collections.abc import Callable, Iterator
from pathlib import Path

import fake_tokenizer
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers, processors

from inflight.errors import ConfigurationError
from inflight.text.byte_tokens import alphabet
from inflight.text.token_bytes import NFC_SHRINK, max_bytes_per_token
from inflight.text.tokenizer import Tokenizer

WORDS = Regex(r"[^\s]+|\s+")


def byte_level(**changes: object) -> tokenizers.Tokenizer:
    """Llama 3's and Qwen's layout; `changes` are attributes."""
    vocabulary = {char: byte for byte, char in enumerate(alphabet())} | {"the": 256, "Ġthe": 257}
    merges = [("t", "h"), ("th", "e")]
    backend = tokenizers.Tokenizer(models.BPE(vocabulary | {"th": 258}, merges))
    split = pre_tokenizers.Split(WORDS, "isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    backend.add_tokens([AddedToken("<|turn|>", special=True)])
    for name, value in changes.items():
        setattr(backend, name, value)
    return backend


def composing() -> tokenizers.Tokenizer:
    return byte_level(normalizer=normalizers.NFC())


BOUNDED = [
    byte_level,
    composing,
    lambda: fake_tokenizer.merged_byte_tokenizer()._backend,
    lambda: fake_tokenizer.sentencepiece_tokenizer()._backend,
    lambda: fake_tokenizer.gemma_tokenizer()._backend,
]


@pytest.mark.slow
@pytest.mark.parametrize(
    "pair", ["[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1", "[CLS] $A [SEP] [SEP] $B [SEP]"], ids=["with types", "without"]
)
def test_a_pair_is_what_transformers_makes_of_it(pair: str) -> None:
    import transformers

    backend = byte_level()
    backend.add_special_tokens(["[CLS]", "[SEP]"])
    special = [(name, backend.token_to_id(name)) for name in ("[CLS]", "[SEP]")]
    backend.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", pair=pair, special_tokens=special)
    whole = transformers.PreTrainedTokenizerFast(tokenizer_object=backend)
    for first, second in (("the one", "other"), ("a", "the the")):
        expected = whole(first, second, return_token_type_ids=True)
        ids, start = Tokenizer(backend, []).encode_pair(first, second)
        assert ids == expected["input_ids"]
        types = [int(start > 0 and index >= start) for index in range(len(ids))]
        assert types == expected["token_type_ids"]


@pytest.mark.slow
def test_what_another_library_cannot_read_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    with pytest.raises(ConfigurationError, match=f"the tokenizer in {tmp_path} cannot be read: ") as refused:
        Tokenizer.load(tmp_path)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("make", BOUNDED, ids=["split", "nfc", "merged", "sentencepiece", "gemma"])
@given(
    text=st.lists(st.text(max_size=6) | st.sampled_from(["the the", "<|turn|>", "K\u0327", "  ", "▁▁"])).map("".join)
)
@settings(max_examples=150, deadline=None)
def test_no_token_stands_for_more_bytes_than_are_said(make: Callable[[], tokenizers.Tokenizer], text: str) -> None:
    backend = make()
    bound = max_bytes_per_token(backend)
    assert bound is not None
    assert len(text.encode()) <= bound * len(backend.encode(text, add_special_tokens=False).ids)


def test_the_bound_is_the_longest_token() -> None:
    assert max_bytes_per_token(byte_level()) == len("<|turn|>")
    assert max_bytes_per_token(composing()) == NFC_SHRINK * len("<|turn|>")
    assert max_bytes_per_token(fake_tokenizer.sentencepiece_tokenizer()._backend) == len("▁<end>".encode())


def lacking_a_byte() -> tokenizers.Tokenizer:
    return byte_level(model=models.BPE({char: byte for byte, char in enumerate(alphabet()[1:])}, []))


def absorbing_spaces() -> tokenizers.Tokenizer:
    backend = byte_level()
    backend.add_tokens([AddedToken("<mask>", lstrip=True)])
    return backend


@pytest.mark.parametrize(
    "make",
    [
        lacking_a_byte,
        absorbing_spaces,
        lambda: byte_level(normalizer=normalizers.Strip()),
        lambda: byte_level(normalizer=normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])),
        lambda: byte_level(normalizer=normalizers.Replace("  ", " ")),
        lambda: byte_level(normalizer=normalizers.Replace(Regex(" +"), " ")),
        lambda: byte_level(pre_tokenizer=pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit()])),
        lambda: byte_level(
            pre_tokenizer=pre_tokenizers.Sequence(
                [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel(False, use_regex=False)]
            )
        ),
        lambda: byte_level(pre_tokenizer=None),
        lambda: fake_tokenizer.unigram_tokenizer()._backend,
        lambda: fake_tokenizer.wordpiece_tokenizer()._backend,
        lambda: fake_tokenizer.spaced_tokenizer()._backend,
    ],
)
def test_where_text_may_be_dropped_nothing_is_said(make: Callable[[], tokenizers.Tokenizer]) -> None:
    assert max_bytes_per_token(make()) is None


def test_composing_shrinks_no_text_more_than_is_said() -> None:
    """Each composed character against the longest spelling of every part of it."""
    longest: dict[str, int] = {}
    for char in characters():
        parts = unicodedata.normalize("NFD", char)
        if len(parts) == 1:
            longest[parts] = max(longest.get(parts, 0), len(char.encode()))
    ratios = (
        sum(longest[part] for part in unicodedata.normalize("NFD", char)) / len(char.encode())
        for char in characters()
        if unicodedata.is_normalized("NFC", char)
    )
    assert NFC_SHRINK - 1 < max(ratios) <= NFC_SHRINK


def characters() -> Iterator[str]:
    return map(chr, itertools.chain(range(0xD800), range(0xE000, sys.maxunicode + 1)))


@pytest.fixture
def never_switching() -> Iterator[None]:
    """Threads run Python by turns only where one of them lets go."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000.0)
    yield
    sys.setswitchinterval(interval)


def test_other_threads_run_while_a_text_is_tokenised(never_switching: None) -> None:
    tokenizer = Tokenizer(byte_level(), [])
    text = "the cat " * 50_000
    turns, done = [0], threading.Event()

    def take_turns() -> None:
        while not done.is_set():
            turns[0] += 1
            time.sleep(0)  # lets go

    thread = threading.Thread(target=take_turns)
    thread.start()
    try:
        for _ in range(100):
            before = turns[0]
            tokenizer.encode_plain(text)
            if turns[0] > before:
                return
        raise AssertionError("no other thread ran")
    finally:
        done.set()
        thread.join()
