"""Layers with a state for each sequence, at the shapes of Qwen3-Next."""

from __future__ import annotations

from functools import partial

import torch

from ci.kernels.meta_tensors import bf16, of
from inflight_kernels import Activation, StepSequences
from inflight_kernels.recurrent import gpu


def _sequences(count: int, tokens: int, with_kept: bool) -> StepSequences:
    return StepSequences(
        slots_B=of(torch.int64, count),
        starts=of(torch.int32, count + 1),
        positions_T=of(torch.int64, tokens),
        kept_T=of(torch.int32, tokens) if with_kept else None,
    )


def _conv(
    tokens: int,
    *,
    with_bias: bool = False,
    with_kept: bool = False,
    activation: Activation | None = Activation.SILU,
    weight_dtype: torch.dtype = torch.bfloat16,
) -> None:
    sequences, bias = _sequences(64, tokens, with_kept), of(weight_dtype, 8192) if with_bias else None
    gpu.causal_conv(bf16(tokens, 8192), of(weight_dtype, 8192, 4), bias, bf16(65, 3, 8192), sequences, activation)


CASES = {
    "conv c8192 decode": partial(_conv, 64),
    "conv c8192": partial(_conv, 8192),
    "conv c8192 kept": partial(_conv, 8192, with_kept=True),
    "conv c8192 float32 weight and bias": partial(_conv, 8192, with_bias=True, weight_dtype=torch.float32),
    "conv c8192 no activation": partial(_conv, 8192, activation=None),
}
