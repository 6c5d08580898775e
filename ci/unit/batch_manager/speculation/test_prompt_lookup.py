"""PromptLookup: what it proposes, and that it stops guessing in vain."""

from __future__ import annotations

from itertools import pairwise

from inflight.batch_manager.speculation.payoff import FIRST_REST
from inflight.batch_manager.speculation.prompt_lookup import PromptLookup
from inflight.speculative_decoding import NGramDecodingConfig


def make_lookup(max_draft_len: int = 8) -> PromptLookup:
    return PromptLookup(NGramDecodingConfig(max_draft_len=max_draft_len, max_matching_ngram_size=2))


def test_drafts_become_longer_while_all_are_accepted() -> None:
    lookup, text = make_lookup(), [1, 2, 3] * 20
    lengths = []
    for _ in range(4):
        drafts = lookup.propose(text, 0, 64)
        assert drafts == [1, 2, 3, 1, 2, 3, 1, 2][: len(drafts)]
        lengths.append(len(drafts))
        lookup.account(len(drafts), len(drafts), len(text), 1)
    assert lengths == [2, 4, 8, 8]
    lookup.account(8, 2, len(text), 1)
    assert len(lookup.propose(text, 0, 64)) == 3


def test_lookup_that_never_succeeds_rests_longer_and_longer() -> None:
    lookup, text, attempts = make_lookup(), [1, 2], []
    for number in range(2000):
        drafts = lookup.propose(text, 0, 64)
        if drafts:
            attempts.append(number)
            lookup.account(len(drafts), 0, len(text), 1)
        text += [5, 6] if number % 2 else [6, 7]
    assert 2 < len(attempts) < 12
    rests = [after - before for before, after in pairwise(attempts)]
    assert max(rests) >= 8 * FIRST_REST / 2 and rests == sorted(rests)


def test_lookup_rests_sooner_beside_many_sequences() -> None:
    text = [1, 2, 3] * 20
    for num_running, goes_on in ((1, True), (7, True), (16, False)):
        lookup = make_lookup()
        lookup.account(4, 0, len(text), num_running)
        assert bool(lookup.propose(text, 0, 64)) == goes_on


def test_lookup_goes_on_after_a_rest_once_it_succeeds() -> None:
    lookup, text = make_lookup(), [1, 2, 3] * 400
    for _ in range(2):
        lookup.account(4, 0, 100, 1)
    assert not lookup.propose(text[: 100 + FIRST_REST - 1], 0, 64)
    num_tokens = 100 + FIRST_REST
    for _ in range(10):
        drafts = lookup.propose(text[:num_tokens], 0, 64)
        assert drafts
        lookup.account(len(drafts), len(drafts), num_tokens, 1)
        num_tokens += len(drafts) + 1


def test_the_token_on_the_device_is_guessed_too() -> None:
    lookup, text = make_lookup(), [1, 2, 3, 4, 5, 6, 7, 1, 2]
    assert lookup.propose(text, 1, 64) == [4, 5]
    assert lookup.propose(text, 0, 2) == [3, 4]
