"""Compiled grammars: masks of whole tokens, drafts, forced text, limits; leases and the bounded cache."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from pathlib import Path
from threading import Event

import numpy as np
import pytest
from guides import GUIDES, guide
from msgspec import structs

from inflight.errors import ConfigurationError
from inflight.guided_decoding import GuidedDecodingBackend, GuidedDecodingParams, GuideType, Reasoning, WhiteSpace
from inflight.guides.translate import translate
from inflight.runtime.guided import grammars as grammars_module
from inflight.runtime.guided import libraries
from inflight.runtime.guided.forced_text import MAX_FORCED
from inflight.runtime.guided.grammars import Grammar, Grammars, GrammarState
from inflight.runtime.guided.libraries import make_library
from inflight.runtime.guided.llguidance_library import LlguidanceState
from inflight.runtime.guided.outputs import Mask, Output, Work
from inflight.text.text_decoder import prompt_text
from inflight.text.tokenizer import Tokenizer

CHECKPOINT = Path(__file__).parents[3] / "model_repository/llm/1/checkpoint"
VOCAB_SIZE, END = 2048, 2
TOKENIZER = Tokenizer.load(CHECKPOINT)
BACKENDS = list(GuidedDecodingBackend)


def make(backend: GuidedDecodingBackend, folder: Path = CHECKPOINT) -> Grammars:
    return Grammars(folder, VOCAB_SIZE, 4, make_library(backend, "cpu"))


@pytest.fixture(scope="module", params=BACKENDS, ids=[each.value for each in BACKENDS])
def every(request: pytest.FixtureRequest) -> Iterator[Grammars]:
    """Those of each library."""
    grammars = make(request.param)
    yield grammars
    grammars.close()


@pytest.fixture(scope="module")
def grammars() -> Iterator[Grammars]:
    """llguidance's."""
    grammars = make(GuidedDecodingBackend.LLGUIDANCE)
    yield grammars
    grammars.close()


def translated(params: GuidedDecodingParams) -> GuidedDecodingParams:
    return structs.replace(params, grammar=translate(params).grammar)


def compiled(grammars: Grammars, params: GuidedDecodingParams) -> Grammar:
    """Leased, and as it comes out."""
    params = translated(params)
    grammars.lease(params)
    found = grammars.find(params)
    assert found is not None
    found._compiled.exception(timeout=60)
    return found


class Walk:
    """An output, and what a worker loop does with it."""

    def __init__(self, grammars: Grammars, grammar: Grammar, token_ids: list[int] | None = None) -> None:
        self._grammars = grammars
        self.output: Output = grammars.start(grammar, [END])
        grammars.submit([self.output.begin(token_ids or [])])

    def mask(self) -> Mask:
        return self.masks(1)[0]

    def masks(self, count: int) -> list[Mask]:
        return self.output.wait(count)

    def begin_step(self, drafts: list[int]) -> None:
        work = self.output.begin_step(drafts)
        self._submit(work)

    def advance(self, *token_ids: int) -> None:
        self._submit(self.output.advance(list(token_ids)))

    def _submit(self, work: Work | None) -> None:
        if work is not None:
            self._grammars.submit([work])

    def on(self, seed: int, num_tokens: int = 30) -> list[int]:
        """Go on with random tokens."""
        choose = random.Random(seed)
        walked: list[int] = []
        while len(walked) < num_tokens and (not walked or walked[-1] != END):
            mask = self.mask()
            assert not mask.error
            walked.append(choose.choice(tokens_of(mask)))
            self.advance(walked[-1])
        return walked

    def follows(self, token_ids: list[int]) -> bool:
        """Whether each token is allowed behind those before it."""
        for token_id in token_ids:
            mask = self.mask()
            if mask.error or token_id not in tokens_of(mask):
                return False
            self.advance(token_id)
        return True


def tokens_of(mask: Mask) -> list[int]:
    bits = np.unpackbits(np.frombuffer(mask.bits, dtype=np.uint8), bitorder="little")
    found: list[int] = np.flatnonzero(bits).tolist()
    return found


