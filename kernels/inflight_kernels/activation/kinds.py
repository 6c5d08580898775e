"""Which function a feed-forward layer has between its products."""

from __future__ import annotations

import enum


class Activation(enum.Enum):
    """f of a gated layer, which computes f(gate) * up, or of one without a gate, which computes f(x).

    Results are rounded to the dtype of x, and so is f(gate) before it is multiplied.
    """

    SILU = "silu"
    """x * sigmoid(x)."""
    GELU = "gelu"
    """x * P(X <= x) of the standard normal distribution."""
    GELU_TANH = "gelu_tanh"
    """Its approximation x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3))) (Hendrycks and Gimpel, 2016)."""
    RELU = "relu"
    """max(x, 0)."""
    RELU_SQUARED = "relu_squared"
    """max(x, 0)^2."""
    CLAMPED_SWIGLU = "clamped_swiglu"
    """gpt-oss: min(gate, 7) * sigmoid(1.702 min(gate, 7)) * (clamp(up, -7, 7) + 1), rounded once. Of gated layers
    only."""
