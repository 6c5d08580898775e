"""The router of a mixture of experts: scores of all experts, then the few highest.

    s = softmax(logits)  or  sigmoid(logits)     in float32
    c = s + bias                                 what is compared; the logits, where no scores are added to anything
    groups: the highest by max(c), or by the sum of their two highest c; the lower group first among equals
    (e_1 .. e_k) = the k highest c of these groups, descending, among equals the lower expert first
    w_j = scale * s_{e_j}  or, renormalised,  scale * s_{e_j} / sum_j s_{e_j}     sigmoids: / (sum_j s_{e_j} + 1e-20)
    w_j *= factor_{e_j}                                                           only with factors

A NaN logit counts as -inf, so that an expert's index is always valid; the weights of a row without a finite logit are
0. Each row is computed within one program and does not depend on the batch. Bytes per row: E times the size of the
dtype read, 8 k written; at E = 128, k = 8 and 64 rows that is 20 KiB, 5 ns at 4.3 TB/s: it costs only the launch. At 32
768 rows it is 10 MiB, 2.4 us.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from inflight_kernels.common.checks import (
    cdiv,
    check_float,
    check_unit_stride,
    check_vector,
    next_power_of_2,
)
from inflight_kernels.moe import MAX_CHOSEN_EXPERTS, MAX_EXPERTS
from inflight_kernels.moe.routing import Routing, Scores

# Rows per program, one per warp, so that no reduction crosses warps. Not measured yet.
BLOCK_T = 4


@triton.jit
def _highest(compared, left, offs, BLOCK: tl.constexpr):
    """Of each row the highest of what is `left`, and where it is; the lowest place among equals."""
    candidates = tl.where(left, compared, float("-inf"))
    highest = tl.max(candidates, axis=1)
    place = tl.min(tl.where(left & (candidates == highest[:, None]), offs[None, :], BLOCK), axis=1)
    return highest, place


@triton.jit
def _of_chosen_groups(
    compared, left, offs_e, num_experts,
    NUM_GROUPS: tl.constexpr, NUM_CHOSEN_GROUPS: tl.constexpr, ADDS_SCORES: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_G: tl.constexpr,
):  # fmt: skip
    """Those of `left` whose group is one of the best."""
    offs_g = tl.arange(0, BLOCK_G)
    group_of = offs_e // (num_experts // NUM_GROUPS)
    best = tl.full([BLOCK_T, BLOCK_G], float("-inf"), dtype=tl.float32)
    for g in tl.static_range(NUM_GROUPS):
        own = left & (group_of == g)[None, :]
        score, expert = _highest(compared, own, offs_e, BLOCK_E)
        if ADDS_SCORES:
            second, _ = _highest(compared, own & (offs_e[None, :] != expert[:, None]), offs_e, BLOCK_E)
            score += second
        best = tl.where(offs_g[None, :] == g, score[:, None], best)
    left_groups = (best == best) & (offs_g < NUM_GROUPS)[None, :]
    chosen = left & (offs_e < 0)[None, :]
    for _ in tl.static_range(NUM_CHOSEN_GROUPS):
        _, group = _highest(best, left_groups, offs_g, BLOCK_G)
        left_groups = left_groups & (offs_g[None, :] != group[:, None])
        chosen = chosen | (left & (group_of[None, :] == group[:, None]))
    return chosen


# One compiled kernel for every number of tokens, and for all ranks: triton would otherwise specialise for 1 and for
# multiples of 16.
@triton.jit(do_not_specialize=["num_tokens", "first_expert"])
def route_experts_kernel(
    logits_ptr,
    bias_ptr,
    factors_ptr,
    weights_ptr,
    experts_ptr,
    num_tokens,
    num_experts,
    first_expert,
    stride_logits,
    scale,
    TOP_K: tl.constexpr,
    SIGMOID: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    EPSILON: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    NUM_CHOSEN_GROUPS: tl.constexpr,
    ADDS_SCORES: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    pid_t = tl.program_id(0).to(tl.int64)
    offs_t = pid_t * BLOCK_T + tl.arange(0, BLOCK_T)
    offs_e = tl.arange(0, BLOCK_E)
    offs_k = tl.arange(0, BLOCK_K)
    mask_t = offs_t < num_tokens
    mask = mask_t[:, None] & (offs_e < num_experts)[None, :]
    logits = tl.load(logits_ptr + offs_t[:, None] * stride_logits + offs_e[None, :], mask=mask, other=float("-inf"))
    logits = logits.to(tl.float32)
    logits = tl.where(logits == logits, logits, float("-inf"))
    # Finite even in a row of -inf, whose shares are then 0 instead of NaN.
    peak = tl.maximum(tl.max(logits, axis=1), -3.0e38)
    if SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-logits))
        total = tl.full([BLOCK_T], 1.0, dtype=tl.float32)
    else:
        scores = tl.exp(logits - peak[:, None])
        total = tl.sum(scores, axis=1)
    compared = logits
    if ADDS_SCORES or bias_ptr is not None:
        compared = scores if SIGMOID else scores / tl.where(total > 0.0, total, 1.0)[:, None]
        if bias_ptr is not None:
            compared += tl.load(bias_ptr + offs_e, mask=offs_e < num_experts, other=0.0)[None, :]
        compared = tl.where(compared == compared, compared, float("-inf"))

    left = (offs_t[:, None] >= 0) & (offs_e < num_experts)[None, :]
    if NUM_CHOSEN_GROUPS < NUM_GROUPS:
        left = _of_chosen_groups(
            compared, left, offs_e, num_experts, NUM_GROUPS, NUM_CHOSEN_GROUPS, ADDS_SCORES, BLOCK_T, BLOCK_E, BLOCK_G
        )
    weights = tl.zeros([BLOCK_T, BLOCK_K], dtype=tl.float32)
    experts = tl.zeros([BLOCK_T, BLOCK_K], dtype=tl.int32)
    for j in tl.static_range(TOP_K):
        largest, expert = _highest(compared, left, offs_e, BLOCK_E)
        left = left & (offs_e[None, :] != expert[:, None])
        experts = tl.where(offs_k[None, :] == j, expert[:, None], experts)
        if SIGMOID or ADDS_SCORES or bias_ptr is not None:
            score = tl.sum(tl.where(offs_e[None, :] == expert[:, None], scores, 0.0), axis=1)
        else:
            score = tl.exp(largest - peak)
        weights = tl.where(offs_k[None, :] == j, score[:, None], weights)
    if RENORMALIZE:
        total = tl.sum(weights, axis=1)
    if SIGMOID:
        if RENORMALIZE:
            weights = weights / (total + EPSILON)[:, None]
    else:
        weights = weights / tl.where(total > 0.0, total, 1.0)[:, None]
    if scale is not None:
        weights *= scale
    if factors_ptr is not None:
        weights *= tl.load(factors_ptr + experts)

    offs_out = offs_t[:, None] * TOP_K + offs_k[None, :]
    mask_out = mask_t[:, None] & (offs_k < TOP_K)[None, :]
    tl.store(weights_ptr + offs_out, weights, mask=mask_out)
    tl.store(experts_ptr + offs_out, experts - first_expert, mask=mask_out)


def route_experts(
    router_logits: Tensor,
    routing: Routing,
    bias: Tensor | None = None,
    factors: Tensor | None = None,
    first_expert: int = 0,
) -> tuple[Tensor, Tensor]:
    """Launch the router on `router_logits` (T, E); see `inflight_kernels.route_experts`."""
    check_float("router_logits", router_logits)
    if router_logits.dim() != 2:
        raise ValueError(f"router_logits must be (num_tokens, num_experts), got {tuple(router_logits.shape)}")
    check_unit_stride("router_logits", router_logits)
    num_tokens, num_experts = router_logits.shape
    top_k = routing.num_chosen
    if fault := routing.fault(num_experts):
        raise ValueError(fault)
    if top_k > MAX_CHOSEN_EXPERTS:
        raise ValueError(f"route_experts chooses at most {MAX_CHOSEN_EXPERTS} experts, got {top_k}")
    if num_experts > MAX_EXPERTS:
        raise ValueError(f"route_experts holds a row in registers: at most {MAX_EXPERTS} experts, got {num_experts}")
    for name, vector in (("bias", bias), ("factors", factors)):
        if vector is not None:
            check_vector(name, vector, num_experts, torch.float32)
    weights = torch.empty((num_tokens, top_k), dtype=torch.float32, device=router_logits.device)
    experts = torch.empty((num_tokens, top_k), dtype=torch.int32, device=router_logits.device)
    if num_tokens:
        route_experts_kernel[(cdiv(num_tokens, BLOCK_T),)](
            router_logits,
            bias,
            factors,
            weights,
            experts,
            num_tokens,
            num_experts,
            first_expert,
            router_logits.stride(0),
            None if routing.scale == 1.0 else routing.scale,
            TOP_K=top_k,
            SIGMOID=routing.scores is Scores.SIGMOID,
            RENORMALIZE=routing.renormalize,
            EPSILON=routing.epsilon,
            NUM_GROUPS=routing.num_groups,
            NUM_CHOSEN_GROUPS=routing.num_chosen_groups,
            ADDS_SCORES=routing.adds_scores,
            BLOCK_T=BLOCK_T,
            BLOCK_E=next_power_of_2(num_experts),
            BLOCK_G=next_power_of_2(routing.num_groups),
            BLOCK_K=next_power_of_2(top_k),
            num_warps=BLOCK_T,
        )
    return weights, experts
