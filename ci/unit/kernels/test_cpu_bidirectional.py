"""Attention in both directions in C++ is torch's, with the same bits beside any sequences and by all variants.

Run: pytest ci/unit/kernels/test_cpu_bidirectional.py
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from compiled_network import IN_ORDER_OF_FMA, force, needs_compiler
from torch import Tensor

import inflight_kernels
from inflight_kernels import StepSequences
from inflight_kernels.attention import reference
from inflight_kernels.cpu import Batch, Instruction, Program, Unsupported, WeightPacker, load_library, record
from inflight_kernels.cpu.variants import Variant

pytestmark = [pytest.mark.slow, needs_compiler]

LENGTHS = [1, 45, 600, 33, 2, 128]
"""Of a part and more, of tiles, and less than one."""
ERRORS = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
NONE = torch.empty(0, dtype=torch.int32)


@dataclass(frozen=True)
class BothWays:
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    window: int = 0
    bias: Tensor | None = None

    @property
    def num_inputs(self) -> int:
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    def split(self, x: Tensor) -> tuple[Tensor, ...]:
        sizes = [count * self.head_dim for count in (self.num_heads, self.num_kv_heads, self.num_kv_heads)]
        return tuple(part.view(len(x), -1, self.head_dim) for part in x.split(sizes, 1))

    def __call__(self, x: Tensor, batch: Batch) -> Tensor:
        assert batch.sequences is not None
        attended = inflight_kernels.bidirectional_attention(
            *self.split(x), batch.sequences.starts, len(x), 0.3, self.window, self.bias
        )
        return attended.flatten(1)

    def program(self, dtype: torch.dtype) -> Program:
        library, recording = load_library(dtype), record(self, self.num_inputs, dtype)
        return Program(library, recording, WeightPacker(library, [recording]))


def batch_of(lengths: list[int]) -> Batch:
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    positions = torch.cat([torch.arange(length) for length in lengths])
    sequences = StepSequences(
        slots_B=torch.zeros(len(lengths), dtype=torch.int64), starts=starts, positions_T=positions
    )
    none = torch.empty(0, dtype=torch.int64)
    return Batch(
        positions_T=positions,
        blocks=(),
        decode_rows_N=none,
        decode_lens_N=NONE,
        prefill_rows_P=none,
        prefill_lens_P=NONE,
        prefill_starts=NONE,
        sequences=sequences,
    )


def inputs(attention: BothWays, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(sum(LENGTHS), attention.num_inputs, generator=generator).to(dtype)


def bias(num_heads: int) -> Tensor:
    return torch.randn(num_heads, 2 * max(LENGTHS) - 1, generator=torch.Generator().manual_seed(1))


KINDS = [
    BothWays(),
    BothWays(num_kv_heads=4, head_dim=64, window=7),
    BothWays(num_heads=2, head_dim=96, window=200),
    BothWays(num_kv_heads=4, bias=bias(4)),
    BothWays(num_kv_heads=1, bias=bias(4), window=40),
]


@pytest.mark.parametrize("attention", KINDS, ids=str)
@pytest.mark.parametrize("dtype", ERRORS)
def test_it_is_torchs(attention: BothWays, dtype: torch.dtype) -> None:
    x, batch = inputs(attention, dtype), batch_of(LENGTHS)
    assert batch.sequences is not None
    expected = reference.bidirectional_attention(
        *attention.split(x.float()), batch.sequences.starts, max(LENGTHS), 0.3, attention.window, attention.bias
    )
    found = attention.program(dtype)(x, batch).float()
    torch.testing.assert_close(found, expected.flatten(1), rtol=ERRORS[dtype], atol=ERRORS[dtype])


@pytest.mark.parametrize(("dtype", "variant", "instruction"), IN_ORDER_OF_FMA)
@pytest.mark.parametrize("attention", [KINDS[0], KINDS[1], KINDS[4]], ids=str)
def test_a_sequence_has_the_same_bits_alone_and_by_every_variant(
    attention: BothWays,
    dtype: torch.dtype,
    variant: Variant,
    instruction: Instruction,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x, borders = inputs(attention, dtype), [0, *torch.tensor(LENGTHS).cumsum(0).tolist()]
    first = next((instruction, variant) for of_type, variant, instruction in IN_ORDER_OF_FMA if of_type == dtype)
    force(monkeypatch, *first)
    expected = attention.program(dtype)(x, batch_of(LENGTHS))
    force(monkeypatch, instruction, variant)
    program, threads = attention.program(dtype), torch.get_num_threads()
    try:
        for num_threads in (1, 3):
            torch.set_num_threads(num_threads)
            assert torch.equal(program(x, batch_of(LENGTHS)), expected)
        for begin, end in pairwise(borders):
            assert torch.equal(program(x[begin:end].contiguous(), batch_of([end - begin])), expected[begin:end])
    finally:
        torch.set_num_threads(threads)


def test_without_sequences_it_is_refused() -> None:
    attention = BothWays()
    with pytest.raises(ValueError, match="must know whose its tokens are"):
        attention.program(torch.float32)(inputs(attention, torch.float32))
    with pytest.raises(Unsupported, match="not a multiple of 32"):
        record(BothWays(head_dim=16), BothWays(head_dim=16).num_inputs, torch.float32)
