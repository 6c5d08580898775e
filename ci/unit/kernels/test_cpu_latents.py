"""Latent attention in C++: products of heads, the write of latents and attention to them are those of torch, with the
same bits in any batch and chunks and by all variants.

Run: pytest ci/unit/kernels/test_cpu_latents.py
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
import torch
from compiled_network import HAS_AMX, IN_ORDER_OF_FMA, force, needs_compiler
from torch import Tensor

import inflight_kernels
from inflight_kernels.cpu import Batch, Instruction, Program, Unsupported, WeightPacker, load_library, record
from inflight_kernels.cpu.variants import AMX
from inflight_kernels.kv_cache.step_blocks import StepBlocks

pytestmark = [pytest.mark.slow, needs_compiler]

BLOCK_SIZE, NUM_POSITIONS = 8, 700
COMPUTED_WITH = [*IN_ORDER_OF_FMA, *([(torch.bfloat16, AMX, Instruction.AMX)] if HAS_AMX else [])]
ERRORS = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


@dataclass
class LatentAttention:
    """Attention of heads of N + R elements to latents of L and keys of R, with values of V for each head."""

    dtype: torch.dtype
    num_heads: int = 3
    plain: int = 32
    rotated: int = 32
    latent: int = 64
    value: int = 96
    adjacent_pairs: bool = True
    kv_dtype: torch.dtype | None = None
    cache: Tensor = field(init=False)
    scale: Tensor | float = field(init=False)

    def __post_init__(self) -> None:
        blocks = 4 * NUM_POSITIONS // BLOCK_SIZE
        shape = (blocks, BLOCK_SIZE, 1, self.latent + self.rotated)
        self.cache = torch.zeros(shape, dtype=self.kv_dtype or self.dtype)
        self.scale = torch.zeros(shape[:3]) if self.kv_dtype == torch.int8 else 1.0
        if self.kv_dtype == torch.float8_e4m3fn:
            self.scale = 0.02
        angles = torch.arange(NUM_POSITIONS)[:, None] / 10.0 ** (torch.arange(self.rotated // 2) / 4)
        self.cos_sin = torch.cat([angles.cos(), angles.sin()], 1)
        self.norm = 1 + random(self.latent, dtype=self.dtype) / 4
        self.keys_of_heads = random(self.num_heads, self.latent, self.plain, dtype=self.dtype) / 8
        self.values_of_heads = random(self.num_heads, self.value, self.latent, dtype=self.dtype) / 8

    @property
    def num_inputs(self) -> int:
        return self.num_heads * (self.plain + self.rotated) + self.latent + self.rotated

    def __call__(self, x: Tensor, batch: Batch) -> Tensor:
        num_decodes = batch.decode_rows_N.shape[0]
        head_dim = self.plain + self.rotated
        q, latent = x[:, : self.num_heads * head_dim].view(-1, self.num_heads, head_dim), x[:, -self.cache.shape[3] :]
        queries = x.new_empty(len(x), self.num_heads, self.latent + self.rotated)
        inflight_kernels.head_linear(q[..., : self.plain], self.keys_of_heads, queries[..., : self.latent])
        inflight_kernels.rope_and_latent_write(
            q[..., self.plain :], latent, self.norm, 1e-6, self.cos_sin, batch.positions_T, self.cache,
            batch.blocks[0].slots_T, queries[..., self.latent :], self.scale, self.adjacent_pairs,
        )  # fmt: skip
        out = x.new_empty(len(x), self.num_heads, self.latent)
        caches, scales = (self.cache, self.cache[..., : self.latent]), {"k_scale": self.scale, "v_scale": self.scale}
        if num_decodes:
            inflight_kernels.decode_attention(
                queries[:num_decodes], *caches, batch.blocks[0].block_table, batch.decode_lens_N, 0.2,
                out=out[:num_decodes], table_rows=batch.decode_rows_N, **scales,
            )  # fmt: skip
        if batch.prefill_rows_P.shape[0]:
            inflight_kernels.prefill_attention(
                queries[num_decodes:], *caches, batch.blocks[0].block_table, batch.prefill_starts, batch.prefill_lens_P,
                len(x), 0.2, out=out[num_decodes:], table_rows=batch.prefill_rows_P, **scales,
            )  # fmt: skip
        return inflight_kernels.head_linear(out, self.values_of_heads).view(-1, self.num_heads * self.value)

    def compiled(self) -> Program:
        """Takes the weights' memory."""
        library, recording = load_library(self.dtype), record(self, self.num_inputs, self.dtype)
        return Program(library, recording, WeightPacker(library, [recording]))

    def by_heads(self, x: Tensor) -> Tensor:
        """The result for one sequence, float64, from keys and values that are made for each head."""
        q, latent = x.double().split([self.num_inputs - self.latent - self.rotated, self.latent + self.rotated], 1)
        q = q.view(len(x), self.num_heads, -1)
        normed = latent[:, : self.latent]
        normed = normed / (normed.square().mean(1, keepdim=True) + 1e-6).sqrt() * self.norm
        angles = torch.complex(*self.cos_sin[: len(x)].double().chunk(2, 1))[:, None]

        def turned(part: Tensor) -> Tensor:
            if not self.adjacent_pairs:
                part = part.unflatten(2, (2, -1)).transpose(2, 3).flatten(2)
            pairs = torch.view_as_complex(part.unflatten(2, (-1, 2)).contiguous())
            return torch.view_as_real(pairs * angles).flatten(2)

        rotated_keys = turned(latent[:, None, self.latent :]).expand(-1, self.num_heads, -1)
        keys = torch.cat([torch.einsum("tl,hln->thn", normed, self.keys_of_heads.double()), rotated_keys], 2)
        values = torch.einsum("tl,hvl->thv", normed, self.values_of_heads.double())
        queries = torch.cat([q[..., : self.plain], turned(q[..., self.plain :])], 2)
        scores = torch.einsum("qhd,khd->hqk", queries, keys) * 0.2
        scores = scores.masked_fill(torch.ones(len(x), len(x)).triu(1).bool(), float("-inf"))
        return torch.einsum("hqk,khv->qhv", scores.softmax(-1), values).flatten(1)


