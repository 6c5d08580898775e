"""A mixture of experts: routing of tokens to experts, and the experts' feed-forward layers as grouped products.

E experts of intermediate size I; each token is routed to k of them.
"""

from __future__ import annotations

from torch import Tensor

from inflight_kernels.dispatch import implementation
from inflight_kernels.matmul.coded_weight import CodedWeight

MAX_EXPERTS = 2048
"""A row of router logits stays in one program's registers."""
MAX_CHOSEN_EXPERTS = 32
"""The largest are found one after the other."""


def route_experts(router_logits: Tensor, top_k: int, renormalize: bool = True) -> tuple[Tensor, Tensor]:
    """The `top_k` most probable experts of each token and their weights, from `router_logits` (T, E), float.

    Softmax over all E in float32, then the largest, in descending order; among equal logits the lower expert comes
    first, and NaN counts as -inf. With `renormalize` the chosen weights sum to 1 (Mixtral; Qwen3-MoE with
    norm_topk_prob). E is at most MAX_EXPERTS, `top_k` at most MAX_CHOSEN_EXPERTS. Returns weights (T, k) float32 and
    experts (T, k) int32. A row's result does not depend on others.
    """
    function = implementation(router_logits, __name__).route_experts
    result: tuple[Tensor, Tensor] = function(router_logits, top_k, renormalize)
    return result


def fused_moe(
    x: Tensor,
    weights: Tensor,
    experts: Tensor,
    w_gate_up: Tensor | CodedWeight,
    w_down: Tensor | CodedWeight,
    out: Tensor | None = None,
    deterministic: bool = False,
) -> Tensor:
    """sum_j weights[t, j] * w_down[e] (silu(gate) * up), with gate | up = w_gate_up[e] x[t] and e = experts[t, j].

    x (T, H) float, `weights` (T, k) float32, `experts` (T, k) int32, `w_gate_up` (E, 2I, H) and `w_down` (E, H, I) of
    x's dtype, or, on a CPU, both codes. A choice outside 0 .. E - 1 (usually -1: a padded token, another rank's expert)
    is skipped. Each expert's output is rounded to the dtype; the sum over j is float32, in the order of j. Returns
    (T, H), written to `out` if given (which must not be x). Equal inputs always give equal bits; with `deterministic` a
    row's bits are also the same in every batch.
    """
    result: Tensor = implementation(x, __name__).fused_moe(x, weights, experts, w_gate_up, w_down, out, deterministic)
    return result
