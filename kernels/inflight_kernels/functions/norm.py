"""RMSNorm, alone and with the residual addition before it."""

from __future__ import annotations

from torch import Tensor

from inflight_kernels.dispatch import implementation


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
    """RMSNorm over the last dimension of `x` (..., H), float, with `weight` (H,) of the same dtype.

    Without `residual` returns the normalised tensor. With it, s = x + residual rounded to the dtype is what gets
    normalised, and (norm(s), s) is returned. Hugging Face Llama's rounding: the normalised value is rounded before it
    is multiplied by the weight.
    """
    result: Tensor | tuple[Tensor, Tensor] = implementation(x).rms_norm(x, weight, eps, residual)
    return result
