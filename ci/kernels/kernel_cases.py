"""What the kernels' tests share: dtypes to try, tolerances by name, paged caches filled at random."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import inflight_kernels
from inflight_kernels.quantization.reference import quantize_per_token

# The interpreter computes bf16 wrongly, so bf16 is tried where it is compiled.
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if torch.cuda.is_available() else [])]
# float8_e4m3fn takes compute capability 8.9, or the repaired interpreter (`interpreter.py`).
HAS_FLOAT8 = not torch.cuda.is_available() or torch.cuda.get_device_capability() >= (8, 9)
QUANTIZED_DTYPES = [torch.int8, *([torch.float8_e4m3fn] if HAS_FLOAT8 else [])]

# Elementwise operations: one or two roundings to the dtype of the result.
ELEMENTWISE_TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
# Attention: probabilities are rounded to the dtype before they meet the values.
ATTENTION_TOLERANCE = {torch.float32: 6e-6, torch.float16: 3e-3, torch.bfloat16: 2e-2}

# A configuration of linear layers as the table of a device has them, for a network of tens of features.
LINEAR_CONFIG = dict(BLOCK_M=16, BLOCK_N=32, BLOCK_K=32, NUM_SPLITS=2, GROUP_N=8, num_warps=4, num_stages=3)


def child_environment() -> dict[str, str]:
    """Environment of a child process: the same packages, and triton code compiled instead of interpreted."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    roots = (str(Path(__file__).parents[2]), str(Path(inflight_kernels.__file__).parents[1]))
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [*roots, environment.get("PYTHONPATH")]))
    return environment


def assert_near(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    """Same shape, finite, and within `tolerance`, absolute and relative, in float32 on the CPU."""
    torch.testing.assert_close(actual.float().cpu(), expected.float().cpu(), atol=tolerance, rtol=tolerance)


def random_cache(
    lengths: list[int], block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """k_cache, v_cache and block_table (batch, max_blocks) for sequences in shuffled blocks.

    Poisoned: slots past a sequence's length and blocks of nobody hold NaN, and table entries past its blocks name such.
    """
    counts = [-(-length // block_size) for length in lengths]
    num_blocks = sum(counts) + 3
    order = torch.randperm(num_blocks)
    k_cache = torch.full((num_blocks, block_size, num_kv_heads, head_dim), float("nan"), dtype=dtype)
    v_cache = torch.full_like(k_cache, float("nan"))
    table = torch.full((len(lengths), max([*counts, 1]) + 1), int(order[-1]), dtype=torch.int32)
    used = 0
    for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        blocks = order[used : used + count]
        used += count
        table[row, :count] = blocks.int()
        slots = (blocks[:, None] * block_size + torch.arange(block_size)).flatten()[:length]
        for cache in (k_cache, v_cache):
            cache.view(-1, num_kv_heads, head_dim)[slots] = torch.randn(length, num_kv_heads, head_dim).to(dtype)
    return k_cache, v_cache, table


def stored_as(
    kv_dtype: torch.dtype, cache: Tensor, scale: float, dtype: torch.dtype
) -> tuple[Tensor, float | Tensor, Tensor]:
    """A cache as float8_e4m3fn or int8 holds it; by what it is divided, of fp8 `scale`; and what is read of it beside
    queries of `dtype`."""
    if kv_dtype == torch.int8:
        values, scales = quantize_per_token(cache, torch.int8)
        return values, scales, (values.float() * scales[..., None]).to(dtype)
    values = cache.to(kv_dtype)
    return values, scale, scale * values.float()


def among_others(table: Tensor) -> tuple[Tensor, Tensor]:
    """A table in which the rows of `table` lie scattered among as many others, and where each of them is, int64.

    What the others name is no block of any sequence.
    """
    rows = torch.randperm(2 * len(table))[: len(table)]
    wide = torch.full((2 * len(table), table.shape[1]), int(table[0, -1]), dtype=table.dtype)
    wide[rows] = table
    return wide, rows


def capped_and_sinks(num_q_heads: int, device: torch.device) -> list[dict[str, Any]]:
    """Arguments of attention that cap its scores, give it sinks, and both. The first sink is far above all scores, the
    second one below."""
    sinks = torch.cat([torch.tensor([200.0, -200.0]), 2 * torch.randn(num_q_heads - 2)]).to(device)
    return [{"soft_cap": 0.7}, {"sinks": sinks}, {"soft_cap": 3.0, "sinks": sinks}]


def naive_attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, window: int, soft_cap: float = 0.0, sinks: Tensor | None = None
) -> Tensor:
    """One sequence in float32, written out: q (n, Hq, D) are the last n positions of k and v (length, Hkv, D)."""
    group = q.shape[1] // k.shape[1]
    keys, values = (x.float().repeat_interleave(group, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.float(), keys) * scale
    if soft_cap:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    positions = torch.arange(len(k) - len(q), len(k))[:, None]
    distance = positions - torch.arange(len(k))[None, :]
    visible = (distance >= 0) & (distance < (window or len(k)))
    scores = scores.masked_fill(~visible, float("-inf"))
    if sinks is not None:
        # A key whose value is zeros.
        scores = torch.cat([scores, sinks.cpu()[:, None, None].expand(-1, len(q), 1)], dim=-1)
        values = torch.cat([values, torch.zeros_like(values[:1])])
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)


def without_poison(cache: Tensor) -> Tensor:
    """A copy with zeros for NaN: the torch reference reads whole blocks and masks afterwards."""
    return cache.nan_to_num(0.0)


def sequence_of(cache: Tensor, table_row: Tensor, length: int) -> Tensor:
    """The cached rows of one sequence, (length, num_kv_heads, head_dim), read slot by slot."""
    block_size = cache.shape[1]
    positions = torch.arange(length)
    return cache[table_row[positions // block_size].long(), positions % block_size]
