"""Shrink and expand of many adapters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch

from ci.kernels.meta_tensors import of, show
from inflight_kernels.lora import gpu
from inflight_kernels.lora.gpu.lora_add import CANDIDATES

QKV = (4096, 1024, 1024)


def _lora(
    tokens: int,
    in_features: int,
    widths: Sequence[int],
    rank: int,
    dtype: torch.dtype = torch.bfloat16,
    config: Mapping[str, int] | None = None,
) -> None:
    out_features = sum(widths)
    gpu.lora_add(
        of(dtype, tokens, out_features),
        of(dtype, tokens, in_features),
        of(dtype, 32, len(widths) * rank, in_features),
        of(dtype, 32, out_features, rank),
        of(torch.int32, tokens),
        of(torch.float32, 32),
        widths,
        config=config,
    )


CASES = {
    "lora_add t1 r16": partial(_lora, 1, 4096, (4096,), 16),
    "lora_add t64 r16 fp16": partial(_lora, 64, 4096, (4096,), 16, torch.float16),
    "lora_add t64 r16 fp32": partial(_lora, 64, 4096, (4096,), 16, torch.float32),
    "lora_add t64 r64 fp32": partial(_lora, 64, 4096, (4096,), 64, torch.float32),
    "lora_add t64 r8 gate up": partial(_lora, 64, 4096, (14336, 14336), 8),
    "lora_add t64 r16 down": partial(_lora, 64, 14336, (4096,), 16),
    "lora_add t2048 r16": partial(_lora, 2048, 4096, (4096,), 16),
}
CASES |= {
    f"lora_add t64 r{rank} qkv {show(config)}": partial(_lora, 64, 4096, QKV, rank, torch.bfloat16, config)
    for config in CANDIDATES
    for rank in (16, 64, 128)
}
# The widest tile of few rows spills 8 bytes before Hopper (triton 3.7).
NEEDS = {name: 90 for name in CASES if show(CANDIDATES[1]) in name}
