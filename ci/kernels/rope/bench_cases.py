"""Rotation, optional norms of q and k, and the KV write, in one launch: K8."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from ci.bench.kernels.case import Case, Goal, Inputs, Peer, Result, float_dtype
from inflight_kernels.rope import gpu
from inflight_kernels.rope.gpu.rope_kv_write import CANDIDATES

EPS = 1e-6
SCALE = 0.05
MAX_POSITIONS = 8192
FP8_LARGEST = 448.0


def _inputs(
    tokens: int, heads: tuple[int, int, int], block_size: int, cache_dtype: torch.dtype | None, with_norm: bool,
    device: torch.device, i: int
) -> Inputs:  # fmt: skip
    """q, k, v in one buffer, table, positions, caches, slots, and norm weights; every slot of the cache is written."""
    num_q_heads, num_kv_heads, head_dim = heads
    generator = torch.Generator(device).manual_seed(i)
    dtype = float_dtype(device)
    qkv = torch.randn(tokens, num_q_heads + 2 * num_kv_heads, head_dim, generator=generator, device=device).to(dtype)
    q, k, v = qkv.split([num_q_heads, num_kv_heads, num_kv_heads], 1)
    rates = 10000 ** -(torch.arange(0, head_dim, 2, device=device) / head_dim)
    angles = torch.arange(MAX_POSITIONS, device=device)[:, None] * rates
    table = torch.cat([angles.cos(), angles.sin()], 1)
    positions = torch.arange(tokens, device=device) % MAX_POSITIONS
    shape = (-(-tokens // block_size), block_size, num_kv_heads, head_dim)
    caches = [torch.zeros(shape, device=device).to(cache_dtype or dtype) for _ in range(2)]
    # Blocks of sequences lie anywhere; the slots of a block follow one another.
    blocks = torch.randperm(shape[0], generator=generator, device=device)
    slots = (blocks[:, None] * block_size + torch.arange(block_size, device=device)).flatten()[:tokens]
    norms = tuple(torch.randn(2, head_dim, generator=generator, device=device).to(dtype)) if with_norm else (None, None)
    return (q, k, v, table, positions, *caches, slots, *norms)


def _run(inputs: Inputs) -> Result:
    caches = inputs[5:7]
    scale = SCALE if caches[0].dtype == torch.float8_e4m3fn else 1.0
    return (gpu.rope_and_kv_write(*inputs, EPS, scale, scale), *caches)


def _run_adjacent_pairs(inputs: Inputs) -> Result:
    return (gpu.rope_and_kv_write(*inputs, EPS, adjacent_pairs=True), *inputs[5:7])


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, weight: Tensor | None) -> Tensor:
    """Half-split rotation as a complex product."""
    if weight is not None:
        x = F.rms_norm(x, (x.shape[-1],), weight, EPS)
    x1, x2 = x.float().chunk(2, -1)
    turned = torch.complex(x1, x2) * torch.complex(cos, sin)
    return torch.cat([turned.real, turned.imag], -1)


def _reference(inputs: Inputs) -> Result:
    q, k, v, table, positions, k_cache, _, slots, q_weight, k_weight = inputs
    cos, sin = table[positions][:, None].chunk(2, -1)
    weights = [None if weight is None else weight.float() for weight in (q_weight, k_weight)]
    caches = [torch.zeros(k_cache.shape, device=q.device) for _ in range(2)]
    scale = SCALE if k_cache.dtype == torch.float8_e4m3fn else 1.0
    for cache, rows in zip(caches, (_rotated(k.float(), cos, sin, weights[1]), v.float()), strict=True):
        cache.view(-1, *k.shape[1:])[slots] = (rows / scale).clamp(-FP8_LARGEST, FP8_LARGEST)
    return (_rotated(q.float(), cos, sin, weights[0]), *caches)


def _adjacent_pairs_reference(inputs: Inputs) -> Result:
    """Elements of q and k are brought into the order of pairs that are halves apart, and back."""
    q, k, *others = inputs
    halves = [torch.cat([each[..., ::2], each[..., 1::2]], -1) for each in (q, k)]
    rotated, k_cache, v_cache = _reference((*halves, *others))
    return _interleaved(rotated), _interleaved(k_cache), v_cache


def _interleaved(x: Tensor) -> Tensor:
    return torch.stack(x.chunk(2, -1), -1).flatten(-2)


def _formula(
    q: Tensor, k: Tensor, v: Tensor, table: Tensor, positions: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor,
    q_weight: Tensor | None, k_weight: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """What a model written in torch does, for caches of the dtype of q."""
    cos, sin = table[positions][:, None].chunk(2, -1)

    def rotate(x: Tensor, weight: Tensor | None) -> Tensor:
        if weight is not None:
            x = F.rms_norm(x, (x.shape[-1],), weight, EPS)
        x1, x2 = x.float().chunk(2, -1)
        return torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin], -1).to(x.dtype)

    for cache, rows in ((k_cache, rotate(k, k_weight)), (v_cache, v)):
        cache.view(-1, *k.shape[1:]).index_copy_(0, slots, rows)
    return rotate(q, q_weight), k_cache, v_cache


def _with_own_caches(function: Callable[..., Result], inputs: Inputs) -> Callable[[], Result]:
    """Bound to other caches than ours, so that each writes what it is judged by."""
    caches = (inputs[5].clone(), inputs[6].clone())
    return partial(function, *inputs[:5], *caches, *inputs[7:])


def _vllm(inputs: Inputs) -> Callable[[], Result]:
    from vllm import _custom_ops

    q, k, v, table, positions, k_cache, v_cache, slots = inputs[:8]
    tokens, head_dim = q.shape[0], q.shape[2]
    flat_q, flat_k, kept = q.reshape(tokens, -1), k.reshape(tokens, -1), v.contiguous()
    caches = (k_cache.clone(), v_cache.clone())
    one = torch.ones(1, device=q.device)
    narrow = table.to(q.dtype)

    def call() -> Result:
        _custom_ops.rotary_embedding(positions, flat_q, flat_k, head_dim, narrow, True)
        _custom_ops.reshape_and_cache_flash(flat_k.view_as(kept), kept, *caches, slots, "auto", one, one)
        return (flat_q.view(q.shape), *caches)

    return call


def _flashinfer(inputs: Inputs) -> Callable[[], Result]:
    from flashinfer.page import append_paged_kv_cache
    from flashinfer.rope import apply_rope_with_cos_sin_cache

    q, k, v, table, positions, k_cache, v_cache, slots = inputs[:8]
    tokens, head_dim, block_size = q.shape[0], q.shape[2], k_cache.shape[1]
    flat_q, flat_k, kept = q.reshape(tokens, -1), k.reshape(tokens, -1), v.contiguous()
    caches = (k_cache.clone(), v_cache.clone())
    int32 = partial(torch.tensor, dtype=torch.int32, device=q.device)
    # One long sequence whose pages are the blocks in the order of the slots.
    pages = (slots[::block_size] // block_size).int()
    batch = torch.zeros(tokens, dtype=torch.int32, device=q.device)
    places = torch.arange(tokens, dtype=torch.int32, device=q.device)
    bounds, last = int32([0, len(pages)]), int32([(tokens - 1) % block_size + 1])

    def call() -> Result:
        new_q, new_k = apply_rope_with_cos_sin_cache(positions, flat_q, flat_k, head_dim, table)
        append_paged_kv_cache(new_k.view_as(kept), kept, batch, places, caches, pages, bounds, last)
        return (new_q.view(q.shape), *caches)

    return call


TORCH_PEERS = {
    "torch eager": Peer(partial(_with_own_caches, _formula), on_cpu=True),
    "torch.compile": Peer(lambda inputs: _with_own_caches(torch.compile(_formula, dynamic=False), inputs)),
}
# Without norms and of two launches each. vLLM rotates in place, over and over: not compared.
ROPE_PEERS = {
    **TORCH_PEERS,
    "FlashInfer": Peer(_flashinfer, needs="flashinfer"),
    "vLLM": Peer(_vllm, needs="vllm", comparable=False),
}


def _case(
    title: str, tokens: int, tiny: bool, goal: Goal, stretch: Goal | None, with_norm: bool, fp8: bool = False
) -> Case:
    heads = (4, 2, 32) if tiny else (32, 8, 128)
    num_q_heads, num_kv_heads, head_dim = heads
    q_bytes, kv_bytes = 4 * num_q_heads * head_dim, (2 + (1 if fp8 else 2)) * 2 * num_kv_heads * head_dim
    peers = {} if fp8 else TORCH_PEERS if with_norm else ROPE_PEERS
    return Case(
        kernel="K8",
        title=title,
        goal=goal,
        stretch=stretch,
        make_inputs=partial(_inputs, tokens, heads, 4 if tiny else 64, torch.float8_e4m3fn if fp8 else None, with_norm),
        run=_run,
        reference=_reference,
        # Half a step of e4m3 is a 16th of the value.
        tolerance=8e-2 if fp8 else 4e-2,
        bytes=tokens * (q_bytes + kv_bytes + 16) + min(tokens, MAX_POSITIONS) * 4 * head_dim,
        formula=f"T (4 Hq D + {3 if fp8 else 4} * 2 Hkv D + 16) + min(T, {MAX_POSITIONS}) 4 D",
        peers=peers,
        candidates={} if fp8 else {"rope_and_kv_write": CANDIDATES},
    )


def _adjacent_pairs_case(tokens: int, tiny: bool, goal: Goal) -> Case:
    like = _case("RoPE of adjacent pairs+KV write 16k tokens 32/8 d128 bf16", tokens, tiny, goal, None, False)
    return replace(like, run=_run_adjacent_pairs, reference=_adjacent_pairs_reference, peers={})


def cases(tiny: bool) -> list[Case]:
    """16k and 64 tokens of 32/8 heads of 128."""
    many, few = (8, 4) if tiny else (16384, 64)
    wide, stretch = Goal("at least 85 % of the bandwidth", fraction=0.85), Goal("90 %", fraction=0.9)
    quick = Goal("at most 4 us", microseconds=4.0)
    return [
        _case("RoPE+KV write 16k tokens 32/8 d128 bf16", many, tiny, wide, stretch, False),
        _case("RoPE+qk-norm+KV write 16k tokens 32/8 d128 bf16", many, tiny, wide, stretch, True),
        _case("RoPE+qk-norm+fp8 KV write 16k tokens 32/8 d128", many, tiny, wide, stretch, True, True),
        _adjacent_pairs_case(many, tiny, Goal("at least 80 % of the bandwidth", fraction=0.8)),
        _case("RoPE+KV write B=64 32/8 d128 bf16", few, tiny, quick, None, False),
        _case("RoPE+qk-norm+KV write B=64 32/8 d128 bf16", few, tiny, quick, None, True),
    ]
