"""A KV cache of 8 bits in C++: it stores the bytes that the reference stores and reads their numbers, by all variants.

Run: pytest ci/unit/kernels/test_cpu_cache.py
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from compiled_network import HAS_AMX, IN_ORDER_OF_FMA, force, needs_compiler
from torch import Tensor

import inflight_kernels
from inflight_kernels.cpu import Batch, Instruction, Program, WeightPacker, load_library, record
from inflight_kernels.cpu.variants import AMX
from inflight_kernels.kv_cache.step_blocks import StepBlocks

pytestmark = [pytest.mark.slow, needs_compiler]

HEAD_DIM = 256
COS_SIN = torch.tensor([1.0, 0.0]).repeat_interleave(HEAD_DIM // 2)[None]
"""Of position 0, which every token has: keys are stored as they come, whatever rounds a rotation."""
COMPUTED_WITH = [*IN_ORDER_OF_FMA, *([(torch.bfloat16, AMX, Instruction.AMX)] if HAS_AMX else [])]


@dataclass
class Attending:
    """A key head's rotation and attention of two query heads, over a cache of its own. `options`: of attention."""

    num_slots: int
    scales: tuple[float | Tensor, float | Tensor] | None
    """Of fp8; None = int8, which has some of each slot."""
    options: dict[str, Any] = field(default_factory=dict)
    keys: Tensor = field(init=False)
    values: Tensor = field(init=False)

    def __post_init__(self) -> None:
        dtype = torch.float8_e4m3fn if self.scales else torch.int8
        self.keys, self.values = (torch.zeros(self.num_slots, 1, 1, HEAD_DIM, dtype=dtype) for _ in range(2))
        self.scales = self.scales or (torch.zeros(self.num_slots, 1, 1), torch.zeros(self.num_slots, 1, 1))

    def __call__(self, x: Tensor, batch: Batch) -> Tensor:
        assert self.scales is not None
        k_scale, v_scale = self.scales
        heads, num_decodes = x.view(-1, 4, HEAD_DIM), batch.decode_rows_N.shape[0]
        q = inflight_kernels.rope_and_kv_write(
            heads[:, :2], heads[:, 2:3], heads[:, 3:], COS_SIN, batch.positions_T, self.keys, self.values,
            batch.blocks[0].slots_T, k_scale=k_scale, v_scale=v_scale,
        )  # fmt: skip
        out = torch.empty_like(q)
        if num_decodes:
            inflight_kernels.decode_attention(
                q[:num_decodes], self.keys, self.values, batch.blocks[0].block_table, batch.decode_lens_N, 0.1,
                out=out[:num_decodes], table_rows=batch.decode_rows_N, k_scale=k_scale, v_scale=v_scale,
                **self.options,
            )  # fmt: skip
        if batch.prefill_rows_P.shape[0]:
            inflight_kernels.prefill_attention(
                q[num_decodes:], self.keys, self.values, batch.blocks[0].block_table, batch.prefill_starts,
                batch.prefill_lens_P, len(x), 0.1, out=out[num_decodes:], table_rows=batch.prefill_rows_P,
                k_scale=k_scale, v_scale=v_scale, **self.options,
            )  # fmt: skip
        return out.view(-1, 2 * HEAD_DIM)

    def compiled(self, dtype: torch.dtype) -> Program:
        library, recording = load_library(dtype), record(self, 4 * HEAD_DIM, dtype)
        return Program(library, recording, WeightPacker(library, [recording]))

    @property
    def stored(self) -> list[Tensor]:
        """Of slots whose scale is a number: no number of 8 bits stands for what has none."""
        assert self.scales is not None
        stored = []
        for numbers, scale in zip((self.keys, self.values), self.scales, strict=True):
            of_slots = scale if isinstance(scale, Tensor) else torch.ones(self.num_slots, 1, 1)
            is_finite = of_slots.isfinite().flatten()
            stored += [numbers.view(torch.uint8)[is_finite], of_slots[is_finite]]
        return stored


