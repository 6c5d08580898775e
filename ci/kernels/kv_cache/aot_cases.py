"""Block copies."""

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
    gpu.copy_blocks(caches, caches, index, index, config=config)


CASES = {
    "copy_blocks 64x8x128 i32": partial(_copy, torch.int32),
    "copy_blocks 64x8x128 i64": partial(_copy, torch.int64),
    **{f"copy_blocks 64x8x128 {show(config)}": partial(_copy, torch.int32, config) for config in CANDIDATES},
}
