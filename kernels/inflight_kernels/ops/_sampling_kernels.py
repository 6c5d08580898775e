"""The triton kernels of sampling; their formulas and their order stand in `inflight_kernels.ops.sampling`."""

from __future__ import annotations

import triton
import triton.language as tl

from inflight_kernels.ops.decode_attention import LOG2_E as _LOG2_E

LOG2_E = tl.constexpr(_LOG2_E)
LN_2 = tl.constexpr(1.0 / _LOG2_E)
ALL_TIES = tl.constexpr(2**31 - 1)


@triton.jit
def philox_uniform_at(seed, position):
    """One float32 in [0, 1) of 24 bits: the first word of Philox4x32-10 keyed by `seed` at counter `position`."""
    position = position.to(tl.uint64)
    low = (position & 0xFFFFFFFF).to(tl.uint32)
    high = (position >> 32).to(tl.uint32)
    zero = low & 0
    word, _, _, _ = tl.philox(seed, low, high, zero, zero, 10)
    return (word >> 8).to(tl.int32).to(tl.float32) * (1.0 / 16777216.0)


@triton.jit
def _exp2_slope(temperature):
    """The factor from logits to base-2 exponents; that of temperature 1 for a greedy row, whose masses nobody reads."""
    return LOG2_E / tl.where(temperature > 0.0, temperature, 1.0)


