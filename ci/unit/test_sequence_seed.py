"""The streams of one request's sequences: the first is the request's own, the others are nobody else's."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from inflight.sequence_seed import sequence_seed

seeds = st.integers(0, 2**64 - 1)


@given(seed=seeds)
def test_the_first_sequence_keeps_the_requests_seed(seed: int) -> None:
    assert sequence_seed(seed, 0) == seed


@given(seed=seeds, index=st.integers(0, 1000))
def test_a_stream_is_an_unsigned_64_bit_seed(seed: int, index: int) -> None:
    assert 0 <= sequence_seed(seed, index) < 2**64


def test_neighbouring_requests_have_no_stream_in_common() -> None:
    streams = [sequence_seed(seed, index) for seed in range(200) for index in range(20)]
    assert len(set(streams)) == len(streams)


def test_the_others_are_outputs_of_splitmix64() -> None:
    """Its first outputs from the state 1234567, as its authors' reference code gives them."""
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert [sequence_seed(1234567, index) for index in (1, 2, 3)] == expected
