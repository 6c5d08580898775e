"""Sampling in torch, which sorts only a short list of candidates where possible. Knows rows, no requests.

Works on unnormalised weights w = exp((x - max x) / temperature): filters set some of them to zero, and a uniform number
times the sum of the rest determines the token. A filtered row is sampled from its largest values if these include
everything that the filters keep; otherwise, and without filters, over the whole vocabulary. Which of the two depends on
the row only, so that the order of its sums, and with it the last bit of a draw, does not depend on the batch.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from inflight_kernels.sampling import on_host
from inflight_kernels.sampling.philox import philox_uniform

# Number of largest values tried before the whole row: for a trained model they nearly always include everything that
# top-k or top-p keeps.
_NUM_CANDIDATES = 128
# Difference to the maximum below which a weight is 0. It would be lost in any sum, but where exp underflows, as for all
# tokens that a mask forbids, it is slow: 3.6 ms for 16 rows of 49,152 on one core, and 0.8 ms with this limit.
_MIN_EXPONENT = -80.0
_MIN_WEIGHT = 2e-35  # a little above exp(_MIN_EXPONENT)
# Columns per partial sum: the draw first finds the partial sum, then the column within it.
_SEARCH_WIDTH = 256


class Filters(NamedTuple):
    """The filters of some rows, each (rows,); None for a filter that no row uses."""

    top_k: Tensor | None
    top_p: Tensor | None
    min_p: Tensor | None

    def of(self, rows: Tensor) -> Filters:
        """The filters of some of the rows."""
        return Filters(*(None if values is None else values[rows] for values in self))


def process_logits(
    logits: Tensor,
    repetition_penalty: Tensor | None,
    presence_penalty: Tensor | None,
    frequency_penalty: Tensor | None,
    prompt_mask: Tensor | None,
    output_counts: Tensor | None,
    logit_bias: Tensor | None,
    allowed_mask: Tensor | None,
) -> Tensor:
    """Apply bias, mask and penalties in float32; without any of them returns `logits` in float32."""
    x = logits.float()
    if logit_bias is not None:
        x = x + logit_bias
    if allowed_mask is not None:
        x = torch.where(allowed_mask, x, float("-inf"))
    if repetition_penalty is not None and (prompt_mask is not None or output_counts is not None):
        seen = output_counts > 0 if output_counts is not None else prompt_mask
        if output_counts is not None and prompt_mask is not None:
            seen = seen | prompt_mask  # type: ignore[operator]
        penalty = repetition_penalty[:, None]
        x = torch.where(seen, torch.where(x > 0, x / penalty, x * penalty), x)  # type: ignore[arg-type]
    if output_counts is not None:
        if frequency_penalty is not None:
            x = x - frequency_penalty[:, None] * output_counts
        if presence_penalty is not None:
            x = x - presence_penalty[:, None] * (output_counts > 0)
    return x


def _top_k_threshold(candidates: Tensor, top_k: Tensor, active: Tensor) -> Tensor:
    """(B, 1): the k-th largest value of the active rows, -inf for the others; rows of `candidates` are descending."""
    place = (top_k.long() - 1).clamp(0, candidates.shape[1] - 1)
    kth = candidates.gather(1, place[:, None])
    return kth.masked_fill(~active[:, None], float("-inf"))


def _weights(x: Tensor, x_max: Tensor, rate: Tensor) -> Tensor:
    """exp((x - x_max) * rate), but for those that are next to nothing."""
    exponents = (x - x_max).mul_(rate).clamp_(min=_MIN_EXPONENT)
    return torch.threshold_(exponents.exp_(), _MIN_WEIGHT, 0.0)


def _top_p_threshold(
    candidates: Tensor, threshold: Tensor, x_max: Tensor, rate: Tensor, target: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """(B, 1) the smallest kept value and how many of its ties are kept; (B,) whether the candidates reach the
    target."""
    weights = _weights(candidates, x_max, rate).masked_fill_(candidates < threshold, 0.0)
    running = weights.cumsum(1)
    reached = running >= target
    place = reached.int().argmax(1, keepdim=True)
    smallest = candidates.gather(1, place)
    above = (weights * (candidates > smallest)).sum(1, keepdim=True)
    ties = ((target - above) / weights.gather(1, place)).ceil_().clamp_(min=1.0)
    return smallest, ties, reached.any(1)


def _drop_surplus_ties(weights: Tensor, x: Tensor, threshold: Tensor, ties: Tensor) -> None:
    """Zero the ties of the threshold beyond the first `ties` of each row, in place."""
    is_tie = x == threshold
    rows = (is_tie.sum(1) > ties[:, 0]).nonzero().squeeze(1)
    if len(rows):
        surplus = is_tie[rows] & (is_tie[rows].cumsum(1) > ties[rows])
        weights[rows] = weights[rows].masked_fill(surplus, 0.0)


def _filter(weights: Tensor, x: Tensor, x_max: Tensor, rate: Tensor, filters: Filters) -> None:
    """Set the weights that the filters drop to zero, over the whole vocabulary, in place."""
    threshold = torch.full_like(x_max, float("-inf"))
    if filters.top_k is not None:
        k_active = (filters.top_k > 0) & (filters.top_k < x.shape[1])
        longest = int((filters.top_k * k_active).amax())
        if longest:
            threshold = _top_k_threshold(x.topk(longest, dim=1).values, filters.top_k, k_active)
            weights.masked_fill_(x < threshold, 0.0)
    if filters.top_p is not None:
        rows = (filters.top_p < 1.0).nonzero().squeeze(1)
        target = filters.top_p[rows, None] * _partial_sums(weights[rows])[1].sum(1, keepdim=True)
        falling = x[rows].sort(dim=1, descending=True).values
        smallest, ties, reached = _top_p_threshold(falling, threshold[rows], x_max[rows], rate[rows], target)
        # By rounding, even the whole row may not reach a p close to 1: then everything is kept.
        smallest = smallest.masked_fill(~reached[:, None], float("-inf"))
        kept = weights[rows].masked_fill(x[rows] < smallest, 0.0)
        _drop_surplus_ties(kept, x[rows], smallest, ties)
        weights[rows] = kept
    if filters.min_p is not None:
        weights.masked_fill_(weights < filters.min_p[:, None], 0.0)


def _draw_from_candidates(
    x: Tensor, x_max: Tensor, rate: Tensor, filters: Filters, uniform: Tensor
) -> tuple[Tensor, Tensor]:
    """(B,) a token for each row, and (B,) whether the candidates include everything that the row's filters keep."""
    vocab_size = x.shape[1]
    values, indices = x.topk(min(_NUM_CANDIDATES, vocab_size), dim=1)
    last = values[:, -1:]
    weights = _weights(values, x_max, rate)
    settled = torch.zeros_like(last, dtype=torch.bool)
    sound = ~settled
    by_top_k = settled
    if filters.top_k is not None:
        k_active = (filters.top_k > 0) & (filters.top_k < vocab_size)
        threshold = _top_k_threshold(values, filters.top_k, k_active)
        # The k-th value may have ties beyond the candidates, unless the last candidate is smaller.
        by_top_k = k_active[:, None] & (threshold > last)
        sound = by_top_k | ~k_active[:, None]
        settled = by_top_k
        weights.masked_fill_(values < threshold, 0.0)
    last_weight = _weights(last, x_max, rate)
    surplus = None
    if filters.top_p is not None:
        p_active = filters.top_p[:, None] < 1.0
        mass = weights.sum(1, keepdim=True)
        whole = (p_active & ~by_top_k).squeeze(1).nonzero().squeeze(1)
        if len(whole):
            mass[whole] = _partial_sums(_weights(x[whole], x_max[whole], rate[whole]))[1].sum(1, keepdim=True)
        floor = torch.where(weights > 0, values, float("inf")).amin(1, keepdim=True)
        smallest, ties, reached = _top_p_threshold(values, floor, x_max, rate, filters.top_p[:, None] * mass)
        cuts = p_active & reached[:, None]
        sound = sound & (cuts | ~p_active | by_top_k)
        settled = settled | (cuts & (smallest > last))
        smallest = smallest.masked_fill(~cuts, float("-inf"))
        weights.masked_fill_(values < smallest, 0.0)
        surplus = (smallest, ties)
    if filters.min_p is not None:
        settled = settled | (last_weight < filters.min_p[:, None])
        weights.masked_fill_(weights < filters.min_p[:, None], 0.0)
    order = indices.argsort(dim=1)
    weights = weights.gather(1, order)
    if surplus is not None:
        _drop_surplus_ties(weights, values.gather(1, order), *surplus)
    chosen, _ = _first_above(weights, uniform[:, None] * weights.sum(1, keepdim=True))
    return indices.gather(1, order.gather(1, chosen)).squeeze(1), (settled & sound).squeeze(1)


