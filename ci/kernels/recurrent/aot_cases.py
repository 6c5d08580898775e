"""Layers with a state for each sequence, at the shapes of Qwen3-Next and of Nemotron-H 8B, and Kimi Linear's decays of
each channel."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch

from ci.kernels.meta_tensors import bf16, of, show
from inflight_kernels import Activation, Gate, StepSequences
from inflight_kernels.recurrent import gpu
from inflight_kernels.recurrent.chunk import chunk_shape
from inflight_kernels.recurrent.gpu.gated_delta_rule import CANDIDATES as DELTA_CANDIDATES
from inflight_kernels.recurrent.gpu.state_space_scan import CANDIDATES as SCAN_CANDIDATES


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


def _delta(
    *,
    num_keys: int = 16,
    by_channel: bool = False,
    with_kept: bool = False,
    config: Mapping[str, int] | None = None,
) -> None:
    tokens, num_heads, dim = 64, 32, 128
    num_decays = num_heads * (dim if by_channel else 1)
    gpu.gated_delta_rule(
        bf16(tokens, 2 * num_keys * dim + num_heads * dim),
        bf16(tokens, num_decays),
        bf16(tokens, num_heads),
        of(torch.float32, num_heads),
        of(torch.float32, num_decays),
        of(torch.float32, 65, num_heads, dim, dim),
        _sequences(64, tokens, with_kept),
        dim,
        bf16(65, *chunk_shape(of(torch.bfloat16, 0), num_heads, 2 * dim + num_decays // num_heads + 1)),
        config=config,
    )


def _scan(*, with_kept: bool = False, config: Mapping[str, int] | None = None) -> None:
    tokens, num_heads, head_dim, num_groups, state_dim = 64, 128, 64, 8, 128
    gpu.state_space_scan(
        bf16(tokens, num_heads * head_dim),
        bf16(tokens, num_groups * state_dim),
        bf16(tokens, num_groups * state_dim),
        bf16(tokens, num_heads),
        of(torch.float32, num_heads),
        of(torch.float32, num_heads),
        of(torch.float32, num_heads),
        of(torch.float32, 65, num_heads, head_dim, state_dim),
        _sequences(64, tokens, with_kept),
        chunk=bf16(65, *chunk_shape(of(torch.bfloat16, 0), num_heads, head_dim + state_dim + 1)),
        config=config,
    )


def _norm(
    group_size: int, *, width: int = 4096, gate: Gate = Gate.SILU, gate_first: bool = False, is_wide: bool = False
) -> None:
    weight = of(torch.float32 if is_wide else torch.bfloat16, width if gate_first else group_size)
    gpu.gated_rms_norm(bf16(64, width), bf16(64, width), weight, 1e-5, gate, group_size, gate_first)


CASES = {
    "conv c8192 decode": partial(_conv, 64),
    "conv c8192": partial(_conv, 8192),
    "conv c8192 kept": partial(_conv, 8192, with_kept=True),
    "conv c8192 float32 weight and bias": partial(_conv, 8192, with_bias=True, weight_dtype=torch.float32),
    "conv c8192 no activation": partial(_conv, 8192, activation=None),
    "gated norm g128": partial(_norm, 128),
    "gated norm g128 float32 weight sigmoid": partial(_norm, 128, gate=Gate.SIGMOID, is_wide=True),
    "gated norm g1024 gate first": partial(_norm, 1024, width=8192, gate_first=True),
    "gated norm g8192 gate first": partial(_norm, 8192, width=8192, gate_first=True),
    "state space h128": partial(_scan),
    "state space h128 kept": partial(_scan, with_kept=True),
    "delta rule h32 d128": partial(_delta),
    "delta rule h32 d128 kept": partial(_delta, with_kept=True),
    "delta rule h32 d128 by channel": partial(_delta, num_keys=32, by_channel=True),
}
for _config in SCAN_CANDIDATES:
    CASES[f"state space h128 {show(_config)}"] = partial(_scan, config=_config)
for _config in DELTA_CANDIDATES:
    CASES[f"delta rule h32 d128 {show(_config)}"] = partial(_delta, config=_config)
    CASES[f"delta rule h32 d128 by channel {show(_config)}"] = partial(
        _delta, num_keys=32, by_channel=True, config=_config
    )
