"""The first linear layer of a Llama MLP with its activation: one launch for a decode batch where the device's table has
a configuration; else cuBLAS multiplies, and a second launch activates.

    y = round(round(f(round(g))) * round(u)),    [g | u] = x W^T + bias          x (T, K), W (2 I, K)

`_linear_kernels` describes tiles and splits of K. A program multiplies a tile of the gate and the one of up that
belongs to it, and rounds where the two separate operations do: under the same configuration their bits are the same.
Bytes: size of the dtype * (2 I K + T K + T I), T I less than the linear layer alone moves. gate_up of Llama-8B in
bfloat16, 235 MB, takes 54.6 us at 4.3 TB/s for one token.

Deterministic mode as in `linear`.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch.nn.functional as F
from torch import Tensor

from inflight_kernels.activation.gpu import activate_and_mul
from inflight_kernels.activation.kinds import Activation
from inflight_kernels.common.checks import check_dtype, check_float
from inflight_kernels.matmul.gpu._linear_kernels import launch_linear
from inflight_kernels.matmul.gpu.linear import (
    CUBLAS,
    MAX_DECODE_TOKENS,
    check_operands,
    deterministic_config,
    tuned_config,
)

# What the tuning script tries. Two sums are in registers: with 128 rows of weights they spill (ptxas, triton 3.7).
MAX_BLOCK_N = 64
CANDIDATES: tuple[Mapping[str, int], ...] = tuple(
    dict(BLOCK_M=m, BLOCK_N=n, BLOCK_K=k, NUM_SPLITS=splits, GROUP_N=8, num_warps=4, num_stages=stages)
    for m, n, k, splits, stages in (
        (16, 32, 256, 1, 4),
        (16, 64, 128, 1, 5),
        (16, 64, 128, 2, 5),
        (32, 64, 128, 1, 4),
        (64, 64, 128, 1, 4),
        (64, 64, 64, 1, 6),
        (64, 64, 128, 2, 4),
    )
)


def fixed_config(out_features: int, in_features: int, element_size: int) -> dict[str, int]:
    """The configuration of a weight for every batch in deterministic mode. `out_features`: I."""
    config = deterministic_config(out_features, in_features, element_size)
    return config | {"BLOCK_N": min(config["BLOCK_N"], MAX_BLOCK_N)}


def gated_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    deterministic: bool = False,
    activation: Activation = Activation.SILU,
    config: Mapping[str, int] | None = None,
) -> Tensor:
    """Launch the linear layer with its activation; see `inflight_kernels.gated_linear`. `config` overrides every
    choice."""
    check_float("x", x)
    check_dtype("weight", weight, x.dtype)
    check_operands(x, weight, bias)
    if bias is not None:
        check_dtype("bias", bias, x.dtype)
    out_features, in_features = weight.shape
    if out_features % 2:
        raise ValueError(f"weight must have as many rows for the gate as for up, got {out_features}")
    if config is None and deterministic:
        config = fixed_config(out_features // 2, in_features, x.element_size())
    elif config is None and len(x) <= MAX_DECODE_TOKENS:
        config = tuned_config("gated_linear", x, out_features)
    if config is None or config == CUBLAS:
        return activate_and_mul(F.linear(x, weight, bias), activation)
    return launch_linear(x, weight, bias, x.dtype, config, deterministic, activation=activation)
