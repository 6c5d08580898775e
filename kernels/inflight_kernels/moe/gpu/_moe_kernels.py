"""The three kernels of a mixture of experts: gate, up and their activation; down; the weighted sum over choices.

A program of the first two processes one tile of `_moe_align` (rows of one expert) and one tile of that expert's weight
rows. The first product gathers its rows from the tokens; between the two, rows are sorted by expert; the second
scatters them back to their pairs. A row's sums run over K in steps of BLOCK_K whatever the tile's other rows are, so
that for one configuration its bits do not depend on them.

DIRECT: each pair is a tile of its own, without alignment; for so few pairs that two rarely share an expert.
Scales: of fp8 in blocks of outputs and BLOCK_K inputs, as in `block_scaled_linear`; None of floats. STAGES, then: of
the pipeline, which so has the scales, too.
Without GATED the first product is what is activated, and called gate.
SWAP_AB: the weight's rows are the M dimension of the matrix instruction, which is 64, and tokens its N dimension, which
may be as small as 16.
"""

from __future__ import annotations

import triton
import triton.language as tl

from inflight_kernels.common.activations import activated, gated


@triton.jit
def _find_tile(
    experts_ptr, tiles_ptr, num_tiles_ptr, num_pairs, num_experts, most_tiles, num_tiles_n,
    GROUP_M: tl.constexpr, DIRECT: tl.constexpr,
):  # fmt: skip
    """This program's expert (-1: no work), its first place and the one after its last, and its tile of weight rows.

    Programs first process all weight rows with a group of GROUP_M tiles of rows, then the next group, so that both stay
    in the L2 cache.
    """
    pid = tl.program_id(0)
    num_tiles = num_pairs if DIRECT else tl.load(num_tiles_ptr)
    per_group = GROUP_M * num_tiles_n
    first_m = (pid // per_group) * GROUP_M
    group_m = tl.maximum(tl.minimum(num_tiles - first_m, GROUP_M), 1)
    inside = pid % per_group
    pid_m = first_m + inside % group_m
    pid_n = inside // group_m
    # A last group of fewer tiles has surplus programs, whose pid_n is past the weight's rows.
    live = (pid_m < num_tiles) & (pid_n < num_tiles_n)
    if DIRECT:
        expert = tl.load(experts_ptr + pid_m, mask=live, other=-1)
        expert = tl.where(expert < num_experts, expert, -1)
        begin = pid_m
        end = pid_m + 1
    else:
        expert = tl.load(tiles_ptr + pid_m, mask=live, other=-1)
        begin = tl.load(tiles_ptr + most_tiles + pid_m, mask=live, other=0)
        end = tl.load(tiles_ptr + 2 * most_tiles + pid_m, mask=live, other=0)
    return expert, begin, end, pid_n


@triton.jit
def _dot(rows, weight, acc, SWAP_AB: tl.constexpr):
    """acc + rows weight^T, or its transpose with SWAP_AB; exact products keep float32 comparable to the reference."""
    if SWAP_AB:
        return tl.dot(weight, rows.T, acc, input_precision="ieee")
    else:
        return tl.dot(rows, weight.T, acc, input_precision="ieee")


@triton.jit
def _scaled_dot(rows, weight, acc, row_scale, weight_scale, SWAP_AB: tl.constexpr):
    """acc + (rows weight^T) * their scales, in one fused operation, or its transpose with SWAP_AB."""
    if SWAP_AB:
        product = tl.dot(weight, rows.T, out_dtype=tl.float32)
        return tl.fma(product, weight_scale[:, None] * row_scale[None, :], acc)
    else:
        product = tl.dot(rows, weight.T, out_dtype=tl.float32)
        return tl.fma(product, row_scale[:, None] * weight_scale[None, :], acc)


@triton.jit
def _add_bias(acc, bias_ptr, columns, SWAP_AB: tl.constexpr):
    """acc + the bias of each of the weight's rows."""
    bias = tl.load(bias_ptr + columns).to(tl.float32)
    return acc + (bias[:, None] if SWAP_AB else bias[None, :])


# One compiled kernel for every number of pairs: triton would otherwise specialise for 1 and for multiples of 16.
@triton.jit(do_not_specialize=["num_pairs", "most_tiles"])
def moe_gate_up_kernel(
    x_ptr,
    w_ptr,
    bias_ptr,
    act_ptr,
    experts_ptr,
    order_ptr,
    tiles_ptr,
    num_tiles_ptr,
    num_pairs,
    num_experts,
    most_tiles,
    hidden_size,
    intermediate_size,
    stride_xt,
    stride_we,
    stride_wn,
    x_scale_ptr,
    w_scale_ptr,
    block_outputs,
    stride_se,
    TOP_K: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    DIRECT: tl.constexpr,
    EVEN_K: tl.constexpr,
    SWAP_AB: tl.constexpr,
    GROUP_M: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    expert, begin, end, pid_n = _find_tile(
        experts_ptr, tiles_ptr, num_tiles_ptr, num_pairs, num_experts, most_tiles,
        tl.cdiv(intermediate_size, BLOCK_N), GROUP_M, DIRECT,
    )  # fmt: skip
    if expert < 0:
        return
    offs_m = begin + tl.arange(0, BLOCK_M)
    offs_n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    mask_m = offs_m < end
    pairs = offs_m if DIRECT else tl.load(order_ptr + offs_m, mask=mask_m, other=0)
    tokens = (pairs // TOP_K).to(tl.int64)
    x_ptrs = x_ptr + tokens[:, None] * stride_xt + offs_k[None, :]
    # Rows past the last one read the last row again and are not stored, so that the loads need no mask.
    weight_rows = tl.minimum(offs_n, intermediate_size - 1)
    gate_ptrs = w_ptr + expert.to(tl.int64) * stride_we + weight_rows[:, None] * stride_wn + offs_k[None, :]
    if GATED:
        up_ptrs = gate_ptrs + intermediate_size * stride_wn
    if w_scale_ptr is not None:
        num_groups = tl.cdiv(hidden_size, BLOCK_K)
        x_scale_ptrs = x_scale_ptr + tokens * num_groups
        scale_ptr = w_scale_ptr + expert.to(tl.int64) * stride_se
        gate_scale_ptrs = scale_ptr + weight_rows // block_outputs * num_groups
        if GATED:
            up_scale_ptrs = scale_ptr + (intermediate_size + weight_rows) // block_outputs * num_groups

    shape_m: tl.constexpr = BLOCK_N if SWAP_AB else BLOCK_M
    shape_n: tl.constexpr = BLOCK_M if SWAP_AB else BLOCK_N
    gate = tl.zeros([shape_m, shape_n], dtype=tl.float32)
    if GATED:
        up = tl.zeros([shape_m, shape_n], dtype=tl.float32)
    for start in tl.range(0, hidden_size, BLOCK_K, num_stages=STAGES):
        if EVEN_K:
            x = tl.load(x_ptrs + start, mask=mask_m[:, None], other=0.0)
            w_gate = tl.load(gate_ptrs + start)
            if GATED:
                w_up = tl.load(up_ptrs + start)
        else:
            mask_k = (start + offs_k < hidden_size)[None, :]
            x = tl.load(x_ptrs + start, mask=mask_m[:, None] & mask_k, other=0.0)
            w_gate = tl.load(gate_ptrs + start, mask=mask_k, other=0.0)
            if GATED:
                w_up = tl.load(up_ptrs + start, mask=mask_k, other=0.0)
        if w_scale_ptr is not None:
            x_scale = tl.load(x_scale_ptrs + start // BLOCK_K, mask=mask_m, other=0.0)
            gate_scale = tl.load(gate_scale_ptrs + start // BLOCK_K)
            gate = _scaled_dot(x, w_gate, gate, x_scale, gate_scale, SWAP_AB)
            if GATED:
                up_scale = tl.load(up_scale_ptrs + start // BLOCK_K)
                up = _scaled_dot(x, w_up, up, x_scale, up_scale, SWAP_AB)
        else:
            gate = _dot(x, w_gate, gate, SWAP_AB)
            if GATED:
                up = _dot(x, w_up, up, SWAP_AB)

    if bias_ptr is not None:
        expert_bias_ptr = bias_ptr + expert.to(tl.int64) * (2 if GATED else 1) * intermediate_size
        gate = _add_bias(gate, expert_bias_ptr, weight_rows, SWAP_AB)
        if GATED:
            up = _add_bias(up, expert_bias_ptr + intermediate_size, weight_rows, SWAP_AB)
    # As a dense layer rounds.
    dtype: tl.constexpr = act_ptr.dtype.element_ty
    if not GATED:
        act = activated(gate.to(dtype).to(tl.float32), ACTIVATION)
    elif bias_ptr is not None or ACTIVATION != "silu":
        act = gated(gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32), dtype, ACTIVATION)
    else:
        act = gate / (1.0 + tl.exp(-gate)) * up
    if SWAP_AB:
        act = act.T
    act_ptrs = act_ptr + offs_m.to(tl.int64)[:, None] * intermediate_size + offs_n[None, :]
    tl.store(act_ptrs, act.to(act_ptr.dtype.element_ty), mask=mask_m[:, None] & (offs_n < intermediate_size)[None, :])


@triton.jit(do_not_specialize=["num_pairs", "most_tiles"])
def moe_down_kernel(
    act_ptr,
    w_ptr,
    bias_ptr,
    products_ptr,
    experts_ptr,
    order_ptr,
    tiles_ptr,
    num_tiles_ptr,
    num_pairs,
    num_experts,
    most_tiles,
    hidden_size,
    intermediate_size,
    stride_we,
    stride_wn,
    act_scale_ptr,
    w_scale_ptr,
    block_outputs,
    stride_se,
    DIRECT: tl.constexpr,
    EVEN_K: tl.constexpr,
    SWAP_AB: tl.constexpr,
    GROUP_M: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    expert, begin, end, pid_n = _find_tile(
        experts_ptr, tiles_ptr, num_tiles_ptr, num_pairs, num_experts, most_tiles,
        tl.cdiv(hidden_size, BLOCK_N), GROUP_M, DIRECT,
    )  # fmt: skip
    if expert < 0:
        return
    offs_m = begin + tl.arange(0, BLOCK_M)
    offs_n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    mask_m = offs_m < end
    act_ptrs = act_ptr + offs_m.to(tl.int64)[:, None] * intermediate_size + offs_k[None, :]
    weight_rows = tl.minimum(offs_n, hidden_size - 1)
    w_ptrs = w_ptr + expert.to(tl.int64) * stride_we + weight_rows[:, None] * stride_wn + offs_k[None, :]

    if w_scale_ptr is not None:
        num_groups = tl.cdiv(intermediate_size, BLOCK_K)
        act_scale_ptrs = act_scale_ptr + offs_m.to(tl.int64) * num_groups
        w_scale_ptrs = w_scale_ptr + expert.to(tl.int64) * stride_se + weight_rows // block_outputs * num_groups

    shape_m: tl.constexpr = BLOCK_N if SWAP_AB else BLOCK_M
    shape_n: tl.constexpr = BLOCK_M if SWAP_AB else BLOCK_N
    acc = tl.zeros([shape_m, shape_n], dtype=tl.float32)
    for start in tl.range(0, intermediate_size, BLOCK_K, num_stages=STAGES):
        if EVEN_K:
            act = tl.load(act_ptrs + start, mask=mask_m[:, None], other=0.0)
            w = tl.load(w_ptrs + start)
        else:
            mask_k = (start + offs_k < intermediate_size)[None, :]
            act = tl.load(act_ptrs + start, mask=mask_m[:, None] & mask_k, other=0.0)
            w = tl.load(w_ptrs + start, mask=mask_k, other=0.0)
        if w_scale_ptr is not None:
            act_scale = tl.load(act_scale_ptrs + start // BLOCK_K, mask=mask_m, other=0.0)
            w_scale = tl.load(w_scale_ptrs + start // BLOCK_K)
            acc = _scaled_dot(act, w, acc, act_scale, w_scale, SWAP_AB)
        else:
            acc = _dot(act, w, acc, SWAP_AB)

    if bias_ptr is not None:
        acc = _add_bias(acc, bias_ptr + expert.to(tl.int64) * hidden_size, weight_rows, SWAP_AB)
    if SWAP_AB:
        acc = acc.T
    pairs = offs_m if DIRECT else tl.load(order_ptr + offs_m, mask=mask_m, other=0)
    products_ptrs = products_ptr + pairs.to(tl.int64)[:, None] * hidden_size + offs_n[None, :]
    mask = mask_m[:, None] & (offs_n < hidden_size)[None, :]
    tl.store(products_ptrs, acc.to(products_ptr.dtype.element_ty), mask=mask)


@triton.jit
def moe_combine_kernel(
    products_ptr,
    weights_ptr,
    experts_ptr,
    out_ptr,
    num_experts,
    hidden_size,
    stride_ot,
    TOP_K: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    pid_t = tl.program_id(0).to(tl.int64)
    offs_h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    mask_h = offs_h < hidden_size
    total = tl.zeros([BLOCK_H], dtype=tl.float32)
    for j in tl.static_range(TOP_K):
        pair = pid_t * TOP_K + j
        expert = tl.load(experts_ptr + pair)
        # The product of an invalid choice was never written: neither it nor its weight is read.
        valid = (expert >= 0) & (expert < num_experts)
        weight = tl.load(weights_ptr + pair, mask=valid, other=0.0)
        product = tl.load(products_ptr + pair * hidden_size + offs_h, mask=mask_h & valid, other=0.0)
        total += weight * product.to(tl.float32)
    tl.store(out_ptr + pid_t * stride_ot + offs_h, total.to(out_ptr.dtype.element_ty), mask=mask_h)
