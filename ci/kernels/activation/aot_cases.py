"""The gated activation, alone and quantised."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch

from ci.kernels.meta_tensors import bf16, show
from inflight_kernels.activation import gpu
from inflight_kernels.activation.gpu.silu_and_mul import CANDIDATES, QUANTIZED_CANDIDATES


def _activation(width: int, config: Mapping[str, int] | None = None) -> None:
    gpu.silu_and_mul(bf16(64, 2 * width), config=config)


def _quantized(
    width: int, dtype: torch.dtype, config: Mapping[str, int] | None = None, scale: float | None = None
) -> None:
    gpu.silu_and_mul_quantized(bf16(64, 2 * width), dtype, scale, config=config)


CASES = {
    "silu_and_mul i14336": partial(_activation, 14336),
    "silu_and_mul i1536": partial(_activation, 1536),
    "silu_and_mul+int8 i14336": partial(_quantized, 14336, torch.int8),
    "silu_and_mul+int8 i53248": partial(_quantized, 53248, torch.int8),
    "silu_and_mul+fp8 i14336": partial(_quantized, 14336, torch.float8_e4m3fn),
    "silu_and_mul+fp8 i1536": partial(_quantized, 1536, torch.float8_e4m3fn),
    "silu_and_mul+fp8 i14336 given scale": partial(_quantized, 14336, torch.float8_e4m3fn, scale=0.5),
    "silu_and_mul+fp8 i53248 given scale": partial(_quantized, 53248, torch.float8_e4m3fn, scale=0.5),
}
for _config in CANDIDATES:
    CASES[f"silu_and_mul i14336 {show(_config)}"] = partial(_activation, 14336, _config)
for _config in QUANTIZED_CANDIDATES:
    CASES[f"silu_and_mul+fp8 i14336 {show(_config)}"] = partial(_quantized, 14336, torch.float8_e4m3fn, _config)
NEEDS = {name: 89 for name in CASES if "fp8" in name}
