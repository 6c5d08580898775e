"""Places for requests in progress."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inflight.http.places import Places


def places_of(count: int, num_keys: int) -> Places:
    places = Places(count)
    places.share(num_keys)
    return places


def take_all(places: Places, key: int | None) -> int:
    num_taken = 0
    while places.take(key):
        num_taken += 1
    return num_taken


@pytest.mark.parametrize("num_keys", [0, 1])
def test_a_client_that_is_the_only_one_takes_all(num_keys: int) -> None:
    assert take_all(places_of(10, num_keys), 0 if num_keys else None) == 10


def test_one_key_leaves_others_their_share() -> None:
    places = places_of(16, 2)
    assert [take_all(places, key) for key in (0, 1, 0)] == [12, 4, 0]
    places.give_back(0)
    assert take_all(places, 1) == 1, "what is common goes to whoever comes first"


def test_more_keys_than_places_share_them_all() -> None:
    assert take_all(places_of(4, 3), 0) == 4


def test_shares_follow_the_number_of_keys() -> None:
    places = places_of(16, 1)
    assert take_all(places, 0) == 16
    places.share(2)
    assert not places.take(0)
    assert take_all(places, 1) == 4, "its share is there, beyond what the other one had taken before"
    for _ in range(12):
        places.give_back(0)
    assert take_all(places, 1) == 8


@given(st.integers(1, 40), st.integers(0, 5), st.lists(st.tuples(st.booleans(), st.integers(0, 4))))
def test_each_key_finds_its_share_free_whatever_the_others_do(
    count: int, num_keys: int, actions: list[tuple[bool, int]]
) -> None:
    places, taken = places_of(count, num_keys), dict.fromkeys(range(max(num_keys, 1)), 0)
    share = count // (2 * num_keys) if num_keys > 1 else 0
    for takes, number in actions:
        key = number % len(taken)
        if takes:
            had_share_left = taken[key] < share
            got_one = places.take(key)
            assert got_one or not had_share_left
            taken[key] += got_one
        elif taken[key]:
            places.give_back(key)
            taken[key] -= 1
        assert places.num_taken(key) == taken[key] and sum(taken.values()) <= count
    for key in taken:
        while taken[key]:
            places.give_back(key)
            taken[key] -= 1
    assert sum(take_all(places, key) for key in taken) == count
