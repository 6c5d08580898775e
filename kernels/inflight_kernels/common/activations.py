"""What stands between the products of a feed-forward layer, inside a kernel; see `inflight_kernels.Activation`.

ACTIVATION is the value of one of them, so that a kernel is compiled for each. Arguments and results are float32.
"""

from __future__ import annotations

import triton
import triton.language as tl

_SQRT_HALF: tl.constexpr = tl.constexpr(0.7071067811865476)
# Twice sqrt(2 / pi), of GELU's approximation by tanh.
_TWICE_SQRT_2_OVER_PI: tl.constexpr = tl.constexpr(1.5957691216057308)
_CUBE_SHARE: tl.constexpr = tl.constexpr(0.044715)
# Of gpt-oss.
_LIMIT: tl.constexpr = tl.constexpr(7.0)
_SLOPE: tl.constexpr = tl.constexpr(1.702)


@triton.jit
def activated(x, ACTIVATION: tl.constexpr):
    """f(x), of activations that a layer without a gate can have, too."""
    if ACTIVATION == "silu":
        return x / (1.0 + tl.exp(-x))
    elif ACTIVATION == "gelu":
        return x * 0.5 * (1.0 + tl.erf(x * _SQRT_HALF))
    elif ACTIVATION == "gelu_tanh":
        # (1 + tanh(u)) / 2 = 1 / (1 + exp(-2 u)).
        return x / (1.0 + tl.exp((x + x * x * x * _CUBE_SHARE) * -_TWICE_SQRT_2_OVER_PI))
    else:
        tl.static_assert(ACTIVATION == "relu" or ACTIVATION == "relu_squared")
        kept = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
        if ACTIVATION == "relu_squared":
            kept = kept * kept
        return kept


@triton.jit
def gated(gate, up, dtype: tl.constexpr, ACTIVATION: tl.constexpr):
    """f(gate) * up, to be rounded to `dtype`, as f(gate) is before it is multiplied."""
    if ACTIVATION == "clamped_swiglu":
        gate = tl.minimum(gate, _LIMIT, propagate_nan=tl.PropagateNan.ALL)
        up = tl.clamp(up, -_LIMIT, _LIMIT, propagate_nan=tl.PropagateNan.ALL)
        return gate / (1.0 + tl.exp(gate * -_SLOPE)) * (up + 1.0)
    else:
        return activated(gate, ACTIVATION).to(dtype).to(tl.float32) * up


@triton.jit
def softplus(x):
    """log(1 + exp(x)), also where that is small."""
    growth = tl.exp(-tl.abs(x))
    above = 1.0 + growth
    # log(above) is that of a rounded sum; the quotient makes up for it.
    log = tl.where(above == 1.0, growth, tl.log(above) * (growth / tl.where(above == 1.0, 1.0, above - 1.0)))
    return tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL) + log
