"""The tokens of a step, and block copies."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch

from ci.kernels.meta_tensors import bf16, of, show
from inflight_kernels.kv_cache import gpu
from inflight_kernels.kv_cache.gpu.copy_blocks import CANDIDATES


def _copy(index_dtype: torch.dtype, config: Mapping[str, int] | None = None) -> None:
    caches = [bf16(1024, 64, 8, 128)] * 32
    index = of(index_dtype, 64)
    gpu.copy_blocks(2 * caches, index, index, config=config)


def _advance(num_tokens: int, num_groups: int = 1) -> None:
    each, of_rows = of(torch.int64, num_tokens), of(torch.int64, 257)
    tables = of(torch.int32, 257, num_groups, 128)
    gpu.advance_rows(each, each, of_rows, of_rows, tables, 64, 256, each, each)


CASES = {
    "advance_rows t1": partial(_advance, 1),
    "advance_rows t1024": partial(_advance, 1024),
    "advance_rows t256 g6": partial(_advance, 256, 6),
    "copy_blocks 64x8x128 i32": partial(_copy, torch.int32),
    "copy_blocks 64x8x128 i64": partial(_copy, torch.int64),
    **{f"copy_blocks 64x8x128 {show(config)}": partial(_copy, torch.int32, config) for config in CANDIDATES},
}
