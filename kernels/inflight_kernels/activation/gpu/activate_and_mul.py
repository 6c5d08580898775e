"""The gated activation between the two halves of a Llama MLP, alone or with the quantisation after it in one launch.

    y = round(round(f(gate)) * up),   gate_up = [gate | up],   f as in common/activations.py, of SiLU g / (1 + exp(-g))
    q, scale = y quantised with one scale per row or group, or a given one, see `common/quantize.py`   (only quantised)

round() is to the dtype of gate_up, at the same two places where Hugging Face Llama rounds. y is rounded even if only q
is kept, so that the fused and the separate operations give the same bits.

Bytes per row in bf16: 6 I; quantised 5 I + 4, for reading gate_up once; a row longer than `BLOCK_I` of the
configuration is read twice, the second time from the L2 cache, unless its scale is given. About 8 operations per
element of SiLU, two of which (exponential, reciprocal) run on the special function units, which do 16 per clock and
multiprocessor: 124 us for 16384 x 14336 on 132 multiprocessors at 1.8 GHz. Memory bandwidth is the lower bound: 16384
rows of I = 14336 are 1.41 GB, 328 us at 4.3 TB/s; quantised 1.17 GB, 273 us.

The launch configuration does not change a bit of the result, so a row's result is the same alone and in any batch.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from inflight_kernels.activation.kinds import Activation
from inflight_kernels.common.activations import gated
from inflight_kernels.common.checks import cdiv, check_float, check_unit_stride, next_power_of_2
from inflight_kernels.common.quantize import (
    LARGEST,
    check_group_size,
    check_quantized_dtype,
    check_scale,
    inverse_of,
    quantized,
    row_scale,
)
from inflight_kernels.common.rows import groups_of_program, num_programs, row_config
from inflight_kernels.tuning import tuned

# Columns per program, and its warps.
CANDIDATES: tuple[Mapping[str, int], ...] = (
    {"BLOCK_I": 1024, "num_warps": 4},
    {"BLOCK_I": 2048, "num_warps": 4},
    {"BLOCK_I": 4096, "num_warps": 8},
    {"BLOCK_I": 8192, "num_warps": 16},
)
# Columns held in registers, warps, resident programs per multiprocessor (0: one program per row).
QUANTIZED_CANDIDATES: tuple[Mapping[str, int], ...] = (
    {"BLOCK_I": 4096, "num_warps": 8, "PROGRAMS_PER_SM": 0},
    {"BLOCK_I": 16384, "num_warps": 16, "PROGRAMS_PER_SM": 0},
    {"BLOCK_I": 16384, "num_warps": 32, "PROGRAMS_PER_SM": 0},
    {"BLOCK_I": 16384, "num_warps": 16, "PROGRAMS_PER_SM": 2},
)


def default_config(width: int) -> Mapping[str, int]:
    """The launch for `width` columns of the result. Not measured yet.

    16 elements per thread: four 16-byte loads of bf16 are in flight at once. 2048 divides 14336.
    """
    return {"BLOCK_I": min(next_power_of_2(width), 2048), "num_warps": 4}


def default_quantized_config(width: int) -> Mapping[str, int]:
    """The launch with quantisation for `width` columns of the result. Not measured yet; see `row_config`."""
    block, num_warps = row_config(width)
    return {"BLOCK_I": block, "num_warps": num_warps, "PROGRAMS_PER_SM": 0}


@triton.jit
def _gated(gate_ptr, width, offs_i, ACTIVATION: tl.constexpr):
    """round(round(f(gate)) * up) of one row at some columns, float32; 0 beyond the row."""
    mask = offs_i < width
    dtype = gate_ptr.dtype.element_ty
    gate = tl.load(gate_ptr + offs_i, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_ptr + width + offs_i, mask=mask, other=0.0).to(tl.float32)
    return gated(gate, up, dtype, ACTIVATION).to(dtype).to(tl.float32)


@triton.jit
def activate_and_mul_kernel(gate_up_ptr, y_ptr, width, stride_gate_up, ACTIVATION: tl.constexpr, BLOCK_I: tl.constexpr):
    # Neighbouring programs take neighbouring columns.
    num_blocks = tl.cdiv(width, BLOCK_I)
    pid_t = (tl.program_id(0) // num_blocks).to(tl.int64)
    offs_i = (tl.program_id(0) % num_blocks) * BLOCK_I + tl.arange(0, BLOCK_I)
    y = _gated(gate_up_ptr + pid_t * stride_gate_up, width, offs_i, ACTIVATION)
    tl.store(y_ptr + pid_t * width + offs_i, y.to(y_ptr.dtype.element_ty), mask=offs_i < width)


# One compiled kernel for every number of rows: triton would otherwise specialise for 1 and for multiples of 16.
@triton.jit(do_not_specialize=["num_rows"])
def activate_and_mul_quantized_kernel(
    gate_up_ptr,
    q_ptr,
    scale_ptr,
    num_rows,
    width,
    stride_gate_up,
    given_scale,
    ACTIVATION: tl.constexpr,
    QMAX: tl.constexpr,
    BLOCK_I: tl.constexpr,
    ONE_BLOCK: tl.constexpr,
):
    dtype: tl.constexpr = q_ptr.dtype.element_ty
    offs_i = tl.arange(0, BLOCK_I)
    for pid_t in tl.range(tl.program_id(0), num_rows, tl.num_programs(0)):
        row_ptr = gate_up_ptr + tl.cast(pid_t, tl.int64) * stride_gate_up
        out_ptr = q_ptr + tl.cast(pid_t, tl.int64) * width
        if ONE_BLOCK:
            y = _gated(row_ptr, width, offs_i, ACTIVATION)
            scale = given_scale
            if given_scale is None:
                scale = row_scale(tl.max(tl.abs(y), axis=0), QMAX)
            tl.store(out_ptr + offs_i, quantized(y, inverse_of(scale), dtype, QMAX), mask=offs_i < width)
        else:
            scale = given_scale
            if given_scale is None:
                absmax = tl.zeros((BLOCK_I,), tl.float32)
                for start in range(0, width, BLOCK_I):
                    absmax = tl.maximum(absmax, tl.abs(_gated(row_ptr, width, start + offs_i, ACTIVATION)))
                scale = row_scale(tl.max(absmax, axis=0), QMAX)
            for start in range(0, width, BLOCK_I):
                y = _gated(row_ptr, width, start + offs_i, ACTIVATION)
                q = quantized(y, inverse_of(scale), dtype, QMAX)
                tl.store(out_ptr + start + offs_i, q, mask=start + offs_i < width)
        tl.store(scale_ptr + pid_t, scale)


@triton.jit
def activate_and_mul_groups_kernel(
    gate_up_ptr,
    q_ptr,
    scale_ptr,
    width,
    num_groups,
    stride_gate_up,
    ACTIVATION: tl.constexpr,
    QMAX: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_G: tl.constexpr,
):
    pid_t = tl.program_id(0).to(tl.int64)
    offs_g = tl.program_id(1) * BLOCK_G + tl.arange(0, BLOCK_G)
    offs_i = offs_g[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    y = _gated(gate_up_ptr + pid_t * stride_gate_up, width, offs_i, ACTIVATION)
    scale = row_scale(tl.max(tl.abs(y), axis=1), QMAX)
    q = quantized(y, inverse_of(scale)[:, None], q_ptr.dtype.element_ty, QMAX)
    tl.store(q_ptr + pid_t * width + offs_i, q, mask=offs_i < width)
    tl.store(scale_ptr + pid_t * num_groups + offs_g, scale, mask=offs_g < num_groups)


def _check(gate_up: Tensor) -> tuple[int, int]:
    """Check the argument; returns the number of rows and columns of the result."""
    check_float("gate_up", gate_up)
    if gate_up.dim() != 2 or gate_up.shape[1] % 2:
        raise ValueError(f"gate_up must be (num_tokens, 2 * intermediate_size), got {tuple(gate_up.shape)}")
    check_unit_stride("gate_up", gate_up)
    return gate_up.shape[0], gate_up.shape[1] // 2


def _shape_key(gate_up: Tensor) -> Mapping[str, int | str]:
    num_tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    return {"tokens": next_power_of_2(num_tokens), "width": next_power_of_2(width), "dtype": str(gate_up.dtype)}


def activate_and_mul(
    gate_up: Tensor, activation: Activation = Activation.SILU, *, config: Mapping[str, int] | None = None
) -> Tensor:
    """Launch the gated activation of `gate_up` (T, 2I); see `inflight_kernels.activate_and_mul`."""
    num_tokens, width = _check(gate_up)
    y = gate_up.new_empty((num_tokens, width))
    if num_tokens and width:
        if config is None:
            config = tuned("activate_and_mul", _shape_key(gate_up), default_config(width), gate_up.device)
        activate_and_mul_kernel[(num_tokens * cdiv(width, config["BLOCK_I"]),)](
            gate_up,
            y,
            width,
            gate_up.stride(0),
            ACTIVATION=activation.value,
            BLOCK_I=config["BLOCK_I"],
            num_warps=config["num_warps"],
        )
    return y


def activate_and_mul_quantized(
    gate_up: Tensor,
    dtype: torch.dtype = torch.float8_e4m3fn,
    scale: float | None = None,
    group_size: int = 0,
    activation: Activation = Activation.SILU,
    *,
    config: Mapping[str, int] | None = None,
) -> tuple[Tensor, Tensor]:
    """Launch the gated activation of `gate_up` (T, 2I) into `dtype`; see `inflight_kernels.activate_and_mul_quantized`.
    `config` is of rows without groups."""
    num_tokens, width = _check(gate_up)
    check_quantized_dtype(dtype, gate_up.device)
    check_scale(scale)
    check_group_size(group_size, scale)
    q = gate_up.new_empty((num_tokens, width), dtype=dtype)
    of_row = (cdiv(width, group_size),) if group_size else ()
    scales = gate_up.new_empty((num_tokens, *of_row), dtype=torch.float32)
    if num_tokens and width and group_size:
        num_groups = scales.shape[1]
        block = groups_of_program(num_groups, group_size)
        activate_and_mul_groups_kernel[(num_tokens, cdiv(num_groups, block))](
            gate_up,
            q,
            scales,
            width,
            num_groups,
            gate_up.stride(0),
            ACTIVATION=activation.value,
            QMAX=LARGEST[dtype],
            GROUP=group_size,
            BLOCK_G=block,
            num_warps=4,
        )
    elif num_tokens and width:
        if config is None:
            default = default_quantized_config(width)
            config = tuned("activate_and_mul_quantized", _shape_key(gate_up), default, gate_up.device)
        activate_and_mul_quantized_kernel[(num_programs(num_tokens, config["PROGRAMS_PER_SM"], gate_up.device),)](
            gate_up,
            q,
            scales,
            num_tokens,
            width,
            gate_up.stride(0),
            scale,
            ACTIVATION=activation.value,
            QMAX=LARGEST[dtype],
            BLOCK_I=config["BLOCK_I"],
            ONE_BLOCK=config["BLOCK_I"] >= width,
            num_warps=config["num_warps"],
        )
    return q, scales
