"""A mixture of experts in place of the feed-forward: a router sends each token to a few of them.

Legend: T tokens, D hidden size, E experts, of their own weights this rank's, which read and write D features or fewer,
I intermediate size of an expert on this rank, C = 2 I, or I without gates, K experts of each token. Every rank routes
by the same logits to all experts, and has some of the intermediate features of all of them, or of some of them.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

import inflight_kernels
from inflight.distributed.tensor_parallel import TensorParallelGroup
from inflight.layers.attention import AttentionMetadata
from inflight.layers.linear import ColumnParallelLinear, RowParallelLinear
from inflight.layers.mlp import MLP, GatedMLP
from inflight.layers.norm import Norm
from inflight.layers.weight import Weight
from inflight_kernels.activation.kinds import Activation
from inflight_kernels.moe import ExpertWeights
from inflight_kernels.moe.routing import Routing


@dataclass(slots=True, kw_only=True)
class Experts:
    """The weighted sum of what the chosen experts compute of a token, in the order in which the router chose them."""

    router: Weight
    """(E, D), whole on every rank."""
    router_norm: Norm[Tensor] | None = None
    """Of what the router reads; None = the same as experts."""
    norm: Norm[Tensor] | None = None
    """Of what experts read, where the router has a norm of its own."""
    router_bias_E: Tensor | None = None
    choice_bias_E: Tensor | None = None
    """float32, added to the scores for the choice alone."""
    factors_E: Tensor | None = None
    """float32, of the weight of each expert."""
    routing: Routing
    first_expert: int = 0
    """Number of the first of this rank's experts."""
    gate_up_ECD: ExpertWeights
    """Of each expert gate, then up; or up alone."""
    gate_up_bias_EC: Tensor | None = None
    down_EDI: ExpertWeights
    down_bias_ED: Tensor | None = None
    """On the first of the ranks that share the expert only, so that the sum contains it once."""
    activation: Activation = Activation.SILU
    narrow: ColumnParallelLinear | None = None
    """Makes of hidden features the fewer that experts read, whole on every rank, as the next."""
    widen: RowParallelLinear | None = None
    """Makes hidden features of this rank's part of what they give."""
    group: TensorParallelGroup
    deterministic: bool = False

    def __call__(self, hidden_TD: Tensor, metadata: AttentionMetadata) -> Tensor:
        routed_TD = hidden_TD if self.router_norm is None else self.router_norm(hidden_TD, metadata)
        logits_TE = self.router.multiply(routed_TD, self.router_bias_E, self.deterministic)
        weights_TK, experts_TK = inflight_kernels.route_experts(
            logits_TE, self.routing, self.choice_bias_E, self.factors_E, self.first_expert
        )
        hidden_TD = hidden_TD if self.norm is None else self.norm(hidden_TD, metadata)
        y_TD = inflight_kernels.fused_moe(
            hidden_TD if self.narrow is None else self.narrow(hidden_TD, metadata),
            weights_TK,
            experts_TK,
            self.gate_up_ECD,
            self.down_EDI,
            deterministic=self.deterministic,
            gate_up_bias=self.gate_up_bias_EC,
            down_bias=self.down_bias_ED,
            activation=self.activation,
        )
        return self.group.all_reduce(y_TD if self.widen is None else self.widen(y_TD, metadata))


@dataclass(slots=True, kw_only=True)
class SharedExperts:
    """The sum of what the chosen experts compute of a token and of what other ones do, which compute every token: a
    feed-forward, split like one. The ranks' shares of both are summed at once."""

    chosen: Experts
    shared: GatedMLP | MLP
    """Both without any sum over the ranks."""
    gate: Weight | None
    """(1, D), whole on every rank: its sigmoid is a token's factor of what `shared` computes; None = 1."""
    group: TensorParallelGroup
    deterministic: bool = False

    def __call__(self, hidden_TD: Tensor, metadata: AttentionMetadata) -> Tensor:
        shared_TD = self.shared(hidden_TD, metadata)
        if self.gate is not None:
            gate_T1 = self.gate.multiply(hidden_TD, None, self.deterministic)
            shared_TD = inflight_kernels.sigmoid_mul(shared_TD, gate_T1)
        return self.group.all_reduce(self.chosen(hidden_TD, metadata) + shared_TD)
