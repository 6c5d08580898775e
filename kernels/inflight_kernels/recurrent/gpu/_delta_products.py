"""What the gated delta rule multiplies among the tokens of a chunk, inside a kernel; see gated_delta_rule.py.

Legend: C tokens of a chunk, Dk rows of a head's state. D[i, j] is the product of the decays behind token j up to token
i.
"""

from __future__ import annotations

import triton
import triton.language as tl

from inflight_kernels.recurrent.chunk import CHUNK
from inflight_kernels.recurrent.gpu._chunks import product

# The inverse of a chunk's matrix is put together from those of its parts in so many steps, the first of them for pairs.
LEVELS: tl.constexpr = tl.constexpr(CHUNK.bit_length() - 1)


@triton.jit
def inverse_of_unit(lower, CHUNK: tl.constexpr):
    """(I + `lower`)^-1, of a matrix with zeros on and above its diagonal, by halves: of a block whose two halves are
    inverted already, what is below them is - D B A, with the lower and the upper half's inverses D and A and what of
    `lower` is between them, B."""
    row, column = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    inverse = tl.where(row == column, 1.0, 0.0) - tl.where(row // 2 == column // 2, lower, 0.0)
    for level in tl.static_range(1, LEVELS):
        half = 1 << level
        is_between = (row // (2 * half) == column // (2 * half)) & (row // half != column // half)
        inverse -= product(inverse, product(tl.where(is_between, lower, 0.0), inverse))
    return inverse


@triton.jit
def one_over_norm(heads):
    """(C, Dk) -> (C)."""
    wide = heads.to(tl.float32)
    return 1.0 / tl.sqrt(tl.sum(wide * wide, axis=1) + 1e-6)


@triton.jit
def products_by_channel(query, key, log_decay):
    """(C, rows) each -> sums over the rows of D[i, j] k[i] k[j] and of D[i, j] q[i] k[j], (C, C). Above the diagonals
    there is anything."""
    offs = tl.arange(0, key.shape[0])
    is_behind = offs[:, None, None] > offs[None, :, None]
    decayed = key[None, :, :] * tl.exp(tl.cumsum(tl.where(is_behind, log_decay[:, None, :], 0.0), axis=0))
    return tl.sum(key[:, None, :] * decayed, axis=2), tl.sum(query[:, None, :] * decayed, axis=2)


@triton.jit
def decays_of_channels_to_end(log_decay):
    """(C, rows) -> what is left at the chunk's end of what each token brought, likewise."""
    offs = tl.arange(0, log_decay.shape[0])
    is_behind = offs[:, None, None] > offs[None, :, None]
    return tl.exp(tl.sum(tl.where(is_behind, log_decay[:, None, :], 0.0), axis=0))
