"""The mixture of experts in torch: the router, and one expert after the other."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from inflight_kernels.activation.kinds import Activation
from inflight_kernels.activation.reference import activate, activate_and_mul, sigmoid
from inflight_kernels.matmul.coded_weight import CodedWeight
from inflight_kernels.matmul.reference import block_scaled_linear, coded_linear, linear
from inflight_kernels.matmul.weight_formats import BLOCK_INPUTS, BlockScaledWeight
from inflight_kernels.moe import ExpertWeights
from inflight_kernels.moe.routing import Routing, Scores
from inflight_kernels.quantization.reference import quantize_per_token


def route_experts(
    router_logits: Tensor,
    routing: Routing,
    bias: Tensor | None = None,
    factors: Tensor | None = None,
    first_expert: int = 0,
) -> tuple[Tensor, Tensor]:
    """Scores of all experts, then the highest by a stable sort: among equals the lower expert first."""
    logits = router_logits.float()
    logits = logits.masked_fill(logits.isnan(), float("-inf"))
    if routing.scores is Scores.SIGMOID:
        scores, total = sigmoid(logits), None
    else:
        peak = logits.amax(dim=-1, keepdim=True).clamp(min=-3.0e38)
        scores = torch.exp(logits - peak)
        total = _positive(scores.sum(dim=-1, keepdim=True))
    compared = logits
    if bias is not None or routing.adds_scores:
        compared = scores if total is None else scores / total
        if bias is not None:
            compared = compared + bias
        compared = compared.masked_fill(compared.isnan(), float("-inf"))
    # Stable sorts: an expert of another group comes behind all others, though these may be -inf as well.
    order = compared.argsort(dim=-1, descending=True, stable=True)
    if routing.has_groups:
        may_be_chosen = _of_chosen_groups(compared, routing).gather(-1, order)
        order = order.gather(-1, may_be_chosen.int().argsort(dim=-1, descending=True, stable=True))
    experts = order[:, : routing.num_chosen]
    weights = scores.gather(-1, experts)
    if routing.renormalize:
        total = weights.sum(dim=-1, keepdim=True)
        total = total + routing.epsilon if routing.scores is Scores.SIGMOID else _positive(total)
    if total is not None:
        weights = weights / total
    if routing.scale != 1.0:
        weights = weights * routing.scale
    return weights if factors is None else weights * factors[experts], experts.int() - first_expert


def _positive(total: Tensor) -> Tensor:
    """1 in the place of a sum of nothing but zeros."""
    return torch.where(total > 0, total, torch.ones_like(total))


def _of_chosen_groups(compared: Tensor, routing: Routing) -> Tensor:
    """(T, E): whether the group of an expert is one of the best."""
    groups = compared.unflatten(-1, (routing.num_groups, -1))
    highest = groups.sort(dim=-1, descending=True).values
    best = highest[..., :2].sum(-1) if routing.adds_scores else highest[..., 0]
    chosen = best.argsort(dim=-1, descending=True, stable=True)[:, : routing.num_chosen_groups]
    mask = torch.zeros_like(best, dtype=torch.bool).scatter(-1, chosen, True)
    return mask[..., None].expand(groups.shape).flatten(-2)


def fused_moe(
    x: Tensor,
    weights: Tensor,
    experts: Tensor,
    w_gate_up: ExpertWeights,
    w_down: ExpertWeights,
    out: Tensor | None = None,
    deterministic: bool = False,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    activation: Activation = Activation.SILU,
) -> Tensor:
    """The feed-forward of each expert that has tokens, weighted and summed in float32."""
    (num_tokens, top_k), num_experts = experts.shape, w_gate_up.shape[0]
    is_valid = (experts >= 0) & (experts < num_experts)
    chosen = torch.where(is_valid, experts, num_experts).flatten()
    order = chosen.argsort(stable=True)
    counts = chosen.bincount(minlength=num_experts + 1).tolist()[:num_experts]
    order = order[: sum(counts)]
    products = torch.zeros((num_tokens * top_k, x.shape[1]), dtype=x.dtype, device=x.device)
    if len(order):
        gate_up = _grouped(x[order // top_k], counts, w_gate_up, gate_up_bias, deterministic)
        is_gated = w_gate_up.shape[1] > w_down.shape[2]
        activated = activate_and_mul(gate_up, activation) if is_gated else activate(gate_up, activation)
        products[order] = _grouped(activated, counts, w_down, down_bias, deterministic)
    # An invalid choice adds nothing, whatever its weight.
    masked = weights.masked_fill(~is_valid, 0.0)
    total = torch.zeros_like(x, dtype=torch.float32)
    for choice, share in zip(products.view(num_tokens, top_k, -1).unbind(1), masked.unbind(1), strict=True):
        total += choice.float() * share[:, None]
    return total.to(x.dtype) if out is None else out.copy_(total)


def _grouped(
    rows: Tensor, counts: Sequence[int], weights: ExpertWeights, biases: Tensor | None, deterministic: bool
) -> Tensor:
    """The product of each expert's rows, the next `counts[expert]` of `rows`, and its matrix of `weights`, plus its
    bias."""
    used = [expert for expert, count in enumerate(counts) if count]
    groups = rows.split([counts[expert] for expert in used])

    def product(group: Tensor, expert: int) -> Tensor:
        bias = None if biases is None else biases[expert]
        if isinstance(weights, CodedWeight):
            return coded_linear(group, weights.of_expert(expert), bias, deterministic)
        if isinstance(weights, BlockScaledWeight):
            quantized = quantize_per_token(group, group_size=BLOCK_INPUTS)
            return block_scaled_linear(*quantized, weights.of_expert(expert), bias, group.dtype, deterministic)
        return linear(group, weights[expert], bias, deterministic)

    return torch.cat([product(group, expert) for group, expert in zip(groups, used, strict=True)])
