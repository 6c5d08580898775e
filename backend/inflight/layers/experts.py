"""A mixture of experts in place of the gated feed-forward: a router sends each token to a few of them.

Legend: T tokens, D hidden size, E experts, I intermediate size of an expert on this rank, C = 2 I, K experts of each
token. Every rank routes by the same logits, and has some of the intermediate features of every expert.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

import inflight_kernels
from inflight.distributed.tensor_parallel import TensorParallelGroup
from inflight.layers.attention import AttentionMetadata
from inflight.layers.weight import Weight
from inflight_kernels import CodedWeight


@dataclass(slots=True, kw_only=True)
class Experts:
    """The weighted sum of what the chosen experts compute of a token, in the order in which the router chose them."""

    router: Weight
    """(E, D), whole on every rank."""
    gate_up_ECD: Tensor | CodedWeight
    """Of each expert gate, then up."""
    down_EDI: Tensor | CodedWeight
    num_chosen: int
    renormalize: bool
    """Whether a token's weights sum to 1."""
    group: TensorParallelGroup
    deterministic: bool = False

    def __call__(self, hidden_TD: Tensor, metadata: AttentionMetadata) -> Tensor:
        logits_TE = self.router.multiply(hidden_TD, None, self.deterministic)
        weights_TK, experts_TK = inflight_kernels.route_experts(logits_TE, self.num_chosen, self.renormalize)
        y_TD = inflight_kernels.fused_moe(
            hidden_TD, weights_TK, experts_TK, self.gate_up_ECD, self.down_EDI, deterministic=self.deterministic
        )
        return self.group.all_reduce(y_TD)
