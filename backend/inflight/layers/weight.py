"""The weight of a matrix product, in the format in which it is stored. The format decides which operation multiplies.

Knows neither ranks nor checkpoints. Legend: T tokens, I input features, O output features.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

import inflight_kernels
from inflight_kernels import Activation, BlockScaledWeight, CodedWeight, Int4Weight
from inflight_kernels.matmul.weight_formats import BLOCK_INPUTS


class Weight(Protocol):
    """A matrix (O, I) in some format."""

    def multiply(self, x_TI: Tensor, bias_O: Tensor | None, deterministic: bool = False) -> Tensor:
        """x W^T + bias: (T, O) of the dtype of `x_TI`. `deterministic`: the bits of a row depend on that row alone."""
        ...

    def multiply_gated(
        self, x_TI: Tensor, bias_O: Tensor | None, activation: Activation, deterministic: bool = False
    ) -> Tensor:
        """`activation` of the first half of the outputs of `multiply` times the second half: (T, O / 2)."""
        ...


@dataclass(slots=True)
class DenseWeight:
    """One float per element, of the dtype of the activations."""

    values_OI: Tensor

    def multiply(self, x_TI: Tensor, bias_O: Tensor | None, deterministic: bool = False) -> Tensor:
        """See Weight."""
        return inflight_kernels.linear(x_TI, self.values_OI, bias_O, deterministic)

    def multiply_gated(
        self, x_TI: Tensor, bias_O: Tensor | None, activation: Activation, deterministic: bool = False
    ) -> Tensor:
        """See Weight."""
        return inflight_kernels.gated_linear(x_TI, self.values_OI, bias_O, deterministic, activation)


@dataclass(slots=True)
class Int4Groups:
    """4 bits per element; the elements of each group of inputs share a scale and a zero point for each output."""

    packed: Int4Weight

    def multiply(self, x_TI: Tensor, bias_O: Tensor | None, deterministic: bool = False) -> Tensor:
        """See Weight. `x_TI` has the dtype that the weight is packed for."""
        return inflight_kernels.int4_linear(x_TI, self.packed, bias_O, deterministic)

    def multiply_gated(
        self, x_TI: Tensor, bias_O: Tensor | None, activation: Activation, deterministic: bool = False
    ) -> Tensor:
        """See Weight."""
        return inflight_kernels.activate_and_mul(self.multiply(x_TI, bias_O, deterministic), activation)


@dataclass(slots=True)
class CodedGroups:
    """4 or 8 bits per element in one of several codes, which C++ multiplies on a CPU; activations stay as they are."""

    packed: CodedWeight

    def multiply(self, x_TI: Tensor, bias_O: Tensor | None, deterministic: bool = False) -> Tensor:
        """See Weight. Sums are in float32, rounded once."""
        return inflight_kernels.coded_linear(x_TI, self.packed, bias_O, deterministic)

    def multiply_gated(
        self, x_TI: Tensor, bias_O: Tensor | None, activation: Activation, deterministic: bool = False
    ) -> Tensor:
        """See Weight."""
        return inflight_kernels.activate_and_mul(self.multiply(x_TI, bias_O, deterministic), activation)


@dataclass(frozen=True, slots=True)
class Fp8Tokens:
    """Features of tokens as an Fp8Weight or an Fp8BlockWeight multiplies them."""

    values_TI: Tensor
    """float8_e4m3fn."""
    scale_T: Tensor
    """float32: a feature is its value times this; or, for an Fp8BlockWeight, (T, G), that of its group."""
    dtype: torch.dtype
    """Of the activations that they were, and that the product is."""


@dataclass(slots=True)
class Fp8Weight:
    """8 bits per element, and a scale for each output. Activations are quantised to fp8 as well, each token with the
    scale that the checkpoint gives for all, or with one of its own, which its largest magnitude among the input
    features of this rank determines."""

    values_OI: Tensor
    """float8_e4m3fn."""
    scale_O: Tensor
    """float32: an element is its value times this."""
    input_scale: float | None = None
    """Of all tokens; None = each has its own. A number and no tensor, so that a launch takes it as an argument."""
    group_size: ClassVar[int] = 0
    """Features of a token that share a scale; 0 = all."""

    def multiply(self, x_TI: Tensor, bias_O: Tensor | None, deterministic: bool = False) -> Tensor:
        """See Weight."""
        values_TI, scale_T = inflight_kernels.quantize_per_token(x_TI, scale=self.input_scale)
        return self.multiply_quantized(Fp8Tokens(values_TI, scale_T, x_TI.dtype), bias_O, deterministic)

    def multiply_quantized(self, x_TI: Fp8Tokens, bias_O: Tensor | None, deterministic: bool = False) -> Tensor:
        """`multiply` of tokens that are quantised already. Sums are in float32, rounded once."""
        return inflight_kernels.scaled_linear(
            x_TI.values_TI, x_TI.scale_T, self.values_OI, self.scale_O, bias_O, x_TI.dtype, deterministic
        )

    def multiply_gated(
        self, x_TI: Tensor, bias_O: Tensor | None, activation: Activation, deterministic: bool = False
    ) -> Tensor:
        """See Weight."""
        return inflight_kernels.activate_and_mul(self.multiply(x_TI, bias_O, deterministic), activation)


@dataclass(slots=True)
class Fp8BlockWeight:
    """8 bits per element, and a scale for each block of outputs and `BLOCK_INPUTS` inputs. Activations are quantised to
    fp8 as well, with a scale for each token and as many inputs, which the largest magnitude among them determines."""

    packed: BlockScaledWeight
    input_scale: ClassVar[None] = None
    group_size: ClassVar[int] = BLOCK_INPUTS
    """See Fp8Weight."""

    def multiply(self, x_TI: Tensor, bias_O: Tensor | None, deterministic: bool = False) -> Tensor:
        """See Weight."""
        values_TI, scale_TG = inflight_kernels.quantize_per_token(x_TI, group_size=self.group_size)
        return self.multiply_quantized(Fp8Tokens(values_TI, scale_TG, x_TI.dtype), bias_O, deterministic)

    def multiply_quantized(self, x_TI: Fp8Tokens, bias_O: Tensor | None, deterministic: bool = False) -> Tensor:
        """`multiply` of tokens that are quantised already. Sums are in float32, rounded once."""
        return inflight_kernels.block_scaled_linear(
            x_TI.values_TI, x_TI.scale_T, self.packed, bias_O, x_TI.dtype, deterministic
        )

    def multiply_gated(
        self, x_TI: Tensor, bias_O: Tensor | None, activation: Activation, deterministic: bool = False
    ) -> Tensor:
        """See Weight."""
        return inflight_kernels.activate_and_mul(self.multiply(x_TI, bias_O, deterministic), activation)
