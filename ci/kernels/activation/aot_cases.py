"""The gated activation, alone and quantised, the one without a gate, a gate and a cap."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch

from ci.kernels.meta_tensors import bf16, show
from inflight_kernels import Activation
from inflight_kernels.activation import gpu
from inflight_kernels.activation.gpu.activate_and_mul import CANDIDATES, QUANTIZED_CANDIDATES


def _activation(width: int, config: Mapping[str, int] | None = None, activation: Activation = Activation.SILU) -> None:
    gpu.activate_and_mul(bf16(64, 2 * width), activation, config=config)


def _quantized(
    width: int,
    dtype: torch.dtype,
    config: Mapping[str, int] | None = None,
    scale: float | None = None,
    group_size: int = 0,
    activation: Activation = Activation.SILU,
) -> None:
    gpu.activate_and_mul_quantized(bf16(64, 2 * width), dtype, scale, group_size, activation, config=config)


def _without_gate(activation: Activation) -> None:
    gpu.activate(bf16(64, 16384), activation)


def _sigmoid_mul(tokens: int, width: int, gates: int) -> None:
    gpu.sigmoid_mul(bf16(tokens, width), bf16(tokens, gates))


def _soft_cap(tokens: int, width: int) -> None:
    gpu.soft_cap(bf16(tokens, width), 30.0)


CASES = {
    "soft_cap i256000": partial(_soft_cap, 64, 256000),
    "sigmoid_mul i2048": partial(_sigmoid_mul, 64, 2048, 1),
    "sigmoid_mul i4096 gates": partial(_sigmoid_mul, 64, 4096, 4096),
    "silu_and_mul i14336": partial(_activation, 14336),
    "silu_and_mul i1536": partial(_activation, 1536),
    "silu_and_mul+int8 i14336": partial(_quantized, 14336, torch.int8),
    "silu_and_mul+int8 i53248": partial(_quantized, 53248, torch.int8),
    "silu_and_mul+fp8 i14336": partial(_quantized, 14336, torch.float8_e4m3fn),
    "silu_and_mul+fp8 i1536": partial(_quantized, 1536, torch.float8_e4m3fn),
    "silu_and_mul+fp8 i14336 g128": partial(_quantized, 14336, torch.float8_e4m3fn, group_size=128),
    "silu_and_mul+fp8 i14336 given scale": partial(_quantized, 14336, torch.float8_e4m3fn, scale=0.5),
    "silu_and_mul+fp8 i53248 given scale": partial(_quantized, 53248, torch.float8_e4m3fn, scale=0.5),
}
for _each in Activation:
    if _each is not Activation.SILU:
        CASES[f"{_each.value}_and_mul i14336"] = partial(_activation, 14336, activation=_each)
    if _each is not Activation.CLAMPED_SWIGLU:
        CASES[f"{_each.value} i16384"] = partial(_without_gate, _each)
CASES["gelu_tanh_and_mul+fp8 i14336"] = partial(_quantized, 14336, torch.float8_e4m3fn, activation=Activation.GELU_TANH)
for _config in CANDIDATES:
    CASES[f"silu_and_mul i14336 {show(_config)}"] = partial(_activation, 14336, _config)
for _config in QUANTIZED_CANDIDATES:
    CASES[f"silu_and_mul+fp8 i14336 {show(_config)}"] = partial(_quantized, 14336, torch.float8_e4m3fn, _config)
NEEDS = {name: 89 for name in CASES if "fp8" in name}
