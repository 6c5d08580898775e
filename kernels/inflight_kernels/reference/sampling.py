"""Sampling in torch, with sorting kept to a short list of candidates. Knows rows, no requests.

Works on weights w = exp((x - max x) / temperature) that are never normalised: filters zero some of them, and a uniform
number times what is left finds the token.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from inflight_kernels.reference.philox import philox_uniform

# Candidates sorted for top-p before falling back to the whole row: the mass of a trained model's row is nearly always there.
_NUM_CANDIDATES = 256
# Width of the partial sums over which the draw is searched before one of them is looked into.
_SEARCH_WIDTH = 256


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
    """Bias, mask and penalties in float32; returns `logits` themselves, in float32, where nothing is asked."""
    x = logits.float()
    if logit_bias is not None:
        x = x + logit_bias
    if allowed_mask is not None:
        x = x.masked_fill(~allowed_mask, float("-inf"))
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
    """(B, 1): the k-th largest value of the active rows, -inf for the others; `candidates` fall along each row."""
    place = (top_k.long() - 1).clamp(0, candidates.shape[1] - 1)
    kth = candidates.gather(1, place[:, None])
    return kth.masked_fill(~active[:, None], float("-inf"))


def _top_p_threshold(
    candidates: Tensor, threshold: Tensor, x_max: Tensor, rate: Tensor, target: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """(B, 1) the smallest kept value and how many of its ties stay; (B,) whether the candidates reach the target."""
    weights = ((candidates - x_max) * rate).exp_().masked_fill_(candidates < threshold, 0.0)
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


def _filter(
    weights: Tensor,
    x: Tensor,
    x_max: Tensor,
    rate: Tensor,
    top_k: Tensor | None,
    top_p: Tensor | None,
    min_p: Tensor | None,
) -> None:
    """Zero the weights that top-k, top-p and min-p drop, in place; None stands for a filter that no row uses."""
    vocab_size = x.shape[1]
    num_candidates = 0
    if top_k is not None:
        k_active = (top_k > 0) & (top_k < vocab_size)
        num_candidates = int((top_k * k_active).amax())
    if top_p is not None:
        num_candidates = max(num_candidates, min(_NUM_CANDIDATES, vocab_size))
    if num_candidates:
        candidates = x.topk(num_candidates, dim=1).values
        threshold = torch.full_like(x_max, float("-inf"))
        if top_k is not None:
            threshold = _top_k_threshold(candidates, top_k, k_active)
            weights.masked_fill_(x < threshold, 0.0)
        if top_p is not None:
            p_active = top_p < 1.0
            target = top_p[:, None] * _partial_sums(weights)[1].sum(1, keepdim=True)
            smallest, ties, reached = _top_p_threshold(candidates, threshold, x_max, rate, target)
            rows = (p_active & ~reached).nonzero().squeeze(1)
            if len(rows):
                falling = x[rows].sort(dim=1, descending=True).values
                smallest[rows], ties[rows], reached_now = _top_p_threshold(
                    falling, threshold[rows], x_max[rows], rate[rows], target[rows]
                )
                # Rounding may leave even the whole row short of a p next to 1: then everything stays.
                p_active[rows] = reached_now
            smallest = smallest.masked_fill_(~p_active[:, None], float("-inf"))
            weights.masked_fill_(x < smallest, 0.0)
            _drop_surplus_ties(weights, x, smallest, ties.masked_fill_(~p_active[:, None], float("inf")))
    if min_p is not None:
        weights.masked_fill_(weights < min_p[:, None], 0.0)


def _first_above(weights: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """(B, 1): the first column whose running sum exceeds `target`, at most the last with weight; the sum before."""
    running = weights.cumsum(1)
    last = ((weights > 0) * torch.arange(weights.shape[1], device=weights.device)).amax(1, keepdim=True)
    chosen = torch.minimum((running <= target).sum(1, keepdim=True), last)
    return chosen, running.gather(1, chosen) - weights.gather(1, chosen)


def _partial_sums(weights: Tensor) -> tuple[Tensor, Tensor]:
    """Columns in parts of `_SEARCH_WIDTH`, (B, parts, width), and their sums (B, parts).

    Torch sums a single long row with several threads, in another order than many rows; parts keep a row's sum its own.
    """
    rows, vocab_size = weights.shape
    padded = F.pad(weights, (0, -vocab_size % _SEARCH_WIDTH)) if vocab_size % _SEARCH_WIDTH else weights
    parts = padded.view(rows, -1, _SEARCH_WIDTH)
    return parts, parts.sum(2)


def _draw(weights: Tensor, uniform: Tensor) -> Tensor:
    """(B,): the first index, in vocabulary order, whose running weight exceeds uniform * total."""
    parts, sums = _partial_sums(weights)
    target = uniform[:, None] * sums.sum(1, keepdim=True)
    part, before = _first_above(sums, target)
    inside = parts.gather(1, part[:, :, None].expand(-1, 1, _SEARCH_WIDTH)).squeeze(1)
    chosen, _ = _first_above(inside, target - before)
    return (part * _SEARCH_WIDTH + chosen).squeeze(1)


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
) -> tuple[Tensor, Tensor]:
    """One token and its log-probability for each row."""
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
    token_ids = x.argmax(1)
    if not all_greedy:
        is_random = temperature > 0
        x_max = x.gather(1, token_ids[:, None])
        is_random &= x_max[:, 0] > float("-inf")
        rows = is_random.nonzero().squeeze(1)
        everything = len(rows) == len(x)
        if len(rows):
            # Only the rows that draw: the filters of a greedy row must not cost anything.
            def of_rows(tensor: Tensor) -> Tensor:
                return tensor if everything else tensor[rows]

            drawn_x, drawn_max = of_rows(x), of_rows(x_max)
            rate = 1.0 / of_rows(temperature)[:, None]
            weights = (drawn_x - drawn_max).mul_(rate).exp_()
            if any_top_k or any_top_p or any_min_p:
                _filter(
                    weights,
                    drawn_x,
                    drawn_max,
                    rate,
                    of_rows(top_k) if any_top_k else None,
                    of_rows(top_p) if any_top_p else None,
                    of_rows(min_p) if any_min_p else None,
                )
            token_ids[rows] = _draw(weights, philox_uniform(of_rows(seeds), of_rows(positions)))
    if not with_logprobs:
        return token_ids, torch.full(token_ids.shape, float("nan"), dtype=torch.float32, device=logits.device)
    raw = logits.float()
    chosen = raw.gather(1, token_ids[:, None]).squeeze(1)
    return token_ids, chosen - raw.logsumexp(1)
