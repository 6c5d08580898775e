"""Layers that keep a state for each sequence instead of keys and values for each token.

A state is a tensor whose first dimension are slots; StepSequences says whose tokens a step has, where a sequence's
state lies, and behind which of its tokens it is kept in a slot more. Every function computes in float32, and a token
from those before it alone, whatever else is in the step: a prompt has the same bits in one step, in steps with any
borders, and token by token.

CPUs compute a recurrence token by token. A GPU would wait for each of them, so its kernels compute chunks, which begin
at fixed positions of the sequence (`chunk.py`). A step may begin and end within one. Therefore the state is that at the
last border, and beside it lie the inputs of the tokens behind it, in a tensor of its own: with them a step computes its
tokens' chunk from the border on, so that prompts, outputs and drafts are computed alike. Tokens that are computed again
cost no product more: a matrix instruction has as many rows as a chunk has tokens.
"""

from __future__ import annotations

from torch import Tensor

from inflight_kernels.activation.kinds import Activation
from inflight_kernels.dispatch import implementation
from inflight_kernels.recurrent.gate import Gate
from inflight_kernels.recurrent.step_sequences import StepSequences


def chunk_shape(tensor: Tensor, num_heads: int, num_inputs: int) -> tuple[int, int, int] | None:
    """The shape, in a slot, of the inputs that a recurrence keeps of an incomplete chunk: `num_inputs` of each token
    for each of its heads. None = it keeps none on the device of `tensor`."""
    shape: tuple[int, int, int] | None = implementation(tensor, __name__).chunk_shape(tensor, num_heads, num_inputs)
    return shape


def causal_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor,
    sequences: StepSequences,
    activation: Activation | None = None,
) -> Tensor:
    """A short convolution of each channel over its sequence's tokens: y_t = f(bias + sum over w of weight[:, w] *
    x_{t - W + 1 + w}), rounded once, where x is zero before position 0. Returns y (T, C).

    `x` (T, C), float; `weight` (C, W) and `bias` (C,) of its dtype or float32. `state` (slots, W - 1, C), contiguous,
    of the dtype of x: the last W - 1 inputs of each sequence, the oldest first, is read and written. Without an
    `activation` f(x) is x. Raises ValueError for an activation that only gated layers have.
    """
    if activation is Activation.CLAMPED_SWIGLU:
        raise ValueError(f"{activation.value} is for gated layers only")
    result: Tensor = implementation(x, __name__).causal_conv(x, weight, bias, state, sequences, activation)
    return result


def gated_delta_rule(
    qkv: Tensor,
    a: Tensor,
    b: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    sequences: StepSequences,
    key_dim: int,
    chunk: Tensor | None = None,
) -> Tensor:
    """The gated delta rule of linear attention (Gated DeltaNet; Kimi Delta Attention). Returns (T, V * Dv).

    `qkv` (T, 2 * K * Dk + V * Dv), float: queries and keys of K heads of `key_dim` = Dk, and values of V heads, a
    multiple of K; value head v has the query and the key of head v // (V / K). Both are divided by sqrt(their sum of
    squares + 1e-6), and queries by sqrt(Dk). For each token and value head, in float32, the result rounded once:

        S = exp(-exp(a_log) * softplus(a + dt_bias)) * S
        S = S + k (v - k S) * sigmoid(b)
        out = q S

    `a` (T, V), `b` (T, V) of the dtype of qkv, `a_log` and `dt_bias` (V,) float32. With `a` (T, V * Dk) and `dt_bias`
    (V * Dk,) each row of S decays by itself. `state` (slots, V, Dk, Dv) float32, contiguous, has S of each sequence and
    is read and written. So is `chunk`, of the dtype of qkv, contiguous, (slots, *chunk_shape) of V heads and their
    inputs: a key, a value, decays and b; None where that is None.
    """
    result: Tensor = implementation(qkv, __name__).gated_delta_rule(
        qkv, a, b, a_log, dt_bias, state, sequences, key_dim, chunk
    )
    return result


def gated_rms_norm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    eps: float,
    activation: Gate = Gate.SILU,
    group_size: int | None = None,
    gate_first: bool = False,
) -> Tensor:
    """RMSNorm of each group of `x` (T, C), float, times `weight` and an activation of `gate` (T, C) of its dtype.

    `group_size`: columns of a group, such as a head; None = as many as `weight` has, which is (group_size,) or (C,), of
    the dtype of x or float32. With `gate_first` (Mamba-2) x is multiplied by the activation before the norm, and not
    behind it. In float32, with the roundings of Hugging Face's Qwen3-Next and Bamba: the normalised value before it is
    multiplied by the weight, that product, and the result; with a float32 weight beside another dtype only the result
    (Kimi Linear).
    """
    result: Tensor = implementation(x, __name__).gated_rms_norm(
        x, gate, weight, eps, activation, group_size, gate_first
    )
    return result


def state_space_scan(
    x: Tensor,
    b: Tensor,
    c: Tensor,
    dt: Tensor,
    a_log: Tensor,
    d: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    sequences: StepSequences,
    dt_limits: tuple[float, float] = (0.0, float("inf")),
    chunk: Tensor | None = None,
) -> Tensor:
    """The recurrence of a state space with one decay a head (Mamba-2). Returns (T, H * P).

    `x` (T, H * P), float; `b` and `c` (T, G * N) and `dt` (T, H) of its dtype, where H is a multiple of G and head h
    has group h // (H / G); `a_log`, `d` and `dt_bias` (H,) float32. For each token and head, in float32, the result
    rounded once:

        s = clamp(softplus(dt + dt_bias), *dt_limits)
        S = exp(-exp(a_log) * s) * S + (s * x) b
        out = S c + d * x

    `state` (slots, H, P, N) float32, contiguous, has S of each sequence and is read and written. So is `chunk`, of the
    dtype of x, contiguous, (slots, *chunk_shape) of H heads and their inputs: x, b and dt; None where that is None.
    """
    result: Tensor = implementation(x, __name__).state_space_scan(
        x, b, c, dt, a_log, d, dt_bias, state, sequences, dt_limits, chunk
    )
    return result