def _first_above(weights: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """(B, 1): the first column whose running sum exceeds `target`, or the last with weight; and the sum before it."""
    running = weights.cumsum(1)
    last = ((weights > 0) * torch.arange(weights.shape[1], device=weights.device)).amax(1, keepdim=True)
    chosen = torch.minimum((running <= target).sum(1, keepdim=True), last)
    return chosen, running.gather(1, chosen) - weights.gather(1, chosen)


def _partial_sums(weights: Tensor) -> tuple[Tensor, Tensor]:
    """Columns in parts of `_SEARCH_WIDTH`, (B, parts, width), and their sums (B, parts).

    torch sums a single long row with several threads, in another order than many rows. Parts keep a row's sum
    independent of the number of rows.
    """
    rows, vocab_size = weights.shape
    padded = F.pad(weights, (0, -vocab_size % _SEARCH_WIDTH)) if vocab_size % _SEARCH_WIDTH else weights
    parts = padded.view(rows, padded.shape[1] // _SEARCH_WIDTH, _SEARCH_WIDTH)
    return parts, parts.sum(2)


def sum_rows(weights: Tensor) -> Tensor:
    """(B, 1): the sum of each row, which does not depend on the number of rows."""
    return _partial_sums(weights)[1].sum(1, keepdim=True)


def logsumexp_rows(x: Tensor) -> Tensor:
    """(B,): the logarithm of each row's sum of exponentials, which does not depend on the number of rows either."""
    x_max = x.amax(1, keepdim=True).clamp_(min=torch.finfo(x.dtype).min)  # a row may be -inf everywhere
    return (x_max + sum_rows((x - x_max).exp_()).log_()).squeeze(1)


def draw(weights: Tensor, uniform: Tensor) -> Tensor:
    """(B,): the first index, in vocabulary order, whose running weight exceeds uniform * total."""
    parts, sums = _partial_sums(weights)
    target = uniform[:, None] * sums.sum(1, keepdim=True)
    part, before = _first_above(sums, target)
    inside = parts.gather(1, part[:, :, None].expand(-1, 1, _SEARCH_WIDTH)).squeeze(1)
    chosen, _ = _first_above(inside, target - before)
    return (part * _SEARCH_WIDTH + chosen).squeeze(1)


def _draw_rows(x: Tensor, x_max: Tensor, temperature: Tensor, filters: Filters, uniform: Tensor) -> Tensor:
    """(B,): the tokens of rows that all sample randomly."""
    rate = 1.0 / temperature
    token_ids = torch.zeros_like(uniform, dtype=torch.int64)
    rest = torch.arange(len(x), device=x.device)
    is_filtered = any(values is not None for values in filters)
    if is_filtered:
        token_ids, settled = _draw_from_candidates(x, x_max, rate, filters, uniform)
        rest = (~settled).nonzero().squeeze(1)
        if len(rest) == 0:
            return token_ids
    x, x_max, rate = (x, x_max, rate) if len(rest) == len(x) else (x[rest], x_max[rest], rate[rest])
    weights = _weights(x, x_max, rate)
    if is_filtered:
        _filter(weights, x, x_max, rate, filters.of(rest))
    token_ids[rest] = draw(weights, uniform[rest])
    return token_ids


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
    repetition_penalty: Tensor | None = None,
    presence_penalty: Tensor | None = None,
    frequency_penalty: Tensor | None = None,
    prompt_mask: Tensor | None = None,
    output_counts: Tensor | None = None,
    logit_bias: Tensor | None = None,
    allowed_mask: Tensor | None = None,
    *,
    all_greedy: bool = False,
    any_top_k: bool = True,
    any_top_p: bool = True,
    any_min_p: bool = True,
    with_logprobs: bool = True,
    token_ids: Tensor | None = None,
    logprobs: Tensor | None = None,
    is_finite: Tensor | None = None,
    last_tokens: Tensor | None = None,
    rows: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """One token and its log-probability for each row."""
    changes = (repetition_penalty, output_counts, logit_bias, allowed_mask)
    is_changed, is_on_host = any(values is not None for values in changes), logits.device.type == "cpu"
    if logprobs is None:
        logprobs = torch.full(logits.shape[:1], float("nan"), dtype=torch.float32, device=logits.device)
    if is_on_host and all_greedy and not (is_changed or with_logprobs):
        return on_host.sample_greedily(logits, token_ids, is_finite, last_tokens, rows), logprobs
    if rows is not None:
        repetition_penalty, presence_penalty, frequency_penalty = (
            None if values is None else values.index_select(0, rows)
            for values in (repetition_penalty, presence_penalty, frequency_penalty)
        )
    x = process_logits(
        logits,
        repetition_penalty,
        presence_penalty,
        frequency_penalty,
        prompt_mask,
        output_counts,
        logit_bias,
        allowed_mask,
    )
    x_max, chosen_ids = on_host.largest(x) if is_on_host else x.max(1)
    if is_finite is not None:
        # The maximum is NaN if any logit is.
        is_finite.copy_((logits.amax(1) if is_changed else x_max).isfinite())
    token_ids = chosen_ids if token_ids is None else token_ids.copy_(chosen_ids)
    if not all_greedy:
        if rows is not None:
            temperature, top_k, top_p, min_p, seeds = (
                values.index_select(0, rows) for values in (temperature, top_k, top_p, min_p, seeds)
            )
        random = ((temperature > 0) & (x_max > float("-inf"))).nonzero().squeeze(1)
        if len(random):
            filters = Filters(top_k if any_top_k else None, top_p if any_top_p else None, min_p if any_min_p else None)
            uniform = philox_uniform(seeds[random], positions[random])
            x_of_random = x if len(random) == len(x) else x[random]
            token_ids[random] = _draw_rows(
                x_of_random, x_max[random, None], temperature[random, None], filters.of(random), uniform
            )
        token_ids.clamp_(0, logits.shape[1] - 1)
    if last_tokens is not None:
        assert rows is not None
        last_tokens.index_copy_(0, rows, token_ids)
    if not with_logprobs:
        return token_ids, logprobs
    raw = logits.float()
    chosen = raw.gather(1, token_ids[:, None]).squeeze(1)
    return token_ids, logprobs.copy_(chosen - logsumexp_rows(raw))
