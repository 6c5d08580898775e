"""The tensors of mixers that keep a state for each sequence: Gated DeltaNets, short convolutions, Mamba-2."""

from __future__ import annotations

import math
from dataclasses import dataclass

from inflight.models.split_tensors import NotSplit, SplitByInputs, SplitByOutputs
from inflight_kernels import Activation
from inflight_kernels.recurrent.gate import Gate


@dataclass(frozen=True, slots=True)
class ConvTensors:
    """A short convolution of each channel: (C, 1, size), and with a `bias` (C,)."""

    names: tuple[str, ...]
    """Of the tensor of each section of channels, or the only one of all."""
    size: int
    """Tokens that it is over."""
    bias: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class NarrowGates:
    """What gates and decays are made of: `size` features each, which every rank has."""

    size: int
    gates: SplitByOutputs
    decays: SplitByOutputs


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaNetTensors:
    """A Gated DeltaNet, or Kimi Delta Attention, in place of attention. Names of its numbers a head are whole."""

    layers: frozenset[int]
    """Numbers of the layers that have it, as of the other mixers."""
    inputs: SplitByOutputs
    """Sections: queries, keys, values, gates, or what those are made of, betas, decays, or what those are made of."""
    narrow: NarrowGates | None = None
    """Then each row of a head's state decays by itself."""
    conv: ConvTensors
    activation: Activation
    """Of the convolution."""
    a_log: str
    ones_of_a_log: tuple[int, int] = (0, 0)
    """Its dimensions of 1 before that of heads, and behind it."""
    dt_bias: str
    gate: Gate = Gate.SILU
    """What is made of gates."""
    head_norm: NotSplit
    norm_rounds_once: bool = False
    """As of NormStyle."""
    norm_eps: float
    output: SplitByInputs
    num_key_heads: int
    num_value_heads: int
    key_dim: int
    """Elements of a head's queries and keys."""
    value_dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortConvTensors:
    """A short convolution between two gates in place of attention."""

    layers: frozenset[int]
    inputs: SplitByOutputs
    """Sections, each as wide as the hidden size: what is multiplied before it, what is behind it, and what it is of."""
    conv: ConvTensors
    output: SplitByInputs


@dataclass(frozen=True, slots=True, kw_only=True)
class MambaMultipliers:
    """Constants that Mamba-2 multiplies what it reads with, and each section of its inputs."""

    input: float = 1.0
    gate: float = 1.0
    x: float = 1.0
    b: float = 1.0
    c: float = 1.0
    time: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MambaTensors:
    """Mamba-2 in place of attention. Names of its numbers a head are whole."""

    layers: frozenset[int]
    inputs: SplitByOutputs
    """Sections: gates, x, B, C, steps of time."""
    conv: ConvTensors
    activation: Activation
    """Of the convolution."""
    a_log: str
    d: str
    dt_bias: str
    norm: NotSplit | None
    """Of what the heads compute; None = they have a gate alone."""
    norm_eps: float
    num_norm_groups: int = 1
    """Groups of elements that are normalised by themselves."""
    gate_first: bool = True
    """Whether the norm is behind the gate."""
    multipliers: MambaMultipliers = MambaMultipliers()
    output: SplitByInputs
    output_multiplier: float = 1.0
    num_heads: int
    num_groups: int
    """Of heads that share B and C."""
    head_dim: int
    state_dim: int
    """Elements of B and C of a group."""
    time_limits: tuple[float, float] = (0.0, math.inf)
    """Of a token's step of time."""


MixerTensors = DeltaNetTensors | ShortConvTensors | MambaTensors
"""What mixes a sequence's tokens where a layer does not attend, behind the norm that others have before attention."""