@pytest.mark.parametrize("name", GUIDES)
def test_each_kind_allows_whole_tokens_of_text_only(every: Grammars, name: str) -> None:
    grammar = compiled(every, GUIDES[name][0])
    assert grammar.state is GrammarState.READY, grammar.reason
    walk = Walk(every, grammar)
    first = walk.mask()
    assert len(first.bits) == VOCAB_SIZE // 8 and END not in tokens_of(first)
    assert not set(tokens_of(first)) & {0, 1, 3, 4, 5, 6}, "special tokens spell no text"
    walk.on(seed=1)
    every.release(grammar.params)


@pytest.mark.parametrize("name", ["regex", "ebnf_grammar", "structural_tag"])
def test_both_libraries_allow_the_same_tokens(grammars: Grammars, name: str) -> None:
    """Guides that both follow exactly: so a change of the library changes no token."""
    others = make(GuidedDecodingBackend.XGRAMMAR)
    params = GUIDES[name][0]
    walk, other = (Walk(each, compiled(each, params)) for each in (grammars, others))
    for token_id in walk.on(seed=5, num_tokens=40):
        assert token_id in tokens_of(other.mask())
        other.advance(token_id)
    again = Walk(others, compiled(others, params))
    mine = Walk(grammars, compiled(grammars, params))
    for token_id in again.on(seed=6, num_tokens=40):
        assert token_id in tokens_of(mine.mask())
        mine.advance(token_id)
    others.close()
    for _ in range(2):
        grammars.release(translated(params))


@pytest.mark.parametrize(
    ("text", "is_open", "is_whole"),
    [
        ("I think so</a>\n\nyes", True, True),
        ("<a>yes or no</a>no", True, True),
        ("yes", True, False),
        ("yes", False, True),
        ("<a></a>yes", False, True),
        ("<a>no", False, False),
        ("so</a>yes", False, None),
        ("<a>hm</a>perhaps", False, None),
        ("<a>hm</a>yes</a>", False, None),
    ],
)
def test_a_grammar_holds_behind_the_reasoning(every: Grammars, text: str, is_open: bool, is_whole: bool | None) -> None:
    """`is_whole`: whether the output may end behind the text; None = the text is not allowed."""
    reasoning = Reasoning(opening="<a>", closing="</a>", is_open=is_open)
    grammar = compiled(every, structs.replace(guide(GuideType.REGEX, "yes|no"), reasoning=reasoning))
    walk = Walk(every, grammar)
    tokens = TOKENIZER.encode_plain(f"\n{text}")[1:]
    assert walk.follows(tokens) is (is_whole is not None)
    if is_whole is not None:
        assert (END in tokens_of(walk.mask())) is is_whole
    every.release(grammar.params)


@pytest.mark.parametrize(
    ("text", "is_allowed"),
    [
        ("=yes", True),
        ("<a>hm</a>;=no", True),
        ("<a></a>;<a>so</a>;=yes", True),
        ("yes", False),
        ("<a>hm</a>=yes", False),
        ("<a>h=m</a>;=yes", False),
    ],
)
def test_there_may_be_several_thoughts_where_a_text_begins_the_answer(
    every: Grammars, text: str, is_allowed: bool
) -> None:
    reasoning = Reasoning(opening="<a>", closing="</a>", behind=";", before_answer="=", excludes=("<a>", "</a>", "="))
    grammar = compiled(every, structs.replace(guide(GuideType.REGEX, "yes|no"), reasoning=reasoning))
    assert Walk(every, grammar).follows(TOKENIZER.encode_plain(f"\n{text}")[1:]) is is_allowed
    every.release(grammar.params)


def test_a_special_token_that_is_shown_is_its_text(every: Grammars) -> None:
    shown, hidden = 4, 5
    text = TOKENIZER.token(shown)
    assert text is not None
    params = structs.replace(guide(GuideType.REGEX, f"a({re.escape(text)}b)*"), shown_token_ids=(shown, 10**6))
    grammar = compiled(every, params)
    walk = Walk(every, grammar)
    (a,), (b,) = (TOKENIZER.encode_plain(f"\n{letter}")[1:] for letter in "ab")
    assert walk.follows([a, shown])
    assert not {shown, hidden, END} & set(tokens_of(walk.mask()))
    assert walk.follows([b, shown, b, END])
    every.release(grammar.params)


def test_compact_json_has_no_white_space(every: Grammars) -> None:
    grammar = compiled(every, structs.replace(GUIDES["json_schema"][0], white_space=WhiteSpace.COMPACT))
    walk = Walk(every, grammar)
    text = prompt_text(TOKENIZER, walk.on(seed=3, num_tokens=30))
    assert not re.search(r"[:,]\s|\{\s", text), text
    every.release(grammar.params)


