"""The random streams of one request's sequences, as seeds of the counter-based generator."""

from __future__ import annotations

MASK = 2**64 - 1
GOLDEN_GAMMA = 0x9E3779B97F4A7C15
"""2**64 divided by the golden ratio, odd: its multiples differ for all indexes."""


def sequence_seed(seed: int, index: int) -> int:
    """Seed of sequence `index` of a request whose seed is `seed`, both unsigned 64-bit; the token at position p is
    drawn from (this seed, p).

    Sequence 0 keeps the request's own seed, so that its tokens are those of the same request with one sequence. The
    others get output number `index` of SplitMix64 started at `seed` (Steele, Lea, Flood, "Fast splittable pseudorandom
    number generators", 2014). Its mixing is a bijection: no two sequences of a request share a stream, and neither do
    the sequences of the same index above 0 of two requests. With `seed + index` instead, requests with the seeds 1 and
    2 would have streams in common.
    """
    if index == 0:
        return seed
    state = (seed + index * GOLDEN_GAMMA) & MASK
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & MASK
    return state ^ (state >> 31)