def alone(count: int) -> Batch:
    """Decoding rows of one token each, which see nothing but themselves."""
    return Batch(
        positions_T=torch.zeros(count, dtype=torch.int64),
        blocks=(StepBlocks(torch.arange(count), torch.arange(count, dtype=torch.int32)[:, None]),),
        decode_rows_N=torch.arange(count),
        decode_lens_N=torch.ones(count, dtype=torch.int32),
        prefill_rows_P=torch.empty(0, dtype=torch.int64),
        prefill_lens_P=torch.empty(0, dtype=torch.int32),
        prefill_starts=torch.zeros(1, dtype=torch.int32),
    )


def prompt(count: int) -> Batch:
    """One prompt, and a token that attends to its first 9."""
    return Batch(
        positions_T=torch.zeros(1 + count, dtype=torch.int64),
        blocks=(StepBlocks(torch.tensor([-1, *range(count)]), torch.arange(count, dtype=torch.int32)[None]),),
        decode_rows_N=torch.zeros(1, dtype=torch.int64),
        decode_lens_N=torch.tensor([9], dtype=torch.int32),
        prefill_rows_P=torch.zeros(1, dtype=torch.int64),
        prefill_lens_P=torch.tensor([count], dtype=torch.int32),
        prefill_starts=torch.tensor([0, count], dtype=torch.int32),
    )


def all_numbers(dtype: torch.dtype) -> Tensor:
    """(256, 256): of 16 bits all that there are; of 32 those in the middle between two of fp8 and their neighbours,
    then any."""
    if dtype.itemsize == 2:
        return torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype).view(256, 256)
    bits = torch.randint(-(2**31), 2**31, (2**16,), generator=torch.Generator().manual_seed(3)).to(torch.int32)
    numbers = bits.view(torch.float32)
    of_fp8 = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middles = torch.cat([(of_fp8[1:] + of_fp8[:-1]) / 2, of_fp8])
    near = torch.cat([middles, *(middles.nextafter(torch.tensor(bound)) for bound in (-1.0, 1000.0))])
    numbers[: 2 * len(near)] = torch.cat([near, -near])
    return numbers.view(256, 256)


@pytest.mark.parametrize("scales", [(1.0, 1.0), (0.3, 0.07), None], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_every_number_is_stored_and_read_as_by_the_reference(
    dtype: torch.dtype, scales: tuple[float, float] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = all_numbers(dtype)
    keys = 3 * torch.randn(256, HEAD_DIM, generator=torch.Generator().manual_seed(4))
    # Queries of zeros, so that the only weight of each is 1.
    x = torch.cat([torch.zeros(256, 2 * HEAD_DIM, dtype=dtype), keys.to(dtype), values], 1)
    reference = Attending(256, scales)
    reference(x.clone(), alone(256))
    if scales:
        assert len(reference.stored[2].unique()) == 256  # what is no number too, of either sign
    assert reference.scales is not None
    expected = (reference.values.float() * torch.as_tensor(reference.scales[1]).unsqueeze(-1)).to(dtype)
    expected = expected.view(256, HEAD_DIM).repeat(1, 2)
    for of_dtype, variant, instruction in COMPUTED_WITH:
        if of_dtype == dtype:
            force(monkeypatch, instruction, variant)
            ours = Attending(256, scales)
            found = ours.compiled(dtype)(x.clone(), alone(256))
            for mine, theirs in zip(ours.stored, reference.stored, strict=True):
                assert torch.equal(mine, theirs)
            torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    "options", [{}, {"soft_cap": 3.0, "sinks": torch.tensor([40.0, 1.5])}], ids=["plain", "cap and sinks"]
)
@pytest.mark.parametrize("scales", [(0.3, 0.07), None], ids=str)
@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1e-5), (torch.float16, 2e-3), (torch.bfloat16, 1e-2)])
def test_attention_is_that_of_the_numbers_times_their_scales(
    dtype: torch.dtype,
    most: float,
    scales: tuple[float, float] | None,
    options: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    count = 150
    x = torch.randn(1 + count, 4 * HEAD_DIM, generator=torch.Generator().manual_seed(6)).to(dtype)
    exact = Attending(count, scales, options)
    expected = exact(x.float(), prompt(count))
    for of_dtype, variant, instruction in COMPUTED_WITH:
        if of_dtype == dtype:
            force(monkeypatch, instruction, variant)
            found = Attending(count, scales, options).compiled(dtype)(x.clone(), prompt(count))
            assert (found.float() - expected).norm() < most * expected.norm()