def test_an_output_that_begins_in_the_middle_goes_on_like_one_that_went_there(every: Grammars) -> None:
    grammar = compiled(every, GUIDES["json_schema"][0])
    walk = Walk(every, grammar)
    replayed = Walk(every, grammar, walk.on(seed=3, num_tokens=20))
    assert replayed.mask().bits == walk.mask().bits
    every.release(grammar.params)


def test_an_output_that_begins_with_what_the_grammar_forbids_gets_an_error(every: Grammars) -> None:
    grammar = compiled(every, guide(GuideType.REGEX, "[0-9]{4}"))
    letter = TOKENIZER.encode_plain("\na")[-1]
    walk = Walk(every, grammar, [letter])
    assert "does not follow" in walk.mask().error
    walk.advance(letter)
    assert "does not follow" in walk.mask().error, "it stays one"
    every.release(grammar.params)


def test_masks_behind_drafts_are_those_that_come_once_they_are_tokens(every: Grammars) -> None:
    """Whether a step begins before the tokens before it are known or after; the drafts are taken back every time."""
    grammar = compiled(every, GUIDES["json_schema"][0])
    tokens = Walk(every, grammar).on(seed=3, num_tokens=24)
    plain, expected = Walk(every, grammar), []
    for token in tokens:
        expected.append(plain.mask())
        plain.advance(token)
    drafted, place = Walk(every, grammar), 0
    for is_early in (True, False, True, True, False):
        drafts = [*tokens[place + 1 : place + 4], END, 7]
        if is_early:
            drafted.mask()
            drafted.begin_step([])
            drafted.begin_step(drafts)
            drafted.advance(tokens[place])
        else:
            drafted.advance(tokens[place])
            drafted.begin_step(drafts)
        masks = drafted.masks(6)
        assert [mask.bits for mask in masks[:4]] == [mask.bits for mask in expected[place + 1 : place + 5]]
        assert [mask.bits for mask in masks[4:]] == [b"", b""] and not any(mask.error for mask in masks)
        drafted.advance(*tokens[place + 1 : place + 3])
        place += 3
    every.release(grammar.params)


@pytest.mark.parametrize("text", ["the little dog ran home", "x", "dog" * 300])
def test_text_that_is_forced_comes_with_the_mask_before_it(every: Grammars, text: str) -> None:
    """As the tokenizer splits it, up to its last token where another one could stand there."""
    grammar = compiled(every, guide(GuideType.REGEX, f"[AB]{text}(s|!)?"))
    tokens = [TOKENIZER.encode_plain(letter)[0] for letter in "A"] + TOKENIZER.encode_plain(f"\n{text}")[1:]
    walk = Walk(every, grammar)
    found: list[int] = []
    for place, token in enumerate(tokens):
        mask = walk.mask()
        if mask.forced:
            assert len(found) <= place and len(mask.forced) <= MAX_FORCED
            found = [*tokens[:place], *mask.forced]
        walk.advance(token)
    assert len(tokens) - 1 <= max(len(found), 2) and found == tokens[: len(found)]
    every.release(grammar.params)


