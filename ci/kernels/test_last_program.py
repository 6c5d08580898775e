"""Programs that share a piece of work: in any order the last of them finds what all have stored.

Run: pytest ci/kernels/test_last_program.py
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ci.kernels.interpreter import in_random_order
from inflight_kernels.common.last_program import NUM_COUNTERS, counters, is_last_program

PIECES, PROGRAMS = 3, 37


@triton.jit
def sum_kernel(values_ptr, parts_ptr, totals_ptr, counters_ptr, IN_ORDER: tl.constexpr, BLOCK: tl.constexpr):
    """Grid (pieces, programs): the sum of a piece's values, in their order or in that in which programs come."""
    piece, part = tl.program_id(0), tl.program_id(1)
    num_parts = tl.num_programs(1)
    value = tl.load(values_ptr + piece * num_parts + part)
    if IN_ORDER:
        tl.store(parts_ptr + piece * num_parts + part, value)
        if is_last_program(counters_ptr + piece, num_parts):
            offs = tl.arange(0, BLOCK)
            parts = tl.load(parts_ptr + piece * num_parts + offs, mask=offs < num_parts, other=0.0)
            tl.store(totals_ptr + piece, tl.sum(parts, axis=0))
    else:
        tl.atomic_add(totals_ptr + piece, value)


def sums(values: Tensor, in_order: bool) -> Tensor:
    parts, totals = torch.full_like(values, float("nan")), torch.zeros(PIECES, device=values.device)
    arrived = counters(PIECES, values.device)
    with in_random_order():
        sum_kernel[(PIECES, PROGRAMS)](values, parts, totals, arrived, IN_ORDER=in_order, BLOCK=64)
    assert len(arrived) == NUM_COUNTERS and not arrived.any()
    return totals


def test_the_last_program_finds_what_all_have_stored(device: torch.device) -> None:
    values = torch.randn(PIECES, PROGRAMS, device=device) * torch.logspace(-4, 4, PROGRAMS, device=device)
    first = sums(values, in_order=True)
    # Large values may cancel each other. What had not been stored yet would be no number.
    rounding = torch.finfo(values.dtype).eps * values.abs().sum(1).max().item()
    torch.testing.assert_close(first, values.double().sum(1).float(), rtol=0, atol=rounding)
    assert all(torch.equal(sums(values, in_order=True), first) for _ in range(5))
    # What is added as it comes has other bits in another order, so that the order was another one.
    assert not all(torch.equal(sums(values, in_order=False), sums(values, in_order=False)) for _ in range(5))