@triton.jit
def tile_stats_kernel(
    logits_ptr,
    temperature_ptr,
    repetition_penalty_ptr,
    presence_penalty_ptr,
    frequency_penalty_ptr,
    prompt_mask_ptr,
    output_counts_ptr,
    logit_bias_ptr,
    allowed_mask_ptr,
    processed_ptr,
    stats_ptr,
    argmax_ptr,
    vocab_size,
    num_tiles,
    stride_logits,
    stride_prompt_mask,
    stride_output_counts,
    stride_logit_bias,
    stride_allowed_mask,
    HAS_REPETITION: tl.constexpr,
    HAS_PRESENCE: tl.constexpr,
    HAS_FREQUENCY: tl.constexpr,
    HAS_PROMPT_MASK: tl.constexpr,
    HAS_COUNTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_ALLOWED: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    pid_b = tl.program_id(0).to(tl.int64)
    pid_v = tl.program_id(1)
    offs_v = pid_v * BLOCK_V + tl.arange(0, BLOCK_V)
    mask = offs_v < vocab_size
    raw = tl.load(logits_ptr + pid_b * stride_logits + offs_v, mask=mask, other=float("-inf")).to(tl.float32)

    x = raw
    if HAS_BIAS:
        x += tl.load(logit_bias_ptr + pid_b * stride_logit_bias + offs_v, mask=mask, other=0.0)
    if HAS_ALLOWED:
        allowed = tl.load(allowed_mask_ptr + pid_b * stride_allowed_mask + offs_v, mask=mask, other=0)
        x = tl.where(allowed != 0, x, float("-inf"))
    if HAS_COUNTS:
        counts = tl.load(output_counts_ptr + pid_b * stride_output_counts + offs_v, mask=mask, other=0)
    if HAS_REPETITION:
        penalty = tl.load(repetition_penalty_ptr + pid_b)
        seen = offs_v < 0
        if HAS_COUNTS:
            seen = seen | (counts > 0)
        if HAS_PROMPT_MASK:
            in_prompt = tl.load(prompt_mask_ptr + pid_b * stride_prompt_mask + offs_v, mask=mask, other=0)
            seen = seen | (in_prompt != 0)
        x = tl.where(seen, tl.where(x > 0.0, tl.div_rn(x, penalty), x * penalty), x)
    if HAS_COUNTS:
        if HAS_FREQUENCY:
            x -= tl.load(frequency_penalty_ptr + pid_b) * counts.to(tl.float32)
        if HAS_PRESENCE:
            x -= tl.where(counts > 0, tl.load(presence_penalty_ptr + pid_b), 0.0)
    if HAS_BIAS or HAS_ALLOWED or HAS_REPETITION or HAS_FREQUENCY or HAS_PRESENCE:
        tl.store(processed_ptr + pid_b * vocab_size + offs_v, x, mask=mask)

    raw_max = tl.max(raw, axis=0)
    raw_base = tl.where(raw_max > float("-inf"), raw_max, 0.0)
    raw_sum = tl.sum(tl.exp2((raw - raw_base) * LOG2_E), axis=0)
    x_max = tl.max(x, axis=0)
    x_base = tl.where(x_max > float("-inf"), x_max, 0.0)
    slope = _exp2_slope(tl.load(temperature_ptr + pid_b))
    x_sum = tl.sum(tl.exp2((x - x_base) * slope), axis=0)
    x_min = tl.min(tl.where(x > float("-inf"), x, float("inf")), axis=0)
    place = tl.min(tl.where(x == x_max, offs_v, vocab_size), axis=0)

    row = pid_b * num_tiles + pid_v
    plane = tl.num_programs(0).to(tl.int64) * num_tiles
    tl.store(stats_ptr + row, raw_max)
    tl.store(stats_ptr + plane + row, raw_sum)
    tl.store(stats_ptr + 2 * plane + row, x_max)
    tl.store(stats_ptr + 3 * plane + row, x_sum)
    tl.store(stats_ptr + 4 * plane + row, x_min)
    # Only NaN logits leave no index; the last one is still one of the vocabulary.
    tl.store(argmax_ptr + row, tl.minimum(place, vocab_size - 1))


@triton.jit
def _count_above(x_row_ptr, vocab_size, pivot, x_max, slope, BY_MASS: tl.constexpr, BLOCK_V: tl.constexpr):
    """Measure of {x > pivot} (count or mass), the least value above the pivot and the greatest at or under it."""
    total = tl.zeros([BLOCK_V], dtype=tl.float32)
    above = tl.full([BLOCK_V], float("inf"), dtype=tl.float32)
    below = tl.full([BLOCK_V], float("-inf"), dtype=tl.float32)
    for start in tl.range(0, vocab_size, BLOCK_V):
        offs_v = start + tl.arange(0, BLOCK_V)
        x = tl.load(x_row_ptr + offs_v, mask=offs_v < vocab_size, other=float("-inf")).to(tl.float32)
        is_above = x > pivot
        if BY_MASS:
            total += tl.where(is_above, tl.exp2((x - x_max) * slope), 0.0)
        else:
            total += tl.where(is_above, 1.0, 0.0)
        above = tl.minimum(above, tl.where(is_above, x, float("inf")))
        below = tl.maximum(below, tl.where(is_above, float("-inf"), x))
    return tl.sum(total, axis=0), tl.min(above, axis=0), tl.max(below, axis=0)


@triton.jit
def _bisect(x_row_ptr, vocab_size, low, high, target, x_max, slope, BY_MASS: tl.constexpr, BLOCK_V: tl.constexpr):
    """Greatest present value t in [low, high] with measure{x >= t} >= target (else `low`), and measure{x > t}.

    Both ends are values that the row holds and each round moves one of them to another such value, so it ends.
    """
    above_high = tl.full([], 0.0, tl.float32)
    while low < high:
        pivot = tl.maximum(low * 0.5 + high * 0.5, low)
        pivot = tl.where(pivot < high, pivot, low)
        measure, next_above, last_below = _count_above(x_row_ptr, vocab_size, pivot, x_max, slope, BY_MASS, BLOCK_V)
        enough = measure >= target
        low = tl.where(enough, next_above, low)
        high = tl.where(enough, high, last_below)
        above_high = tl.where(enough, above_high, measure)
    return low, above_high


@triton.jit
def threshold_kernel(
    x_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    stats_ptr,
    threshold_ptr,
    ties_ptr,
    vocab_size,
    num_tiles,
    stride_x,
    HAS_TOP_K: tl.constexpr,
    HAS_TOP_P: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    pid_b = tl.program_id(0).to(tl.int64)
    offs_s = tl.arange(0, BLOCK_S)
    mask_s = offs_s < num_tiles
    plane = tl.num_programs(0).to(tl.int64) * num_tiles
    row_ptr = stats_ptr + pid_b * num_tiles + offs_s
    x_max = tl.max(tl.load(row_ptr + 2 * plane, mask=mask_s, other=float("-inf")), axis=0)
    x_min = tl.min(tl.load(row_ptr + 4 * plane, mask=mask_s, other=float("inf")), axis=0)
    temperature = tl.load(temperature_ptr + pid_b)
    slope = _exp2_slope(temperature)
    x_row_ptr = x_ptr + pid_b * stride_x

    threshold = x_min
    ties = tl.full([], ALL_TIES, tl.int32)
    # A greedy row keeps everything here: pick does not ask. Nor is there anything to find where all is masked.
    if (temperature > 0.0) & (x_min < x_max):
        if HAS_TOP_K:
            k = tl.load(top_k_ptr + pid_b)
            if (k > 0) & (k < vocab_size):
                threshold, _ = _bisect(
                    x_row_ptr, vocab_size, x_min, x_max, k.to(tl.float32), x_max, slope, False, BLOCK_V
                )
        if HAS_TOP_P:
            p = tl.load(top_p_ptr + pid_b)
            if p < 1.0:
                # Mass of what top-k left: strictly above the threshold, and the ties on it.
                mass, _, _ = _count_above(x_row_ptr, vocab_size, threshold, x_max, slope, True, BLOCK_V)
                on_threshold = tl.zeros([BLOCK_V], dtype=tl.float32)
                for start in tl.range(0, vocab_size, BLOCK_V):
                    offs_v = start + tl.arange(0, BLOCK_V)
                    x = tl.load(x_row_ptr + offs_v, mask=offs_v < vocab_size, other=float("-inf")).to(tl.float32)
                    on_threshold += tl.where(x == threshold, 1.0, 0.0)
                mass += tl.sum(on_threshold, axis=0) * tl.exp2((threshold - x_max) * slope)
                target = mass * p
                threshold, above = _bisect(x_row_ptr, vocab_size, threshold, x_max, target, x_max, slope, True, BLOCK_V)
                needed = tl.ceil((target - above) / tl.exp2((threshold - x_max) * slope))
                # Clamped on both sides: a weight that underflowed makes the quotient infinite.
                ties = tl.minimum(tl.maximum(needed, 1.0), 2147483520.0).to(tl.int32)
    tl.store(threshold_ptr + pid_b, threshold)
    tl.store(ties_ptr + pid_b, ties)


@triton.jit
def _first_above(weights, offsets, target):
    """Index of the first element whose running sum exceeds `target`, and the sum before it; the last one if none does.

    Elements without weight are never chosen, whatever the rounding of a parallel prefix sum does; -1 if all are such.
    """
    running = tl.cumsum(weights, axis=0)
    present = weights > 0.0
    first = tl.min(tl.where(present & (running > target), offsets, 2147483647), axis=0)
    last = tl.max(tl.where(present, offsets, -1), axis=0)
    chosen = tl.where(first < 2147483647, first, last)
    before = tl.sum(tl.where(offsets == chosen, running - weights, 0.0), axis=0)
    return chosen, before


@triton.jit
def _kept_weights(x, threshold, ties_left, min_p, x_max, slope, HAS_FILTER: tl.constexpr):
    """Weights of one tile after the filters, and how many ties of the threshold the tile holds."""
    weights = tl.exp2((x - x_max) * slope)
    num_ties = 0
    if HAS_FILTER:
        is_tie = x == threshold
        rank = tl.cumsum(is_tie.to(tl.int32), axis=0)
        keep = ((x > threshold) | (is_tie & (rank <= ties_left))) & (weights >= min_p)
        weights = tl.where(keep, weights, 0.0)
        num_ties = tl.sum(is_tie.to(tl.int32), axis=0)
    return weights, num_ties


@triton.jit
def pick_kernel(
    logits_ptr,
    x_ptr,
    temperature_ptr,
    min_p_ptr,
    seeds_ptr,
    positions_ptr,
    stats_ptr,
    argmax_ptr,
    threshold_ptr,
    ties_ptr,
    token_ids_ptr,
    logprobs_ptr,
    vocab_size,
    num_tiles,
    stride_logits,
    stride_x,
    HAS_FILTER: tl.constexpr,
    HAS_MIN_P: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    pid_b = tl.program_id(0).to(tl.int64)
    offs_s = tl.arange(0, BLOCK_S)
    mask_s = offs_s < num_tiles
    plane = tl.num_programs(0).to(tl.int64) * num_tiles
    row_ptr = stats_ptr + pid_b * num_tiles + offs_s
    raw_max_s = tl.load(row_ptr, mask=mask_s, other=float("-inf"))
    raw_sum_s = tl.load(row_ptr + plane, mask=mask_s, other=0.0)
    x_max_s = tl.load(row_ptr + 2 * plane, mask=mask_s, other=float("-inf"))
    x_sum_s = tl.load(row_ptr + 3 * plane, mask=mask_s, other=0.0)
    argmax_s = tl.load(argmax_ptr + pid_b * num_tiles + offs_s, mask=mask_s, other=vocab_size - 1)

    x_max = tl.max(x_max_s, axis=0)
    token = tl.min(tl.where(x_max_s == x_max, argmax_s, vocab_size - 1), axis=0)
    temperature = tl.load(temperature_ptr + pid_b)
    if (temperature > 0.0) & (x_max > float("-inf")):
        slope = _exp2_slope(temperature)
        x_row_ptr = x_ptr + pid_b * stride_x
        uniform = philox_uniform_at(tl.load(seeds_ptr + pid_b), tl.load(positions_ptr + pid_b))
        threshold = tl.full([], 0.0, tl.float32)
        ties = tl.full([], 0, tl.int32)
        min_p = tl.full([], 0.0, tl.float32)
        ties_before_s = tl.zeros([BLOCK_S], dtype=tl.int32)
        if HAS_FILTER:
            threshold = tl.load(threshold_ptr + pid_b)
            ties = tl.load(ties_ptr + pid_b)
            if HAS_MIN_P:
                min_p = tl.load(min_p_ptr + pid_b)
            mass_s = tl.zeros([BLOCK_S], dtype=tl.float32)
            ties_seen = tl.full([], 0, tl.int32)
            for tile in tl.range(0, num_tiles):
                offs_v = tile * BLOCK_V + tl.arange(0, BLOCK_V)
                x = tl.load(x_row_ptr + offs_v, mask=offs_v < vocab_size, other=float("-inf")).to(tl.float32)
                weights, num_ties = _kept_weights(x, threshold, ties - ties_seen, min_p, x_max, slope, True)
                mass_s = tl.where(offs_s == tile, tl.sum(weights, axis=0), mass_s)
                ties_before_s = tl.where(offs_s == tile, ties_seen, ties_before_s)
                ties_seen += num_ties
        else:
            mass_s = x_sum_s * tl.exp2((x_max_s - x_max) * slope)

        target = uniform * tl.sum(mass_s, axis=0)
        tile, mass_before = _first_above(mass_s, offs_s, target)
        ties_left = ties - tl.sum(tl.where(offs_s == tile, ties_before_s, 0), axis=0)
        offs_v = tile * BLOCK_V + tl.arange(0, BLOCK_V)
        x = tl.load(x_row_ptr + offs_v, mask=offs_v < vocab_size, other=float("-inf")).to(tl.float32)
        weights, _ = _kept_weights(x, threshold, ties_left, min_p, x_max, slope, HAS_FILTER)
        chosen, _ = _first_above(weights, offs_v, target - mass_before)
        token = tl.where(chosen >= 0, chosen, token)

    raw_max = tl.max(raw_max_s, axis=0)
    raw_base = tl.where(raw_max > float("-inf"), raw_max, 0.0)
    log_total = raw_base + tl.log2(tl.sum(raw_sum_s * tl.exp2((raw_max_s - raw_base) * LOG2_E), axis=0)) * LN_2
    logit = tl.load(logits_ptr + pid_b * stride_logits + token).to(tl.float32)
    tl.store(token_ids_ptr + pid_b, token.to(tl.int64))
    tl.store(logprobs_ptr + pid_b, logit - log_total)
