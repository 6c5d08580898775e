"""RMSNorm and LayerNorm, alone, with the residual, and the former quantised."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch

from ci.kernels.meta_tensors import bf16, of, show
from inflight_kernels import PartSquares
from inflight_kernels.norm import gpu
from inflight_kernels.norm.gpu.rms_norm import CANDIDATES


def _norm(
    hidden_size: int,
    with_residual: bool,
    config: Mapping[str, int] | None = None,
    weight_dtype: torch.dtype = torch.bfloat16,
) -> None:
    x = bf16(64, hidden_size)
    gpu.rms_norm(x, of(weight_dtype, hidden_size), 1e-5, x if with_residual else None, config=config)


def _layer_norm(hidden_size: int, with_residual: bool, with_bias: bool) -> None:
    x, weight = bf16(64, hidden_size), bf16(hidden_size)
    gpu.layer_norm(x, weight, weight if with_bias else None, 1e-5, x if with_residual else None)


def _embedding(hidden_size: int) -> None:
    gpu.embedding_rms_norm(of(torch.int64, 64), bf16(128256, hidden_size), bf16(hidden_size), 1e-5)


def _quantized(
    hidden_size: int,
    dtype: torch.dtype,
    config: Mapping[str, int] | None = None,
    scale: float | None = None,
    group_size: int = 0,
    weight_dtype: torch.dtype = torch.bfloat16,
) -> None:
    x, weight = bf16(64, hidden_size), of(weight_dtype, hidden_size)
    gpu.rms_norm_quantized(x, weight, 1e-5, x, dtype, scale, group_size, config=config)


def _squares(num_columns: int, with_gate: bool) -> None:
    x = bf16(64, num_columns)
    gpu.row_squares([x], x if with_gate else None)


def _norm_of_part(
    num_columns: int, num_parts: int, gate_first: bool | None = None, weight_dtype: torch.dtype = torch.bfloat16
) -> None:
    x, sums = bf16(64, num_columns), of(torch.float32, 64, 2 * num_parts)
    squares, gate = PartSquares(sums, range(0, 2 * num_parts, 2), num_parts * num_columns), gate_first is not None
    gpu.rms_norm_of_part(x, of(weight_dtype, num_columns), 1e-5, squares, x if gate else None, bool(gate_first))


def _quantized_embedding(hidden_size: int, dtype: torch.dtype, scale: float | None = None, group_size: int = 0) -> None:
    token_ids, table = of(torch.int64, 64), bf16(128256, hidden_size)
    gpu.embedding_rms_norm_quantized(token_ids, table, bf16(hidden_size), 1e-5, dtype, scale, group_size)


CASES = {
    "norm h4096": partial(_norm, 4096, False),
    "embedding+norm h4096": partial(_embedding, 4096),
    "add+norm h4096": partial(_norm, 4096, True),
    "add+norm h576": partial(_norm, 576, True),
    "add+norm h4096 float32 weight": partial(_norm, 4096, True, weight_dtype=torch.float32),
    "layer norm h4096": partial(_layer_norm, 4096, False, True),
    "add+layer norm h4096": partial(_layer_norm, 4096, True, True),
    "add+layer norm h8192 no bias": partial(_layer_norm, 8192, True, False),
    "squares c2560": partial(_squares, 2560, False),
    "gated squares c2048": partial(_squares, 2048, True),
    "norm of part c2560 float32 weight": partial(_norm_of_part, 2560, 2, weight_dtype=torch.float32),
    "norm of part c1024": partial(_norm_of_part, 1024, 8),
    "gate+norm of part c2048": partial(_norm_of_part, 2048, 4, True),
    "norm of part+gate c2048": partial(_norm_of_part, 2048, 4, False),
    "add+norm h16384": partial(_norm, 16384, True),
    "add+norm+int8 h4096": partial(_quantized, 4096, torch.int8),
    "add+norm+int8 h16384": partial(_quantized, 16384, torch.int8),
    "add+norm+fp8 h4096": partial(_quantized, 4096, torch.float8_e4m3fn),
    "embedding+norm+fp8 h4096": partial(_quantized_embedding, 4096, torch.float8_e4m3fn),
    "add+norm+fp8 h4096 g128": partial(_quantized, 4096, torch.float8_e4m3fn, group_size=128),
    "add+norm+fp8 h16384 g128": partial(_quantized, 16384, torch.float8_e4m3fn, group_size=128),
    "embedding+norm+fp8 h4096 g128": partial(_quantized_embedding, 4096, torch.float8_e4m3fn, group_size=128),
    "add+norm+fp8 h4096 float32 weight": partial(_quantized, 4096, torch.float8_e4m3fn, weight_dtype=torch.float32),
    "add+norm+fp8 h4096 given scale": partial(_quantized, 4096, torch.float8_e4m3fn, scale=0.5),
    "embedding+norm+fp8 h4096 given scale": partial(_quantized_embedding, 4096, torch.float8_e4m3fn, scale=0.5),
}
for _config in CANDIDATES:
    CASES[f"add+norm h4096 {show(_config)}"] = partial(_norm, 4096, True, _config)
    CASES[f"add+norm+fp8 h4096 {show(_config)}"] = partial(_quantized, 4096, torch.float8_e4m3fn, _config)
NEEDS = {name: 89 for name in CASES if "fp8" in name}
