"""ForcedTokens: what it proposes of the text that a grammar forces, and when it proposes nothing."""

from __future__ import annotations

from inflight.batch_manager.speculation.forced_tokens import ForcedTokens


def forced(tokens: list[int], num_tokens: int) -> ForcedTokens:
    drafter = ForcedTokens()
    drafter.note(tokens, num_tokens)
    return drafter


def test_nothing_is_proposed_before_anything_is_forced() -> None:
    assert ForcedTokens().propose([1, 2, 3], 1, 64) == []


def test_what_is_still_to_come_is_proposed() -> None:
    drafter = forced([5, 6, 7, 8], 2)
    assert drafter.propose([1, 2], 0, 64) == [5, 6]
    assert drafter.propose([1, 2], 1, 64) == [6, 7], "5 is on the device"
    assert drafter.propose([1, 2, 5], 1, 64) == [7, 8]
    assert drafter.propose([1, 2, 5], 1, 1) == [], "one draft does not pay"
    assert drafter.propose([1, 2, 5, 6], 1, 64) == []


def test_another_way_to_write_the_text_ends_it_until_more_is_noted() -> None:
    drafter = forced([5, 6, 7, 8], 2)
    assert drafter.propose([1, 2, 9], 0, 64) == []
    assert drafter.propose([1, 2, 9, 7], 0, 64) == []
    drafter.note([8, 8, 8], 4)
    assert drafter.propose([1, 2, 9, 7], 1, 64) == [8, 8]


def test_it_rests_where_the_text_is_written_in_other_ways() -> None:
    drafter = forced([5] * 9, 2)
    for _ in range(2):
        drafter.account(4, 0, 2, 1)
    assert drafter.propose([1, 2], 0, 64) == []
