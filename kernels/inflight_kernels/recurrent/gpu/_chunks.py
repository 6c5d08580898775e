"""What the chunks of layers with a state have in common, inside a kernel.

A sequence's state is that at the border where its incomplete chunk begins; beside it lie the inputs of that chunk's
tokens. A step computes the whole chunk again from them, with its own tokens behind: each token's row has the same place
in the same products, whose other rows count for nothing in it. So no bit depends on where steps begin and end.

Legend: C tokens of a chunk. Rows of tokens that the step does not have yet are zeros.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Three products of tf32 for one of float32: a relative error of about 2^-21 instead of 2^-11.
PRECISION: tl.constexpr = tl.constexpr("tf32x3")
# The least rows and columns of a product.
MIN_BLOCK = 16
# Numbers of a state that are copied at once: four loads of 16 bytes of each of 128 threads.
COPIED: tl.constexpr = tl.constexpr(2048)


@triton.jit
def product(a, b):
    return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def chunk_rows(new_ptr, stride, kept_ptr, width, first, start, end, mask, CHUNK: tl.constexpr):
    """(C, columns) of the chunk whose first token is the step's token `first`, which may be before the step's tokens
    `start` to `end` of the sequence: those are in `kept_ptr`. Both pointers are to the columns of the first row."""
    offs = tl.arange(0, CHUNK)
    token = first + offs
    is_new = (token >= start)[:, None] & (token < end)[:, None]
    new = tl.load(new_ptr + token.to(tl.int64)[:, None] * stride, mask=is_new & mask[None, :], other=0.0)
    kept = tl.load(kept_ptr + offs[:, None] * width, mask=(token < start)[:, None] & mask[None, :], other=0.0)
    return tl.where(is_new, new, kept)


@triton.jit
def chunk_numbers(new_ptr, stride, kept_ptr, width, first, start, end, CHUNK: tl.constexpr):
    """(C) likewise, of one column."""
    offs = tl.arange(0, CHUNK)
    token = first + offs
    is_new = (token >= start) & (token < end)
    new = tl.load(new_ptr + token.to(tl.int64) * stride, mask=is_new, other=0.0)
    kept = tl.load(kept_ptr + offs * width, mask=token < start, other=0.0)
    return tl.where(is_new, new, kept)


@triton.jit
def keep_rows(
    new_ptr,
    stride,
    kept_ptr,
    to_ptr,
    width,
    first,
    start,
    end,
    is_kept,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Write SIZE columns of the tokens that `is_kept` (C) names to where `chunk_rows` reads them. They are read again:
    to hold them meanwhile would take registers."""
    offs, columns = tl.arange(0, CHUNK)[:, None], tl.arange(0, BLOCK)
    mask = columns < SIZE
    columns = columns[None, :]
    rows = chunk_rows(new_ptr + columns, stride, kept_ptr + columns, width, first, start, end, mask, CHUNK)
    tl.store(to_ptr + offs * width + columns, rows, mask=is_kept[:, None] & mask[None, :])


@triton.jit
def copy_state(from_ptr, to_ptr, is_used, SIZE: tl.constexpr):
    """A head's state; zeros unless `is_used`."""
    for start in range(0, SIZE, COPIED):
        offs = start + tl.arange(0, COPIED)
        mask = offs < SIZE
        tl.store(to_ptr + offs, tl.load(from_ptr + offs, mask=mask & is_used, other=0.0), mask=mask)


@triton.jit
def decays_between(log_decay):
    """(C) logarithms of each token's decay -> (C, C): what is left at a row's token of what a column's token brought.
    Of columns behind the row it is 1. Sums are of the decays between, not differences, which would be inexact, or no
    numbers, behind a large one."""
    offs = tl.arange(0, log_decay.shape[0])
    return tl.exp(tl.cumsum(tl.where(offs[:, None] > offs[None, :], log_decay[:, None], 0.0), axis=0))


@triton.jit
def decays_to_end(log_decay):
    """(C) likewise -> (C): what is left at the chunk's end of what each token brought."""
    offs = tl.arange(0, log_decay.shape[0])
    return tl.exp(tl.sum(tl.where(offs[:, None] > offs[None, :], log_decay[:, None], 0.0), axis=0))
