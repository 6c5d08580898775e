"""Locally typical sampling (Meister et al. 2022): which tokens of a row may be drawn, in torch on any device.

Sorts whole rows and waits for nothing. Sums are taken so that a row's result does not depend on the other rows.
"""

from __future__ import annotations

from torch import Tensor

from inflight_kernels.sampling.reference import process_logits, sum_rows


def typical_mask(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    typical_p: Tensor,
    repetition_penalty: Tensor | None,
    presence_penalty: Tensor | None,
    frequency_penalty: Tensor | None,
    prompt_mask: Tensor | None,
    output_counts: Tensor | None,
    logit_bias: Tensor | None,
    allowed_mask: Tensor | None,
) -> Tensor:
    """See `inflight_kernels.typical_mask`."""
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
    x = x / temperature[:, None]
    x = x.masked_fill(~kept_by_filters(x, top_k, top_p, min_p), float("-inf"))
    log_probs = x.log_softmax(1)
    entropy = sum_rows((-log_probs * log_probs.exp()).nan_to_num_(0.0))
    distance = (-log_probs - entropy).abs()
    rising, order = distance.sort(dim=1, stable=True)
    running = x.gather(1, order).softmax(1).cumsum(1)
    last = (running < typical_p[:, None]).sum(1, keepdim=True).clamp_(max=x.shape[1] - 1)
    # Impossible tokens are infinitely far away: even where rounding keeps the mass below p, they are not kept.
    return (distance <= rising.gather(1, last)) & (x > float("-inf"))


def kept_by_filters(x: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """bool (B, V): what top-k, top-p and min-p keep, in this order, as `sample` has them."""
    vocab_size = x.shape[1]
    falling, order = x.sort(dim=1, descending=True, stable=True)
    k = top_k.long().masked_fill(top_k <= 0, vocab_size).clamp(max=vocab_size)
    kept = falling >= falling.gather(1, k[:, None] - 1)
    weights = (falling - falling[:, :1]).exp_().masked_fill_(~kept, 0.0)
    before = weights.cumsum(1) - weights
    # With p = 1 nothing is dropped, also not by rounding.
    kept &= (before < top_p[:, None] * sum_rows(weights)) | (top_p[:, None] >= 1)
    kept &= weights >= min_p[:, None]
    kept[:, 0] = True
    return kept.new_zeros(kept.shape).scatter_(1, order, kept)
