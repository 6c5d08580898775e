"""A mixture of experts: routing of tokens to experts, and the experts' feed-forward layers as grouped products.

E experts of intermediate size I; each token is routed to k of them.
"""

from __future__ import annotations

from torch import Tensor

from inflight_kernels.activation.kinds import Activation
from inflight_kernels.dispatch import implementation
from inflight_kernels.matmul.coded_weight import CodedWeight
from inflight_kernels.matmul.weight_formats import BlockScaledWeight
from inflight_kernels.moe.routing import Routing

ExpertWeights = Tensor | CodedWeight | BlockScaledWeight
"""(E, N, K): floats, codes on a CPU, or fp8 with a scale for each block."""

MAX_EXPERTS = 2048
"""A row of router logits stays in one program's registers."""
MAX_CHOSEN_EXPERTS = 32
"""The largest are found one after the other."""


def route_experts(
    router_logits: Tensor,
    routing: Routing,
    bias: Tensor | None = None,
    factors: Tensor | None = None,
    first_expert: int = 0,
) -> tuple[Tensor, Tensor]:
    """The chosen experts of each token and their weights, from `router_logits` (T, E), float.

    Scores are the softmax or the sigmoids of the logits, in float32. The highest are chosen, in descending order, among
    equal ones the lower expert first, of the groups that are chosen likewise. What is compared are the scores plus
    `bias` (E,) float32, which is no part of the weights (DeepSeek-V3, GLM-4.5, ERNIE 4.5), or, where nothing is added
    to a score, the logits. NaN counts as -inf. Weights are the chosen experts' scores, divided by their sum and
    multiplied as `routing` says, and then by each one's own of `factors` (E,) float32 (Gemma 4). E is at most
    MAX_EXPERTS, `num_chosen` at most MAX_CHOSEN_EXPERTS. Returns weights (T, k) float32 and experts (T, k) int32, which
    are counted from `first_expert` on: a rank that has experts 4 to 7 gets 0 to 3 for its own, and others, which
    `fused_moe` skips. A row's result does not depend on others.
    """
    function = implementation(router_logits, __name__).route_experts
    result: tuple[Tensor, Tensor] = function(router_logits, routing, bias, factors, first_expert)
    return result


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
    """sum_j weights[t, j] * (w_down[e] (f(gate) * up) + down_bias[e]), with gate | up = w_gate_up[e] x[t] +
    gate_up_bias[e] and e = experts[t, j]; of experts without a gate (Nemotron-H) w_down[e] f(up).

    x (T, H) float, `weights` (T, k) float32, `experts` (T, k) int32, `w_gate_up` (E, 2I, H), or (E, I, H) without
    gates, and `w_down` (E, H, I) of x's dtype, or both fp8 by blocks, or, on a CPU, either of them codes;
    `gate_up_bias` (E, 2I) or (E, I) and `down_bias` (E, H) of x's dtype. f is `activation`; with a bias, without a
    gate, or where it is not SILU, gate, up and f(gate) are rounded to the dtype as in a dense layer. What meets fp8 is
    quantised as by `quantize_per_token` in groups of 128: x, and the activated rows, which are rounded to x's dtype
    before. A choice outside 0 .. E - 1 (usually -1: a padded token, another rank's expert) is skipped. Each expert's
    output is rounded to the dtype; the sum over j is float32, in the order of j. Returns (T, H), written to `out` if
    given (which must not be x). Equal inputs always give equal bits; with `deterministic` a row's bits are also the
    same in every batch. Raises ValueError for an activation that only experts with gates have.
    """
    if w_gate_up.shape[1] == w_down.shape[2] and activation is Activation.CLAMPED_SWIGLU:
        raise ValueError(f"{activation.value} is for experts with gates only")
    function = implementation(x, __name__).fused_moe
    result: Tensor = function(
        x, weights, experts, w_gate_up, w_down, out, deterministic, gate_up_bias, down_bias, activation
    )
    return result
