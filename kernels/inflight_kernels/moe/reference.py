"""The mixture of experts in torch: the router, and one expert after the other."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from inflight_kernels.activation.reference import silu_and_mul
from inflight_kernels.matmul.coded_weight import CodedWeight
from inflight_kernels.matmul.reference import coded_linear, linear


def route_experts(router_logits: Tensor, top_k: int, renormalize: bool = True) -> tuple[Tensor, Tensor]:
    """Softmax over all experts, then the largest `top_k` by a stable sort: among equals the lower expert first."""
    logits = router_logits.float()
    logits = logits.masked_fill(logits.isnan(), float("-inf"))
    peak = logits.amax(dim=-1, keepdim=True).clamp(min=-3.0e38)
    shares = torch.exp(logits - peak)
    experts = logits.argsort(dim=-1, descending=True, stable=True)[:, :top_k]
    weights = shares.gather(-1, experts)
    total = (weights if renormalize else shares).sum(dim=-1, keepdim=True)
    return weights / torch.where(total > 0, total, torch.ones_like(total)), experts.int()


def fused_moe(
    x: Tensor,
    weights: Tensor,
    experts: Tensor,
    w_gate_up: Tensor | CodedWeight,
    w_down: Tensor | CodedWeight,
    out: Tensor | None = None,
    deterministic: bool = False,
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
        activated = silu_and_mul(_grouped(x[order // top_k], counts, w_gate_up, deterministic))
        products[order] = _grouped(activated, counts, w_down, deterministic)
    # An invalid choice adds nothing, whatever its weight.
    masked = weights.masked_fill(~is_valid, 0.0)
    total = torch.zeros_like(x, dtype=torch.float32)
    for choice, share in zip(products.view(num_tokens, top_k, -1).unbind(1), masked.unbind(1), strict=True):
        total += choice.float() * share[:, None]
    return total.to(x.dtype) if out is None else out.copy_(total)


def _grouped(rows: Tensor, counts: Sequence[int], weights: Tensor | CodedWeight, deterministic: bool) -> Tensor:
    """The product of each expert's rows, the next `counts[expert]` of `rows`, and its matrix of `weights`."""
    used = [expert for expert, count in enumerate(counts) if count]
    groups = rows.split([counts[expert] for expert in used])

    def product(group: Tensor, expert: int) -> Tensor:
        if isinstance(weights, CodedWeight):
            return coded_linear(group, weights.of_expert(expert), None, deterministic)
        return linear(group, weights[expert], None, deterministic)

    return torch.cat([product(group, expert) for group, expert in zip(groups, used, strict=True)])