def test_a_limit_that_others_used_up_is_decided_again_for_each_output(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The matcher that an output shares with others fails once: the output goes on with one of its own, and the masks
    are the same."""
    grammar = compiled(grammars, guide(GuideType.REGEX, "([a-z]+[0-9]?){1,9}"))
    expected, tokens = Walk(grammars, grammar), Walk(grammars, grammar).on(seed=2, num_tokens=12)
    walk = Walk(grammars, grammar)
    failed: list[LlguidanceState] = []

    def fails_once(state: LlguidanceState) -> bool:
        is_first = state is walk.output.state and state not in failed
        failed.extend([state] * is_first)
        return is_first or state.matcher.is_error()

    for place, token in enumerate(tokens):
        assert walk.mask().bits == expected.mask().bits
        with monkeypatch.context() as patch:
            if place == 6:
                patch.setattr(LlguidanceState, "has_failed", property(fails_once))
            walk.advance(token)
            walk.mask()
        expected.advance(token)
    assert failed and walk.mask().bits == expected.mask().bits
    grammars.release(grammar.params)


def test_a_grammar_that_is_too_ambiguous_to_be_followed_says_so_and_costs_no_other(grammars: Grammars) -> None:
    nested = "start: A\nA: /((a{0,1000}){0,1000}){0,1000}/"
    slow, fine = compiled(grammars, guide(GuideType.LARK_GRAMMAR, nested)), compiled(grammars, GUIDES["regex"][0])
    if slow.state is GrammarState.READY:
        walk, other = Walk(grammars, slow), Walk(grammars, fine)
        (letter,) = TOKENIZER.encode_plain("\na")[1:]
        for _ in range(200):
            if walk.mask().error:
                break
            walk.advance(letter)
        assert "too ambiguous" in walk.mask().error
        assert other.on(seed=1, num_tokens=3)
    for each in (slow, fine):
        grammars.release(each.params)


def test_equal_parameters_share_one_grammar(grammars: Grammars) -> None:
    grammar = compiled(grammars, guide(GuideType.REGEX, "[ab]{3}"))
    assert compiled(grammars, guide(GuideType.REGEX, "[ab]{3}")) is grammar and grammar.num_leases == 2
    grammars.release(grammar.params)
    grammars.release(grammar.params)
    assert compiled(grammars, guide(GuideType.REGEX, "[ab]{3}")) is grammar, "it was kept"
    grammars.release(grammar.params)


def test_the_cache_is_bounded(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars, "_max_grammars", 3)
    every = [guide(GuideType.REGEX, f"[a-z]{{{n}}}") for n in range(1, 7)]
    for params in every:
        grammars.release(compiled(grammars, params).params)
        assert len(grammars) <= 3
    assert grammars.find(translated(every[-1])) is not None and grammars.find(translated(every[0])) is None
    for params in every:
        compiled(grammars, params)
    assert all(grammars.find(translated(params)) for params in every), "none that is in use goes"
    for params in every:
        grammars.release(translated(params))
    grammars.release(compiled(grammars, guide(GuideType.REGEX, "[a-z]{9}")).params)
    assert len(grammars) <= 3


def test_one_that_nobody_waits_for_any_more_is_not_compiled(grammars: Grammars) -> None:
    goes_on = Event()
    grammars._compiling.submit(goes_on.wait)
    waiting = [translated(guide(GuideType.REGEX, f"[0-9]{{{n}}}")) for n in range(20, 26)]
    for params in waiting:
        grammars.lease(params)
    kept = [grammars.find(params) for params in waiting]
    for params in waiting:
        grammars.release(params)
    goes_on.set()
    assert not any(grammars.find(params) for params in waiting)
    assert all(grammar is not None and grammar._compiled.cancelled() for grammar in kept)


def test_a_guide_that_no_front_has_translated_is_refused(grammars: Grammars) -> None:
    params = guide(GuideType.REGEX, "untranslated")
    grammars.lease(params)
    grammar = grammars.find(params)
    assert grammar is not None
    grammar._compiled.exception(timeout=60)
    assert grammar.state is GrammarState.BROKEN and "translated" in grammar.reason
    grammars.release(params)
    assert grammars.find(params) is None, "it is not kept"


def test_a_failure_of_the_library_costs_those_who_use_it_an_error(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    grammar = compiled(grammars, guide(GuideType.REGEX, "[p-t]{9}"))
    walk = Walk(grammars, grammar)
    assert walk.mask().bits
    with monkeypatch.context() as patch:
        patch.setattr(type(walk.output.state), "accept", lambda *_: 1 // 0)
        walk.advance(tokens_of(walk.mask())[0])
        assert "failed" in walk.mask().error
    walk.advance(0)
    assert "failed" in walk.mask().error, "its tokens are not known any more"
    assert Walk(grammars, grammar).mask().bits
    grammars.release(grammar.params)


def test_a_library_that_is_not_installed_is_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libraries, "find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match=r"inflight\[xgrammar\]"):
        make(GuidedDecodingBackend.XGRAMMAR)
    make(GuidedDecodingBackend.LLGUIDANCE).close()


def test_a_checkpoint_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    grammars = make(GuidedDecodingBackend.LLGUIDANCE, tmp_path)
    grammar = compiled(grammars, guide(GuideType.JSON))
    assert grammar.state is GrammarState.BROKEN and "has no tokenizer.json" in grammar.reason
    grammars.close()
    assert grammars_module.CRASHED not in grammar.reason
