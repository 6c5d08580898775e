"""Blocks of a paged KV cache: where a step's tokens go, and copies of whole blocks."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from inflight_kernels.dispatch import implementation
from inflight_kernels.kv_cache.step_tokens import StepTokens


def advance_rows(
    rows: Tensor,
    counts: Tensor,
    lengths: Tensor,
    last_tokens: Tensor,
    block_tables: Tensor,
    block_size: int,
    padding_row: int | None = None,
    offsets: Tensor | None = None,
    token_ids: Tensor | None = None,
    places: Tensor | None = None,
) -> StepTokens:
    """The tokens of a step whose batch has `counts` (B,) tokens of `rows` (B,). Adds the counts to the rows' lengths.

    The state of the R rows is `lengths` (R,), tokens in the cache, `last_tokens` (R,) and `block_tables` (R, G,
    max_blocks) int32, one for each group of layers; all else is int64. `places` (T,) is the place in the batch of each
    token; None = one token at each place. A token's position is its row's length plus its entry of `offsets` (T,), None
    = 0. Its id is its entry of `token_ids` (T,); where that is below 0, or without them, its row's last token. A row
    may stand in several places with one token each; its length is then one of their ends. Tokens of the row
    `padding_row` have no slot.
    """
    result: StepTokens = implementation(rows, __name__).advance_rows(
        rows, counts, lengths, last_tokens, block_tables, block_size, padding_row, offsets, token_ids, places
    )
    return result


def copy_blocks(caches: Sequence[Tensor], source: Tensor, target: Tensor) -> None:
    """Copy block `source[i]` to block `target[i]` in every cache, for all i.

    For copy-on-write, and for beams that continue one parent: each refers to the parent's full blocks and needs a copy
    of the last one only. `caches` are the keys, the values and whatever else layers store, (num_blocks, ...) each. All
    have the same number of blocks, and may differ in everything else. Each block is contiguous and a multiple of 16
    bytes. A GPU needs one launch for all caches whose blocks are equally long and equally far apart: mostly one in
    total. `source` and `target` (N,),
    int32 or int64, are on the caches' device; a pair with a negative number is skipped, so that a CUDA graph can be
    replayed for fewer pairs than it was captured with. The first call with a cache uploads its addresses: make one
    before a capture.

    The copies run in no particular order. So no block may be the target of two pairs, or the target of one and the
    source of another (a swap needs a spare block); a pair of a block with itself does nothing. On a CPU this is checked
    (ValueError); on a GPU the caller must ensure it, because a check would wait for the device.
    """
    if source.device.type == "cpu":
        check_pairs(source, target)
    implementation(source, __name__).copy_blocks(caches, source, target)


def check_pairs(source: Tensor, target: Tensor) -> None:
    """Raise ValueError unless the result does not depend on the order of the copies. For tensors on the CPU."""
    pairs = [(a, b) for a, b in zip(source.tolist(), target.tolist(), strict=True) if a >= 0 and b >= 0 and a != b]
    targets = {b for _, b in pairs}
    if len(targets) < len(pairs):
        raise ValueError(f"a block is the target of two copies: targets are {sorted(b for _, b in pairs)}")
    both = targets & {a for a, _ in pairs}
    if both:
        raise ValueError(f"blocks {sorted(both)} are both copied from and copied to")
