"""Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011) in torch's int64 arithmetic.

Counter-based: a number is a function of (key, counter) only, so the draw of a token does not depend on other tokens.
Bitwise equal to the numbers of the sampling kernel.
"""

from __future__ import annotations

import torch
from torch import Tensor

_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


def philox4x32(counter: tuple[Tensor, ...], key: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Ten rounds over four counter words and two key words, each an int64 tensor of unsigned 32-bit values."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        # The products wrap around 2^64 as two's complement; shift and mask still give their high and low words.
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        high0, high1 = (product0 >> 32) & _WORD, (product1 >> 32) & _WORD
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, product1 & _WORD, high0 ^ c3 ^ k1, product0 & _WORD
        k0, k1 = (k0 + _KEY_STEPS[0]) & _WORD, (k1 + _KEY_STEPS[1]) & _WORD
    return c0, c1, c2, c3


def philox_uniform(seeds: Tensor, positions: Tensor, *, purpose: int = 0) -> Tensor:
    """24 random bits as a float32 in [0, 1): key = seed, counter = (position, purpose), all int64 of equal shape."""
    zero = torch.zeros_like(positions)
    counter = (positions & _WORD, (positions >> 32) & _WORD, zero + purpose, zero)
    word = philox4x32(counter, (seeds & _WORD, (seeds >> 32) & _WORD))[0]
    return (word >> 8).to(torch.float32) * 2.0**-24
