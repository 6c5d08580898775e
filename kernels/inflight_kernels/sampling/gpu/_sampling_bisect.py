"""Device functions of sampling that find a threshold: the greatest value t such that {x >= t} reaches a target measure.

The measure is a count for top-k and a mass for top-p. One formula gives both, 2^((x - x_max) rate): a mass with the
rate that the temperature gives, a count with rate 0, where every element measures 1.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def measure_of(x, x_max, rate):
    """The measure of each element; 0 for impossible ones, which would be NaN with rate 0."""
    possible = x > float("-inf")
    return tl.where(possible, tl.exp2((tl.where(possible, x, x_max) - x_max) * rate), 0.0)


@triton.jit
def _pivot(low, high):
    """A value in [low, high) for low < high, about half-way, without overflow."""
    pivot = tl.maximum(low * 0.5 + high * 0.5, low)
    return tl.where(pivot < high, pivot, low)


@triton.jit
def bisect_tile(x, measures, low, high, target):
    """Greatest value t of a tile in [low, high] with measure{x >= t} >= target (else `low`), and measure{x > t}.

    `high` is the tile's largest value. Both ends are values that the tile holds and each round moves one of them to
    another such value, so it ends.
    """
    above_high = tl.full([], 0.0, tl.float32)
    while low < high:
        pivot = _pivot(low, high)
        is_above = x > pivot
        measure = tl.sum(tl.where(is_above, measures, 0.0), axis=0)
        enough = measure >= target
        next_above = tl.min(tl.where(is_above, x, float("inf")), axis=0)
        last_below = tl.max(tl.where(is_above, float("-inf"), x), axis=0)
        low = tl.where(enough, next_above, low)
        high = tl.where(enough, high, last_below)
        above_high = tl.where(enough, above_high, measure)
    return low, above_high


@triton.jit
def _measure_row(x_row_ptr, vocab_size, pivot, x_max, rate, BLOCK_V: tl.constexpr):
    """Measure of {x > pivot}, the least value above the pivot and the greatest at or under it."""
    total = tl.zeros([BLOCK_V], dtype=tl.float32)
    above = tl.full([BLOCK_V], float("inf"), dtype=tl.float32)
    below = tl.full([BLOCK_V], float("-inf"), dtype=tl.float32)
    for start in tl.range(0, vocab_size, BLOCK_V):
        offs_v = start + tl.arange(0, BLOCK_V)
        x = tl.load(x_row_ptr + offs_v, mask=offs_v < vocab_size, other=float("-inf")).to(tl.float32)
        is_above = x > pivot
        total += tl.where(is_above, measure_of(x, x_max, rate), 0.0)
        above = tl.minimum(above, tl.where(is_above, x, float("inf")))
        below = tl.maximum(below, tl.where(is_above, float("-inf"), x))
    return tl.sum(total, axis=0), tl.min(above, axis=0), tl.max(below, axis=0)


@triton.jit
def bisect_row(x_row_ptr, vocab_size, low, high, above, target, x_max, rate, BLOCK_V: tl.constexpr):
    """Like `bisect_tile`, for a row in memory and with `above` = measure{x > high}; each round reads the whole row."""
    while low < high:
        pivot = _pivot(low, high)
        measure, next_above, last_below = _measure_row(x_row_ptr, vocab_size, pivot, x_max, rate, BLOCK_V)
        enough = measure >= target
        low = tl.where(enough, next_above, low)
        high = tl.where(enough, high, last_below)
        above = tl.where(enough, above, measure)
    return low, above


@triton.jit
def present_ends(x_row_ptr, vocab_size, least, low, high, x_max, BLOCK_V: tl.constexpr):
    """Move the ends of a bracket inwards to values that the row contains; `low` stays if it is `least` already."""
    _, above_low, _ = _measure_row(x_row_ptr, vocab_size, low, x_max, 0.0, BLOCK_V)
    _, _, last = _measure_row(x_row_ptr, vocab_size, high, x_max, 0.0, BLOCK_V)
    return tl.where(low > least, above_low, low), last


@triton.jit
def mass_from(x_row_ptr, vocab_size, threshold, x_max, slope, BLOCK_V: tl.constexpr):
    """Mass of {x >= threshold} in a row."""
    total = tl.zeros([BLOCK_V], dtype=tl.float32)
    for start in tl.range(0, vocab_size, BLOCK_V):
        offs_v = start + tl.arange(0, BLOCK_V)
        x = tl.load(x_row_ptr + offs_v, mask=offs_v < vocab_size, other=float("-inf")).to(tl.float32)
        total += tl.where(x >= threshold, measure_of(x, x_max, slope), 0.0)
    return tl.sum(total, axis=0)


@triton.jit
def ties_needed(target, above, weight):
    """How many ties of the smallest kept value are needed to reach the target mass, at least one.

    Clamped on both sides: a weight that underflowed makes the quotient infinite.
    """
    return tl.minimum(tl.maximum(tl.ceil((target - above) / weight), 1.0), 2147483520.0).to(tl.int32)
