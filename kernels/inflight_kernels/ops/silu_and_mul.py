"""The gated activation between the two halves of a Llama MLP.

    y = round(round(silu(gate)) * up),   gate_up = [gate | up],   silu(g) = g / (1 + exp(-g))

round() is to the dtype of gate_up, at the same two places where Hugging Face Llama rounds.
Bytes per row: 3 I times the size of the dtype; memory is the floor.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from inflight_kernels.ops._checks import cdiv, check_float, check_unit_stride, next_power_of_2

# Columns one program handles: 8 bf16 elements, one 16-byte load, for each of 128 threads. Not measured yet.
BLOCK_COLUMNS = 1024


@triton.jit
def silu_and_mul_kernel(gate_up_ptr, y_ptr, width, stride_gate_up, stride_y, BLOCK_I: tl.constexpr):
    pid_t = tl.program_id(0).to(tl.int64)
    offs_i = tl.program_id(1) * BLOCK_I + tl.arange(0, BLOCK_I)
    mask = offs_i < width
    row_ptr = gate_up_ptr + pid_t * stride_gate_up
    gate = tl.load(row_ptr + offs_i, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(row_ptr + width + offs_i, mask=mask, other=0.0).to(tl.float32)
    dtype = y_ptr.dtype.element_ty
    silu = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    tl.store(y_ptr + pid_t * stride_y + offs_i, (silu * up).to(dtype), mask=mask)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """Launch SiLU-and-multiply of `gate_up` (T, 2I); see `inflight_kernels.silu_and_mul`."""
    check_float("gate_up", gate_up)
    if gate_up.dim() != 2 or gate_up.shape[1] % 2:
        raise ValueError(f"gate_up must be (num_tokens, 2 * intermediate_size), got {tuple(gate_up.shape)}")
    check_unit_stride("gate_up", gate_up)
    num_tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    y = gate_up.new_empty((num_tokens, width))
    if num_tokens and width:
        block = min(BLOCK_COLUMNS, next_power_of_2(width))
        silu_and_mul_kernel[(num_tokens, cdiv(width, block))](
            gate_up, y, width, gate_up.stride(0), y.stride(0), BLOCK_I=block, num_warps=4
        )
    return y
