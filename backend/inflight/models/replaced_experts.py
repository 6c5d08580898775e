"""The experts of a layer of a network of transformers, computed by this engine's operation: their weights have any
format, and C++ computes them where it multiplies that. Which experts compute a token is what the class's own router
says. Knows no architecture.

Legend: T tokens, D what an expert reads and writes, E experts, I intermediate size of an expert, C = 2 I, or I without
gates, K experts of each token. Of several ranks each has some of the experts, or some of I of each.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import inflight_kernels
from inflight.distributed.tensor_parallel import TensorParallelGroup
from inflight_kernels import Activation
from inflight_kernels.cpu import Batch, Choices, Program
from inflight_kernels.moe import ExpertWeights


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredExperts:
    gate_up_ECD: ExpertWeights
    """Of each expert gate, then up; or up alone."""
    down_EDI: ExpertWeights
    gate_up_bias_EC: Tensor | None = None
    down_bias_ED: Tensor | None = None
    activation: Activation

    def compute(self, x_TD: Tensor, choices: Choices) -> Tensor:
        """(T, D): see inflight_kernels.fused_moe."""
        return inflight_kernels.fused_moe(
            x_TD,
            choices.weights_TK,
            choices.experts_TK,
            self.gate_up_ECD,
            self.down_EDI,
            gate_up_bias=self.gate_up_bias_EC,
            down_bias=self.down_bias_ED,
            activation=self.activation,
        )


class ReplacedExperts(nn.Module):
    """In the place of a module that transformers' `use_experts_implementation` has decorated, with its arguments.

    Until `settle` it computes nothing: while a network is inspected, it notes how it is used and gives zeros.
    """

    def __init__(self, size: int, dtype: torch.dtype, group: TensorParallelGroup, first_expert: int) -> None:
        """`group`: of the ranks that have the rest. `first_expert`: number of the first of this rank's."""
        super().__init__()
        self.size = size
        self.num_chosen = 0
        """Experts of each token, once it has been called."""
        self._dtype, self._group, self._first_expert = dtype, group, first_expert
        self._stored: StoredExperts | None = None
        self._compute: Callable[[Tensor, Choices], Tensor] | None = None

    @property
    def stored(self) -> StoredExperts:
        """The weights that were put in."""
        assert self._stored is not None, "experts without their weights"
        return self._stored

    def put(self, stored: StoredExperts) -> None:
        """To be called once, before the network is."""
        self._stored = stored

    def settle(self, program: Program | None = None) -> None:
        """From now on the experts compute. `program`: of them, in place of the weights, which are given up; None = the
        weights' own operation."""
        if program is None:
            self._compute = self.stored.compute
        else:
            self._stored = None
            self._compute = lambda x_TD, choices: program(x_TD, Batch.of_choices(choices))

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """(T, D), whole numbers (T, K) and floats (T, K) to (T, D). A token's weights are taken as float32, and the sum
        over its experts is rounded once, of each rank's part. Collective if they are split."""
        if hidden_states.dtype != self._dtype or hidden_states.shape[1:] != (self.size,):
            found = f"{tuple(hidden_states.shape)} of {hidden_states.dtype}"
            raise ValueError(f"experts for {self.size} features of {self._dtype} got {found}")
        if not top_k_index.shape == top_k_weights.shape == (len(hidden_states), top_k_index.shape[-1]):
            shapes = f"{tuple(top_k_index.shape)} and {tuple(top_k_weights.shape)}"
            raise ValueError(f"experts and their weights of {len(hidden_states)} tokens have the shapes {shapes}")
        if self._compute is None:
            self.num_chosen = top_k_index.shape[1]
            return torch.zeros_like(hidden_states)
        if not len(hidden_states):
            return torch.empty_like(hidden_states)
        experts_TK = top_k_index.int() - self._first_expert
        choices = Choices(top_k_weights.float().contiguous(), experts_TK.contiguous())
        return self._group.all_reduce(self._compute(hidden_states.contiguous(), choices))
