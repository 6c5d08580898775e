"""The feed-forward layers of a mixture of experts, as two grouped matrix products and a weighted sum.

    a_p = round(f(g_p) * u_p),   g_p | u_p = W_gate_up[e_p] x[t_p] + b_gate_up[e_p]    for each pair p = (token, choice)
    z_p = round(W_down[e_p] a_p + b_down[e_p]),   y[t] = round(sum_j w[t, j] z[t, j])  sum in float32, in the order of j

f as in common/activations.py. With a bias, and where f is not SiLU, g, u and f(g) are rounded as in a dense layer, and
so is u without a gate, where a_p = round(f(u_p)).
Launches: the alignment of `_moe_align` (one up to 512 pairs, three beyond, none for very few), then gate and up with f
in the epilogue, down, and the sum (`_moe_kernels`). Grids are upper bounds that depend on shapes only: nothing
waits for the device, and a CUDA graph captured for a T can be replayed for any routing. No float is added atomically.

fp8 by blocks: x is quantised before the first product and a before the second, by a launch each, and sums are those of
`block_scaled_linear`. Weights are then half of these bytes, and the matrix unit is twice as fast.

Bytes: every expert in use once, 3 H I times the size of the dtype (9.4 MB at H = 2048, I = 768, bf16), and for each of
the P = k T pairs H + 2 I + 2 H elements, where x is read from the L2 cache for all but its first choice. Operations:
6 P H I. On an H200 (4.3 TB/s, 790 TFLOP/s) with E = 128, k = 8 and even routing the lower bounds are:
    T = 1      8 experts     75 MB                17.6 us, bytes
    T = 16     82 experts    0.78 GB              0.18 ms, bytes
    T = 64     126 experts   1.19 GB              0.28 ms, bytes
    T = 8192   128 experts   1.9 GB   0.62 TFLOP  0.78 ms, operations
    T = 32768  128 experts   3.9 GB   2.47 TFLOP  3.1 ms, operations
Bytes are the lower bound up to about 184 rows per expert, T = 2900.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from inflight_kernels.activation.kinds import Activation
from inflight_kernels.common.checks import (
    cdiv,
    check_dtype,
    check_float,
    check_shape,
    check_unit_stride,
    compute_capability,
    next_power_of_2,
)
from inflight_kernels.matmul.gpu.block_scaled_linear import check_block_weight
from inflight_kernels.matmul.weight_formats import BLOCK_INPUTS, BlockScaledWeight
from inflight_kernels.moe import ExpertWeights
from inflight_kernels.moe.gpu._moe_align import Alignment, align, most_tiles
from inflight_kernels.moe.gpu._moe_kernels import moe_combine_kernel, moe_down_kernel, moe_gate_up_kernel
from inflight_kernels.quantization.gpu import quantize_per_token
from inflight_kernels.tuning import tuned

# With at most 1 / DIRECT_SHARE pairs per expert, two pairs rarely share an expert: each pair is a tile of its own,
# which saves the alignment for at most 10 % more weight bytes (T = 4 of 128 experts). Not measured yet.
DIRECT_SHARE = 4
# Columns per program of the sum: a 16-byte load of bf16 for each of 128 threads. Not measured yet.
COMBINE_BLOCK_H = 1024
NO_SCALES: tuple[Tensor | None, int, int] = (None, 0, 0)
"""Of blocks, the outputs of one, and the stride from expert to expert: of weights of floats."""


def _config(
    block_m: int, block_i: int, block_h: int, block_k: int, group_m: int, swap_ab: int, num_warps: int, num_stages: int
) -> dict[str, int]:
    """BLOCK_I: weight rows per program of gate and of up; BLOCK_H: weight rows per program of down."""
    return {
        "BLOCK_M": block_m,
        "BLOCK_I": block_i,
        "BLOCK_H": block_h,
        "BLOCK_K": block_k,
        "GROUP_M": group_m,
        "SWAP_AB": swap_ab,
        "num_warps": num_warps,
        "num_stages": num_stages,
    }


# For few rows per expert, where reading weights dominates. 64 weight rows fill the M dimension of the matrix
# instruction, 16 tokens its N dimension, and 4 stages of 36 KiB keep 108 KiB in flight on a multiprocessor, where 26
# KiB suffice by Little's law (800 ns at 4.3 TB/s over 132). Not measured yet.
STREAM = _config(16, 64, 64, 128, 1, 1, 4, 4)
# The same with smaller steps of K: two programs fit on a multiprocessor of sm_90 instead of one. Not measured yet.
STREAM_SHORT = _config(16, 64, 64, 64, 1, 1, 4, 5)
# Twice the programs of gate and up, for T = 1, where 64 rows per program leave 36 of 132 multiprocessors idle. Not
# measured yet.
STREAM_NARROW = _config(16, 32, 64, 128, 1, 0, 4, 4)
# For tens of rows per expert, where bytes are still the lower bound. 128 weight rows of either product per step. Not
# measured yet.
MIDDLE = _config(64, 64, 128, 64, 8, 0, 4, 4)
# For hundreds of rows per expert: 128 rows by 256 weight rows, 128 accumulators per thread, 4 stages of 48 KiB. Spills
# on sm_80. Not measured yet.
LARGE = _config(128, 128, 256, 64, 8, 0, 8, 4)
# The same rows by half the weight rows, for sm_80. Not measured yet.
LARGE_HALF = _config(128, 64, 128, 64, 8, 0, 8, 3)
# Exact float32 products do not use the matrix units: the smallest tiles.
EXACT = _config(16, 32, 32, 32, 8, 0, 4, 2)

# fp8 by blocks: steps of K are groups of 128, and each product is in registers beside its sum. Not measured yet.
BLOCKS_STREAM = _config(16, 64, 64, 128, 1, 1, 4, 5)
BLOCKS_MIDDLE = _config(64, 64, 128, 128, 8, 0, 8, 4)
BLOCKS_LARGE = _config(128, 64, 128, 128, 8, 0, 8, 4)

CANDIDATES = [STREAM, STREAM_SHORT, STREAM_NARROW, MIDDLE, LARGE, LARGE_HALF]
BLOCKS_CANDIDATES = [BLOCKS_STREAM, BLOCKS_MIDDLE, BLOCKS_LARGE]


def default_config(
    num_pairs: int | None, num_experts: int, dtype: torch.dtype, device: torch.device
) -> Mapping[str, int]:
    """Chosen by the average number of rows per expert. `num_pairs` is that of the next power of two of tokens, so that
    all numbers of tokens between two powers need the same kernels, and these are compiled before serving. None if the
    choice must not depend on the batch: then MIDDLE, which reads no more bytes than the others and has the least
    padding among those with full matrix instructions."""
    if dtype == torch.float32:
        return EXACT
    if num_pairs is None:
        return MIDDLE
    rows = num_pairs / num_experts
    if rows <= 16:
        return STREAM
    if rows <= 96:
        return MIDDLE
    return LARGE if compute_capability(device) >= 90 else LARGE_HALF


def _check(
    x: Tensor,
    weights: Tensor,
    experts: Tensor,
    w_gate_up: Tensor,
    w_down: Tensor,
    out: Tensor | None,
    dtype: torch.dtype,
) -> None:
    """`dtype`: of the weights."""
    check_float("x", x)
    if x.dim() != 2 or experts.dim() != 2 or w_gate_up.dim() != 3 or w_down.dim() != 3:
        raise ValueError(
            "x must be (num_tokens, hidden_size), experts (num_tokens, top_k) and w_gate_up (num_experts, "
            "2 * intermediate_size or intermediate_size, hidden_size), got "
            f"{tuple(x.shape)}, {tuple(experts.shape)}, {tuple(w_gate_up.shape)}"
        )
    num_tokens, hidden_size = x.shape
    num_experts, num_outputs, _ = w_gate_up.shape
    intermediate_size = num_outputs if num_outputs == w_down.shape[2] else num_outputs // 2
    check_dtype("experts", experts, torch.int32)
    check_shape("experts", experts, (num_tokens, experts.shape[1]))
    check_dtype("weights", weights, torch.float32)
    check_shape("weights", weights, tuple(experts.shape))
    for name, tensor in (("experts", experts), ("weights", weights)):
        if not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous, its strides are {tensor.stride()}")
    check_shape("w_gate_up", w_gate_up, (num_experts, num_outputs, hidden_size))
    check_shape("w_down", w_down, (num_experts, hidden_size, intermediate_size))
    for name, tensor in (("x", x), ("w_gate_up", w_gate_up), ("w_down", w_down)):
        check_dtype(name, tensor, x.dtype if name == "x" else dtype)
        check_unit_stride(name, tensor)
        # Within one expert's weights offsets are int32.
        if name != "x" and tensor.stride(1) * tensor.shape[1] >= 2**31:
            raise ValueError(f"one expert of {name} spans {tensor.stride(1) * tensor.shape[1]} elements, 2^31 or more")
    if out is not None:
        check_shape("out", out, tuple(x.shape))
        check_dtype("out", out, x.dtype)
        check_unit_stride("out", out)
        if out.data_ptr() == x.data_ptr() and out.device.type != "meta" and num_tokens:
            raise ValueError("out must not be x")


def _check_bias(name: str, bias: Tensor | None, shape: tuple[int, int], dtype: torch.dtype) -> None:
    if bias is None:
        return
    check_shape(name, bias, shape)
    check_dtype(name, bias, dtype)
    if not bias.is_contiguous():
        raise ValueError(f"{name} must be contiguous, its strides are {bias.stride()}")


def block_scaled_config(num_pairs: int | None, num_experts: int) -> Mapping[str, int]:
    """`default_config` of fp8 by blocks."""
    if num_pairs is None:
        return BLOCKS_MIDDLE
    rows = num_pairs / num_experts
    return BLOCKS_STREAM if rows <= 16 else BLOCKS_MIDDLE if rows <= 96 else BLOCKS_LARGE


def _find_config(x: Tensor, w_down: Tensor, top_k: int, deterministic: bool) -> Mapping[str, int]:
    num_experts, hidden_size, intermediate_size = w_down.shape
    shape: dict[str, int | str] = {
        "experts": num_experts,
        "hidden": hidden_size,
        "intermediate": intermediate_size,
        "top_k": top_k,
        "dtype": str(w_down.dtype).removeprefix("torch."),
    }
    num_pairs = None
    if not deterministic:
        shape["tokens"] = num_tokens = next_power_of_2(x.shape[0])
        num_pairs = num_tokens * top_k
    if w_down.dtype == torch.float8_e4m3fn:
        default = block_scaled_config(num_pairs, num_experts)
    else:
        default = default_config(num_pairs, num_experts, x.dtype, x.device)
    return tuned("fused_moe", shape, default, x.device)


def fused_moe(
    x: Tensor,
    weights: Tensor,
    experts: Tensor,
    w_gate_up: ExpertWeights,
    w_down: ExpertWeights,
    out: Tensor | None = None,
    deterministic: bool = False,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    activation: Activation = Activation.SILU,
    config: Mapping[str, int] | None = None,
) -> Tensor:
    """Launch the experts' feed-forward layers on `x` (T, H); see `inflight_kernels.fused_moe`."""
    gate_up_scales = down_scales = NO_SCALES
    quantizes = isinstance(w_down, BlockScaledWeight)
    if isinstance(w_gate_up, BlockScaledWeight) and isinstance(w_down, BlockScaledWeight):
        check_block_weight("w_gate_up", w_gate_up)
        check_block_weight("w_down", w_down)
        gate_up_scales = (w_gate_up.scales, w_gate_up.block_outputs, w_gate_up.scales.stride(0))
        down_scales = (w_down.scales, w_down.block_outputs, w_down.scales.stride(0))
        w_gate_up, w_down = w_gate_up.values, w_down.values
    if not (isinstance(w_gate_up, Tensor) and isinstance(w_down, Tensor)):
        raise ValueError("w_gate_up and w_down must both be floats or both fp8 by blocks: codes are multiplied on CPUs")
    _check(x, weights, experts, w_gate_up, w_down, out, torch.float8_e4m3fn if quantizes else x.dtype)
    num_tokens, hidden_size = x.shape
    top_k, num_pairs = experts.shape[1], experts.numel()
    num_experts, _, intermediate_size = w_down.shape
    _check_bias("gate_up_bias", gate_up_bias, (num_experts, w_gate_up.shape[1]), x.dtype)
    _check_bias("down_bias", down_bias, (num_experts, hidden_size), x.dtype)
    if out is None:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not num_tokens:
        return out
    if config is None:
        config = _find_config(x, w_down, top_k, deterministic)
    block_m, block_k = config["BLOCK_M"], config["BLOCK_K"]
    if quantizes and block_k != BLOCK_INPUTS:
        raise ValueError(f"BLOCK_K must be {BLOCK_INPUTS} where weights are fp8 by blocks, got {block_k}")
    direct = num_pairs * DIRECT_SHARE <= num_experts
    if direct:
        # Placeholders: with DIRECT the kernels do not read order and tiles.
        places, bound = Alignment(experts, experts, experts), num_pairs
    else:
        places, bound = align(experts, num_experts, block_m), most_tiles(num_pairs, num_experts, block_m)
    sizes = (num_pairs, num_experts, bound, hidden_size, intermediate_size)
    shared = {
        "DIRECT": direct,
        "SWAP_AB": bool(config["SWAP_AB"]),
        "GROUP_M": config["GROUP_M"],
        "BLOCK_M": block_m,
        "BLOCK_K": block_k,
        "STAGES": config["num_stages"] if quantizes else None,
        "num_warps": config["num_warps"],
        "num_stages": config["num_stages"],
    }
    act = torch.empty((num_pairs, intermediate_size), dtype=x.dtype, device=x.device)
    products = torch.empty((num_pairs, hidden_size), dtype=x.dtype, device=x.device)
    rows, row_scales = quantize_per_token(x, group_size=BLOCK_INPUTS) if quantizes else (x, None)
    moe_gate_up_kernel[(bound * cdiv(intermediate_size, config["BLOCK_I"]),)](
        rows, w_gate_up, gate_up_bias, act, experts, *places, *sizes,
        rows.stride(0), w_gate_up.stride(0), w_gate_up.stride(1), row_scales, *gate_up_scales,
        TOP_K=top_k, GATED=w_gate_up.shape[1] > intermediate_size, ACTIVATION=activation.value,
        BLOCK_N=config["BLOCK_I"], EVEN_K=hidden_size % block_k == 0, **shared,
    )  # fmt: skip
    # Places that no pair has taken are quantised as they are, and not read.
    rows, row_scales = quantize_per_token(act, group_size=BLOCK_INPUTS) if quantizes else (act, None)
    moe_down_kernel[(bound * cdiv(hidden_size, config["BLOCK_H"]),)](
        rows, w_down, down_bias, products, experts, *places, *sizes, w_down.stride(0), w_down.stride(1),
        row_scales, *down_scales,
        BLOCK_N=config["BLOCK_H"], EVEN_K=intermediate_size % block_k == 0, **shared,
    )  # fmt: skip
    block_h = min(COMBINE_BLOCK_H, next_power_of_2(hidden_size))
    moe_combine_kernel[(num_tokens, cdiv(hidden_size, block_h))](
        products, weights, experts, out, num_experts, hidden_size, out.stride(0),
        TOP_K=top_k, BLOCK_H=block_h, num_warps=4,
    )  # fmt: skip
    return out