def in_chunks(program: Program, x: Tensor, sizes: list[int]) -> Tensor:
    """The prompt of one sequence in chunks, of which those of one token are decodes."""
    table = torch.randperm(NUM_POSITIONS // BLOCK_SIZE, generator=torch.Generator().manual_seed(3))[None].int()
    results, begin = [], 0
    for size in sizes:
        positions = torch.arange(begin, begin + size)
        slots = table[0, positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE
        whole = replace(
            Batch.meta(int(size == 1), int(size > 1)),
            positions_T=positions,
            blocks=(StepBlocks(slots, table),),
        )
        lengths, rows = torch.tensor([begin + size], dtype=torch.int32), torch.zeros(1, dtype=torch.int64)
        none, starts = torch.empty(0, dtype=torch.int64), torch.tensor([0, size], dtype=torch.int32)
        decode, prefill = ((rows, lengths), (none, none.int())) if size == 1 else ((none, none.int()), (rows, lengths))
        batch = replace(
            whole,
            decode_rows_N=decode[0],
            decode_lens_N=decode[1],
            prefill_rows_P=prefill[0],
            prefill_lens_P=prefill[1],
            prefill_starts=starts if size > 1 else starts[:1],
        )
        results.append(program(x[begin : begin + size].clone(), batch))
        begin += size
    return torch.cat(results)


SHAPES = [
    {},
    {"num_heads": 40, "plain": 64, "latent": 128, "value": 32, "adjacent_pairs": False},
    {"num_heads": 2, "plain": 128, "rotated": 64, "latent": 512, "value": 128},
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", ERRORS, ids=str)
def test_attention_to_latents_is_that_to_keys_and_values_of_each_head(
    dtype: torch.dtype, shape: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one prompt, in chunks, and token by token with more than one part of keys: the same bits by all variants."""
    count, of_all = 530, None
    attention = LatentAttention(dtype, **shape)  # type: ignore[arg-type]
    x = random(count, attention.num_inputs, dtype=dtype)
    exact = attention.by_heads(x)
    for of_dtype, variant, instruction in COMPUTED_WITH:
        if of_dtype != dtype:
            continue
        force(monkeypatch, instruction, variant)
        program = LatentAttention(dtype, **shape).compiled()  # type: ignore[arg-type]
        found = in_chunks(program, x, [count])
        for sizes in ([1] * 20 + [count - 20], [200, 100, count - 320, *[1] * 20]):
            assert torch.equal(in_chunks(program, x, sizes), found), (variant, sizes)
        if instruction is not Instruction.AMX:
            of_all = found if of_all is None else of_all
            assert torch.equal(found, of_all), variant
        assert (found.double() - exact).norm() < ERRORS[dtype] * exact.norm()


@pytest.mark.parametrize("kv_dtype", [torch.float8_e4m3fn, torch.int8], ids=str)
def test_a_cache_of_8_bits_holds_a_latent_as_the_reference_stores_it(kv_dtype: torch.dtype) -> None:
    ours, theirs = (LatentAttention(torch.float32, kv_dtype=kv_dtype) for _ in range(2))
    x = random(60, ours.num_inputs)
    exact = theirs.by_heads(x)
    found = in_chunks(ours.compiled(), x, [41, *[1] * 19])
    expected = in_chunks(theirs, x, [41, *[1] * 19])  # type: ignore[arg-type]
    # A norm adds up in another order: a number in the middle between two of 8 bits may become either.
    as_numbers = [each.cache.float() * torch.as_tensor(each.scale).unsqueeze(-1) for each in (ours, theirs)]
    assert (as_numbers[0] - as_numbers[1]).norm() < 1e-3 * as_numbers[1].norm()
    assert (found - expected).norm() < 1e-2 * expected.norm()
    assert (found.double() - exact).norm() < 0.1 * exact.norm()


def test_other_layouts_are_reasons() -> None:
    for changes, reason in (
        ({"plain": 16}, "a head has 16 inputs, which is not a multiple of 32"),
        ({"latent": 96, "rotated": 16}, "a head has 112 elements, which is not a multiple of 32"),
        ({"latent": 48, "rotated": 16}, "a value has 48 elements, which is not a multiple of 32"),
        ({"latent": 576, "rotated": 32}, "a head has 608 elements, which is not a multiple of 32 up to 576"),
    ):
        attention = LatentAttention(torch.float32, **changes)  # type: ignore[arg-type]
        with pytest.raises(Unsupported, match=reason):
            record(attention, attention.num_inputs, torch.float32)
