"""Attention over the paged cache: K1 to K4 decode, K5 and K6 prefill, at the shapes of an 8B model (32/8 heads of 128),
and K1 and K5 with Gemma 2's cap of scores and gpt-oss's sinks, at theirs.

A case's inputs: q, k_cache, v_cache, block_table, query_start_loc, seq_lens, tokens a sequence, k_scale, v_scale, and
sinks if it has them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ci.bench.kernels.case import Case, Goal, Inputs, Peer, float_dtype
from ci.kernels.attention import peers
from inflight_kernels.attention import gpu
from inflight_kernels.attention.gpu.decode_attention import CANDIDATES as DECODE
from inflight_kernels.attention.gpu.prefill_attention import CANDIDATES as PREFILL

# Probabilities and results are rounded to 8 bits of mantissa.
TOLERANCE = 2e-2


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A batch: the keys of each sequence, and its last `query_len` tokens as queries."""

    lengths: Sequence[int]
    query_len: int = 1
    fp8: bool = False
    num_q_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    block_size: int = 64
    soft_cap: float = 0.0
    has_sinks: bool = False

    @property
    def bytes(self) -> int:
        """Keys and values once, q and out."""
        kept = 2 * sum(self.lengths) * self.num_kv_heads * (1 if self.fp8 else 2)
        return (kept + 4 * len(self.lengths) * self.query_len * self.num_q_heads) * self.head_dim

    @property
    def flops(self) -> int:
        """Two products of head_dim for every query head and key it sees."""
        pairs = sum(self.query_len * n - self.query_len * (self.query_len - 1) // 2 for n in self.lengths)
        return 4 * self.num_q_heads * self.head_dim * pairs


def _inputs(shape: Shape, device: torch.device, i: int) -> Inputs:
    generator = torch.Generator(device).manual_seed(i)
    dtype = float_dtype(device)
    batch, longest = len(shape.lengths), max(shape.lengths)
    max_blocks = -(-longest // shape.block_size)
    num_blocks = sum(-(-n // shape.block_size) for n in shape.lengths)
    order = torch.randperm(num_blocks, generator=generator, device=device).int()
    table = torch.zeros(batch, max_blocks, dtype=torch.int32, device=device)
    used = 0
    for row, n in enumerate(shape.lengths):
        count = -(-n // shape.block_size)
        table[row, :count] = order[used : used + count]
        used += count

    def random(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, device=device, dtype=dtype)

    caches = [random(num_blocks, shape.block_size, shape.num_kv_heads, shape.head_dim) for _ in range(2)]
    if shape.fp8:
        caches = [cache.to(torch.float8_e4m3fn) for cache in caches]
    starts = torch.arange(batch + 1, dtype=torch.int32, device=device) * shape.query_len
    lengths = torch.tensor(shape.lengths, dtype=torch.int32, device=device)
    q = random(batch * shape.query_len, shape.num_q_heads, shape.head_dim)
    scales = (0.5, 2.0) if shape.fp8 else (1.0, 1.0)
    sinks = [random(shape.num_q_heads).float()] if shape.has_sinks else []
    return (q, *caches, table, starts, lengths, shape.query_len, *scales, *sinks)


def _decode(inputs: Inputs, deterministic: bool = False, soft_cap: float = 0.0) -> Tensor:
    q, k_cache, v_cache, table, _, lengths, _, k_scale, v_scale, *sinks = inputs
    return gpu.decode_attention(
        q,
        k_cache,
        v_cache,
        table,
        lengths,
        q.shape[-1] ** -0.5,
        k_scale=k_scale,
        v_scale=v_scale,
        deterministic=deterministic,
        soft_cap=soft_cap,
        sinks=sinks[0] if sinks else None,
    )


def _prefill(inputs: Inputs, deterministic: bool = False, soft_cap: float = 0.0) -> Tensor:
    q, k_cache, v_cache, table, starts, lengths, query_len, k_scale, v_scale, *sinks = inputs
    return gpu.prefill_attention(
        q,
        k_cache,
        v_cache,
        table,
        starts,
        lengths,
        query_len,
        q.shape[-1] ** -0.5,
        k_scale=k_scale,
        v_scale=v_scale,
        deterministic=deterministic,
        soft_cap=soft_cap,
        sinks=sinks[0] if sinks else None,
    )


def _reference(inputs: Inputs, soft_cap: float = 0.0) -> Tensor:
    """The softmax written out in float32, one KV head of one sequence at a time."""
    q, k_cache, v_cache, table, _, lengths, query_len, k_scale, v_scale, *sinks = inputs
    group = q.shape[1] // k_cache.shape[2]
    out = torch.empty(q.shape, device=q.device)
    for row, length in enumerate(lengths.tolist()):
        mine = slice(row * query_len, (row + 1) * query_len)
        keys, values = (cache[table[row].long()].flatten(0, 1)[:length].float() for cache in (k_cache, v_cache))
        positions = torch.arange(length - query_len, length, device=q.device)
        hidden = torch.arange(length, device=q.device)[None, :] > positions[:, None]
        for head in range(k_cache.shape[2]):
            heads = slice(head * group, (head + 1) * group)
            scores = torch.einsum("mgd,nd->gmn", q[mine, heads].float(), keys[:, head])
            scores *= k_scale * q.shape[-1] ** -0.5
            if soft_cap:
                scores = soft_cap * torch.tanh(scores / soft_cap)
            scores = scores.masked_fill_(hidden, float("-inf"))
            for each in sinks:
                scores = torch.cat([scores, each[heads, None, None].expand(group, query_len, 1)], -1)
            weights = scores.softmax(-1)[..., :length]
            out[mine, heads] = torch.einsum("gmn,nd->mgd", weights, values[:, head]) * v_scale
    return out


def _own_bf16(inputs: Inputs) -> partial[Tensor]:
    q, k_cache, v_cache, *middle, k_scale, v_scale = inputs
    wide = ((k_cache.float() * k_scale).to(q.dtype), (v_cache.float() * v_scale).to(q.dtype))
    return partial(_decode, (q, *wide, *middle, 1.0, 1.0))


def _case(kernel: str, title: str, shape: Shape, goal: Goal, stretch: Goal, peers: dict[str, Peer]) -> Case:
    is_decode = shape.query_len == 1
    run = partial(_decode if is_decode else _prefill, soft_cap=shape.soft_cap)
    return Case(
        kernel=kernel,
        title=title,
        goal=goal,
        stretch=stretch,
        make_inputs=partial(_inputs, shape),
        run=run,
        run_deterministic=partial(run, deterministic=True),
        reference=partial(_reference, soft_cap=shape.soft_cap),
        # fp8 cases have values of twice the size.
        tolerance=TOLERANCE * (2 if shape.fp8 else 1),
        bytes=shape.bytes,
        formula=f"(2 sum(n) Hkv {1 if shape.fp8 else 2} + 2 T Hq 2) D bytes, 4 Hq D operations a query and visible key",
        flops=shape.flops,
        peers=peers,
        candidates={"decode_attention": DECODE} if is_decode else {"prefill_attention": PREFILL},
    )


def _tiny(lengths: Sequence[int], query_len: int = 1, **options: Any) -> Shape:
    return Shape(
        lengths=lengths, query_len=query_len, num_q_heads=4, num_kv_heads=2, head_dim=32, block_size=16, **options
    )


def cases(tiny: bool) -> list[Case]:
    """K1 to K6."""
    decode, prefill, fp8 = peers.DECODE, peers.PREFILL, peers.FP8_DECODE
    # 128 lengths from 128 to 8192 in equal steps, in no order: 37 and 128 have no common divisor.
    ragged = [128 + 8064 * (37 * i % 128) // 127 for i in range(128)]
    return [
        _case(
            "K1",
            "decode attention B=32 ctx 4k bf16, page 64",
            _tiny([40, 40]) if tiny else Shape(lengths=[4096] * 32),
            Goal(
                "88 % of the bandwidth, no slower than FA3 and FlashInfer", 0.88, ratios={"FA3": 1.0, "FlashInfer": 1.0}
            ),
            Goal("92 %", 0.92),
            decode,
        ),
        _case(
            "K1",
            "decode attention B=32 ctx 4k bf16, page 16",
            _tiny([40, 40]) if tiny else Shape(lengths=[4096] * 32, block_size=16),
            Goal(
                "88 % of the bandwidth, no slower than FA3 and FlashInfer", 0.88, ratios={"FA3": 1.0, "FlashInfer": 1.0}
            ),
            Goal("92 %", 0.92),
            decode,
        ),
        _case(
            "K2",
            "decode attention B=128 ctx 128 to 8k bf16, page 64",
            _tiny([70, 3, 20]) if tiny else Shape(lengths=ragged),
            Goal(
                "80 % of the bandwidth, 1.15 times as fast as vLLM's Triton kernel",
                0.80,
                ratios={"vLLM Triton": 1.15, "vLLM Triton, split": 1.15},
            ),
            Goal("88 %", 0.88),
            decode,
        ),
        _case(
            "K3",
            "decode attention B=1 ctx 1k bf16, page 64",
            _tiny([50]) if tiny else Shape(lengths=[1024]),
            Goal("at most 9 us, no slower than FlashInfer", microseconds=9.0, ratios={"FlashInfer": 1.0}),
            Goal("at most 7 us", microseconds=7.0),
            decode,
        ),
        _case(
            "K3",
            "decode attention B=1 ctx 32k bf16, page 64",
            _tiny([90]) if tiny else Shape(lengths=[32768]),
            Goal("65 % of the bandwidth, no slower than FlashInfer", 0.65, ratios={"FlashInfer": 1.0}),
            Goal("75 %", 0.75),
            decode,
        ),
        _case(
            "K4",
            "decode attention B=32 ctx 4k fp8 cache, page 64",
            _tiny([40, 33], fp8=True) if tiny else Shape(lengths=[4096] * 32, fp8=True),
            Goal("70 % of the bandwidth, 1.5 times as fast as ours in bf16", 0.70, ratios={"ours, bf16 cache": 1.5}),
            Goal("80 %", 0.80),
            fp8 | {"ours, bf16 cache": Peer(_own_bf16, on_cpu=True, own=True)},
        ),
        _case(
            "K5",
            "prefill attention S=8k causal bf16, page 64",
            _tiny([70], 70) if tiny else Shape(lengths=[8192], query_len=8192),
            Goal(
                "480 TFLOP/s, 0.70 of FA3, 1.2 times as fast as vLLM's Triton kernel",
                tflops=480.0,
                ratios={"FA3": 0.70, "vLLM Triton": 1.2},
            ),
            Goal("580 TFLOP/s, 0.85 of FA3", tflops=580.0, ratios={"FA3": 0.85}),
            prefill,
        ),
        _case(
            "K6",
            "prefill attention chunk of 2k after 16k bf16, page 64",
            _tiny([90], 30) if tiny else Shape(lengths=[16384 + 2048], query_len=2048),
            Goal("0.70 of FA3", ratios={"FA3": 0.70}),
            Goal("0.85 of FA3", ratios={"FA3": 0.85}),
            prefill,
        ),
        _case(
            "K1",
            "decode attention with sinks B=32 ctx 4k 64/8 d64 bf16, page 64",
            _tiny([40, 33], has_sinks=True)
            if tiny
            else Shape(lengths=[4096] * 32, num_q_heads=64, head_dim=64, has_sinks=True),
            Goal("82 % of the bandwidth", 0.82),
            Goal("90 %", 0.90),
            {},
        ),
        _case(
            "K5",
            "prefill attention with a soft cap S=8k causal 16/8 d256 bf16, page 64",
            _tiny([70], 70, soft_cap=2.0)
            if tiny
            else Shape(lengths=[8192], query_len=8192, num_q_heads=16, head_dim=256, soft_cap=50.0),
            Goal("300 TFLOP/s", tflops=300.0),
            Goal("400 TFLOP/s", tflops=400.0),
            {},
        ),
    ]
