"""The activation of a feed-forward layer without a gate.

    y = round(f(x))

Bytes per row in bf16: 4 I. Up to about 30 operations per element (erf): memory bandwidth is the lower bound: 16384 rows
of I = 16384 are 1.07 GB, 250 us at 4.3 TB/s.

An element's result depends on that element alone.
"""

from __future__ import annotations

from collections.abc import Mapping

import triton
import triton.language as tl
from torch import Tensor

from inflight_kernels.activation.gpu.activate_and_mul import default_config
from inflight_kernels.activation.kinds import Activation
from inflight_kernels.common.activations import activated
from inflight_kernels.common.checks import cdiv, check_float, check_unit_stride


@triton.jit
def activate_kernel(x_ptr, y_ptr, width, stride_x, ACTIVATION: tl.constexpr, BLOCK_I: tl.constexpr):
    # Neighbouring programs take neighbouring columns.
    num_blocks = tl.cdiv(width, BLOCK_I)
    pid_t = (tl.program_id(0) // num_blocks).to(tl.int64)
    offs_i = (tl.program_id(0) % num_blocks) * BLOCK_I + tl.arange(0, BLOCK_I)
    mask = offs_i < width
    x = tl.load(x_ptr + pid_t * stride_x + offs_i, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + pid_t * width + offs_i, activated(x, ACTIVATION).to(y_ptr.dtype.element_ty), mask=mask)


def activate(x: Tensor, activation: Activation, *, config: Mapping[str, int] | None = None) -> Tensor:
    """Launch the activation of `x` (T, I); see `inflight_kernels.activate`."""
    check_float("x", x)
    if x.dim() != 2:
        raise ValueError(f"x must be (num_tokens, intermediate_size), got {tuple(x.shape)}")
    check_unit_stride("x", x)
    num_tokens, width = x.shape
    y = x.new_empty(x.shape)
    if num_tokens and width:
        config = config or default_config(width)
        activate_kernel[(num_tokens * cdiv(width, config["BLOCK_I"]),)](
            x,
            y,
            width,
            x.stride(0),
            ACTIVATION=activation.value,
            BLOCK_I=config["BLOCK_I"],
            num_warps=config["num_warps"],
        )
    return y
