"""Quantisation of activations."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch

from ci.kernels.meta_tensors import bf16, show
from inflight_kernels.quantization import gpu
from inflight_kernels.quantization.gpu.quantize_per_token import CANDIDATES


def _quantize(
    width: int,
    dtype: torch.dtype,
    config: Mapping[str, int] | None = None,
    scale: float | None = None,
    group_size: int = 0,
) -> None:
    gpu.quantize_per_token(bf16(64, width), dtype, scale, group_size, config=config)


CASES = {
    "quantize+int8 k4096": partial(_quantize, 4096, torch.int8),
    "quantize+int8 k14336": partial(_quantize, 14336, torch.int8),
    "quantize+fp8 k4096": partial(_quantize, 4096, torch.float8_e4m3fn),
    "quantize+fp8 k53248": partial(_quantize, 53248, torch.float8_e4m3fn),
    "quantize+fp8 k4096 g128": partial(_quantize, 4096, torch.float8_e4m3fn, group_size=128),
    "quantize+fp8 k896 g128": partial(_quantize, 896, torch.float8_e4m3fn, group_size=128),
    "quantize+fp8 k4096 given scale": partial(_quantize, 4096, torch.float8_e4m3fn, scale=0.5),
    "quantize+fp8 k53248 given scale": partial(_quantize, 53248, torch.float8_e4m3fn, scale=0.5),
}
for _config in CANDIDATES:
    CASES[f"quantize+fp8 k14336 {show(_config)}"] = partial(_quantize, 14336, torch.float8_e4m3fn, _config)
NEEDS = {name: 89 for name in CASES if "fp8" in name}
