"""Rotary position embedding: the table of cosines and sines, for each supported kind of scaling.

Knows positions and frequencies, no tokens. Legend: R rotated pairs of a head (rotary_dim / 2), S positions.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """A checkpoint's rotary parameters, whichever keys its config.json has them under."""

    kind: str = "default"
    theta: float = 10_000.0
    factor: float = 1.0
    original_max_positions: int
    """Context length that the model was trained for before scaling."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    rotated_part: float = 1.0
    """Of the pairs, those with a frequency above 0."""


def cos_sin_table(rope: RopeConfig | None, rotary_dim: int, num_positions: int) -> Tensor:
    """float32 (num_positions, 2R): cosines in the first half of the columns, sines in the second.

    `rotary_dim`: elements of a head that are rotated, its first ones. None: by no angle.
    """
    if rope is None:
        return torch.tensor([1.0, 0.0]).repeat_interleave(rotary_dim // 2).repeat(num_positions, 1)
    positions_S = torch.arange(num_positions, dtype=torch.float32)
    frequencies, amplitude = FREQUENCIES[rope.kind](rope, rotary_dim, positions_S)
    angles_SR = positions_S[:, None] * frequencies
    return torch.cat((angles_SR.cos() * amplitude, angles_SR.sin() * amplitude), dim=1)


def _inverse(theta: float | Tensor, rotary_dim: int) -> Tensor:
    """theta^(-2r / rotary_dim) for r < R."""
    exponents_R = torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim
    return 1.0 / (theta**exponents_R)


def _default(rope: RopeConfig, rotary_dim: int, positions_S: Tensor) -> tuple[Tensor, float]:
    return _inverse(rope.theta, rotary_dim), 1.0


def _linear(rope: RopeConfig, rotary_dim: int, positions_S: Tensor) -> tuple[Tensor, float]:
    """Positions divided by the factor."""
    return _inverse(rope.theta, rotary_dim) / rope.factor, 1.0


def _proportional(rope: RopeConfig, rotary_dim: int, positions_S: Tensor) -> tuple[Tensor, float]:
    """The first ones of all frequencies, and 0 for the other pairs (Gemma 4)."""
    frequencies_R = _inverse(rope.theta, rotary_dim) / rope.factor
    frequencies_R[int(rope.rotated_part * rotary_dim / 2) :] = 0.0
    return frequencies_R, 1.0


def _dynamic(rope: RopeConfig, rotary_dim: int, positions_S: Tensor) -> tuple[Tensor, float]:
    """NTK-aware scaling whose base grows with the sequence length: (S, R). Each position is scaled for the sequence
    that ends with it.

    This equals processing the sequence token by token. A key then does not depend on how its prompt was divided into
    chunks, and can be shared between requests. transformers instead rotates a prompt longer than the original length by
    the whole prompt's length; up to the original length the two agree.
    """
    length_S = (positions_S + 1).clamp(min=rope.original_max_positions)
    growth_S = rope.factor * length_S / rope.original_max_positions - (rope.factor - 1)
    theta_S = rope.theta * growth_S ** (rotary_dim / (rotary_dim - 2))
    return _inverse(theta_S[:, None], rotary_dim), 1.0


def _llama3(rope: RopeConfig, rotary_dim: int, positions_S: Tensor) -> tuple[Tensor, float]:
    """Llama 3.1: low frequencies are divided by the factor, high ones kept, those in between interpolated."""
    inverse_R = _inverse(rope.theta, rotary_dim)
    wavelength_R = 2 * math.pi / inverse_R
    turns_R = rope.original_max_positions / wavelength_R
    blend_R = (turns_R - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend_R = blend_R.clamp(0.0, 1.0)
    return (1 - blend_R) * inverse_R / rope.factor + blend_R * inverse_R, 1.0


def _yarn(rope: RopeConfig, rotary_dim: int, positions_S: Tensor) -> tuple[Tensor, float]:
    """YaRN (Peng et al. 2023): a ramp from unscaled to fully interpolated frequencies, and scaled attention scores."""

    def pair_that_turns(times: float) -> float:
        waves = rope.original_max_positions / (times * 2 * math.pi)
        return rotary_dim * math.log(waves) / (2 * math.log(rope.theta))

    low, high = pair_that_turns(rope.beta_fast), pair_that_turns(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    if low == high:
        high += 0.001
    ramp_R = ((torch.arange(rotary_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0.0, 1.0)
    inverse_R = _inverse(rope.theta, rotary_dim)
    return inverse_R / rope.factor * ramp_R + inverse_R * (1 - ramp_R), _yarn_amplitude(rope)


def _amplitude(rope: RopeConfig, scale: float) -> float:
    """What YaRN multiplies queries and keys with each."""
    return 0.1 * scale * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0


def _yarn_amplitude(rope: RopeConfig) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return _amplitude(rope, rope.mscale) / _amplitude(rope, rope.mscale_all_dim)
    return _amplitude(rope, 1.0)


def score_factor(rope: RopeConfig | None) -> float:
    """Of all scores in DeepSeek's networks, whose queries and keys are rotated in part: what the amplitude of cosines
    and sines leaves out."""
    if rope is None or rope.kind == "default" or not rope.mscale_all_dim:
        return 1.0
    return _amplitude(rope, rope.mscale_all_dim) ** 2


FREQUENCIES: dict[str, Callable[[RopeConfig, int, Tensor], tuple[Tensor, float]]] = {
    "default": _default,
    "linear": _linear,
    "proportional": _proportional,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
}
"""Kind of scaling -> function that returns the frequencies, (R,) or (S, R), and the amplitude of cosines and sines."""
