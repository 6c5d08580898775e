"""Parts between which tokens go in fp8: what a norm or an activation computes is quantised in the same launch.

A product of fp8 weights quantises what it multiplies. Where a norm or an activation makes that, and nothing else reads
it, they hand it over quantised: with a launch less, and without writing the floats. Which parts do so is chosen when a
layer is composed. What they quantise is rounded to the type of the activations first, as it is where floats are handed
over, so the bits are the same; only on a GPU a norm that quantises may add up a row in another order. If the product
behind them has a scale for its input, they take that.

Legend: T tokens, V vocabulary, D hidden size, I input features, O output features of this rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

import inflight_kernels
from inflight.distributed.tensor_parallel import TensorParallelGroup
from inflight.layers.attention import AttentionMetadata
from inflight.layers.linear import ColumnParallelLinear, RowParallelLinear
from inflight.layers.mlp import GatedMLP
from inflight.layers.norm import Norm, RMSNorm
from inflight.layers.part import Part
from inflight.layers.weight import Fp8BlockWeight, Fp8Tokens, Fp8Weight
from inflight_kernels import Activation


def fuse_quantization(norm: RMSNorm, part: Part[Tensor]) -> tuple[Norm[Any], Part[Any]]:
    """`norm` and the `part` behind it, with tokens in fp8 between them; as they are if the part needs floats.

    A product needs them for low-rank adapters, and if its weight is of another format; a gated MLP if one of its two
    products does; experts always do.
    """
    fused: Fp8Linear | Fp8GatedMLP | None = None
    if isinstance(part, ColumnParallelLinear):
        fused = _of_tokens_in_fp8(part)
    elif isinstance(part, GatedMLP) and part.gate_multiplier == 1.0:
        gate_up, down = _of_tokens_in_fp8(part.gate_up), _of_tokens_in_fp8(part.down)
        if gate_up is not None and down is not None:
            fused = Fp8GatedMLP(gate_up, down, part.down.group, part.activation)
    if fused is None:
        return norm, part
    first = fused if isinstance(fused, Fp8Linear) else fused.gate_up
    return Fp8RMSNorm(norm.weight_D, norm.eps, first.weight.input_scale, first.weight.group_size), fused


def _of_tokens_in_fp8(linear: ColumnParallelLinear | RowParallelLinear) -> Fp8Linear | None:
    """A rank's product, without any sum over the ranks; None if it needs floats."""
    if linear.lora is not None or not isinstance(linear.weight, Fp8Weight | Fp8BlockWeight):
        return None
    return Fp8Linear(linear.weight, linear.bias_O, linear.deterministic)


@dataclass(slots=True)
class Fp8RMSNorm:
    """See Norm."""

    weight_D: Tensor
    eps: float
    scale: float | None
    """Of all tokens; None = each has its own."""
    group_size: int
    """Features of a token that share a scale; 0 = all."""

    def __call__(self, hidden_TD: Tensor, metadata: AttentionMetadata) -> Fp8Tokens:
        normed = inflight_kernels.rms_norm_quantized(
            hidden_TD, self.weight_D, self.eps, scale=self.scale, group_size=self.group_size
        )
        assert len(normed) == 2
        return Fp8Tokens(*normed, hidden_TD.dtype)

    def of_embeddings(self, token_ids_T: Tensor, table_VD: Tensor) -> tuple[Fp8Tokens, Tensor]:
        """See Norm."""
        values_TD, scale_T, rows_TD = inflight_kernels.embedding_rms_norm_quantized(
            token_ids_T, table_VD, self.weight_D, self.eps, scale=self.scale, group_size=self.group_size
        )
        return Fp8Tokens(values_TD, scale_T, table_VD.dtype), rows_TD

    def add(self, hidden_TD: Tensor, residual_TD: Tensor, metadata: AttentionMetadata) -> tuple[Fp8Tokens, Tensor]:
        """See Norm."""
        normed = inflight_kernels.rms_norm_quantized(
            hidden_TD, self.weight_D, self.eps, residual_TD, scale=self.scale, group_size=self.group_size
        )
        assert len(normed) == 3
        values_TD, scale_T, sum_TD = normed
        return Fp8Tokens(values_TD, scale_T, hidden_TD.dtype), sum_TD


@dataclass(slots=True)
class Fp8Linear:
    """A rank's product; see ColumnParallelLinear."""

    weight: Fp8Weight | Fp8BlockWeight
    bias_O: Tensor | None
    deterministic: bool = False

    def __call__(self, x_TI: Fp8Tokens, metadata: AttentionMetadata) -> Tensor:
        return self.weight.multiply_quantized(x_TI, self.bias_O, self.deterministic)


@dataclass(slots=True)
class Fp8GatedMLP:
    """See GatedMLP."""

    gate_up: Fp8Linear
    down: Fp8Linear
    group: TensorParallelGroup
    """Over which the outputs of `down` are summed."""
    activation: Activation

    def __call__(self, hidden_TD: Fp8Tokens, metadata: AttentionMetadata) -> Tensor:
        gate_up_TO = self.gate_up(hidden_TD, metadata)
        weight = self.down.weight
        values_TI, scale_T = inflight_kernels.activate_and_mul_quantized(
            gate_up_TO, scale=weight.input_scale, group_size=weight.group_size, activation=self.activation
        )
        return self.group.all_reduce(self.down(Fp8Tokens(values_TI, scale_T, gate_up_TO.dtype), metadata))
