"""Speculative sampling (Leviathan et al. 2023; Chen et al. 2023): whether drafts are accepted, in torch on any device.

Sorts whole rows and waits for nothing. Sums are taken so that a row's result does not depend on the other rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from inflight_kernels.sampling.philox import philox_uniform
from inflight_kernels.sampling.reference import draw, process_logits, sum_rows
from inflight_kernels.sampling.typical import kept_by_filters

ACCEPTANCE, RESIDUAL = 1, 2
"""Purposes of the numbers that decide whether a draft is accepted, and which token takes its place. Not those of
`sample`: a draft may have been drawn with the same seed, and both must be independent of it."""


def speculative_sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
    drafts: Tensor,
    draft_probs: Tensor,
    thresholds: Tensor,
    sampled: Tensor,
    repetition_penalty: Tensor | None,
    presence_penalty: Tensor | None,
    frequency_penalty: Tensor | None,
    prompt_mask: Tensor | None,
    output_counts: Tensor | None,
    logit_bias: Tensor | None,
    allowed_mask: Tensor | None,
) -> Tensor:
    """See `inflight_kernels.speculative_sample`."""
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
    is_random = temperature > 0
    p = probabilities(x, temperature, top_k, top_p, min_p)
    p_of_draft, q_of_draft = (each.gather(1, drafts[:, None]).squeeze(1) for each in (p, draft_probs))
    chance = philox_uniform(seeds, positions, purpose=ACCEPTANCE)
    # Written so that a draft of probability 0, or NaN, is never accepted.
    by_chance = chance * q_of_draft < p_of_draft
    by_threshold = (p_of_draft >= thresholds * q_of_draft) & (p_of_draft > 0)
    is_accepted = torch.where(thresholds.isnan(), by_chance, by_threshold)
    residual = (p - draft_probs).clamp(min=0.0)
    # By rounding nothing may be left although the draft was rejected.
    residual = torch.where(sum_rows(residual) > 0, residual, p)
    drawn = torch.where(is_random, draw(residual, philox_uniform(seeds, positions, purpose=RESIDUAL)), sampled)
    return torch.where(is_accepted, drafts, drawn)


def probabilities(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """See `inflight_kernels.sampling_probabilities`."""
    is_random = temperature > 0
    x = logits.float() / torch.where(is_random, temperature, 1.0)[:, None]
    kept = kept_by_filters(x, top_k.where(is_random, 0), top_p.where(is_random, 1.0), min_p.where(is_random, 0.0))
    weights = (x - x.amax(1, keepdim=True)).exp_().masked_fill_(~kept, 0.0)
    return weights / sum_rows(weights)
