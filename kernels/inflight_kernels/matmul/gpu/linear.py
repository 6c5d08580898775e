"""The linear layer of a decode batch: y = x W^T + bias for at most 64 tokens, beside cuBLAS for more.

    y[m, n] = round(sum_k W[n, k] x[m, k] + bias[n])          x (T, K), W (N, K), summed in float32

How the tile and the splits of K lie is drawn in `_linear_kernels`. Bytes: size of the dtype * (N K + T K + T N), and
with S > 1 splits 8 S T N more, which stay in L2; operations: 2 T N K. Up to about 180 tokens the weights' bytes are the
floor. On an H200 at 4.3 TB/s, Llama-8B in bfloat16, T = 1 and T = 64:

    qkv        6144 x  4096    50 MB    11.7 us    12.0 us
    o          4096 x  4096    34 MB     7.8 us     8.0 us
    gate_up   28672 x  4096   235 MB    54.6 us    55.6 us
    down       4096 x 14336   117 MB    27.3 us    27.9 us

Deterministic mode takes one tile shape and one number of splits for a weight, whatever the batch and its size, and
never cuBLAS, whose choice of algorithm depends on the batch.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from inflight_kernels.common.checks import (
    cdiv,
    check_dtype,
    check_float,
    check_unit_stride,
    check_vector,
    multiprocessor_count,
    next_power_of_2,
)
from inflight_kernels.matmul.gpu._linear_kernels import launch_linear
from inflight_kernels.tuning import tuned

# Past this many tokens cuBLAS reads the weights just as rarely and multiplies faster. Not measured yet.
MAX_DECODE_TOKENS = 64
# Splits end where adding them costs more than it wins. Not measured yet.
MAX_SPLITS = 8

# What the tuning script tries. A split costs a second launch: narrow tiles of weights do without one, and wide ones
# read x from L2 less often.
CANDIDATES: tuple[Mapping[str, int], ...] = tuple(
    dict(BLOCK_M=m, BLOCK_N=n, BLOCK_K=k, NUM_SPLITS=splits, GROUP_N=8, num_warps=4, num_stages=stages)
    for m, n, k, splits, stages in (
        (16, 32, 256, 1, 4),
        (16, 64, 128, 1, 5),
        (16, 64, 128, 2, 5),
        (32, 64, 128, 1, 4),
        (32, 64, 128, 3, 4),
        (64, 64, 128, 2, 4),
        (64, 128, 64, 1, 5),
        (64, 128, 64, 4, 5),
    )
)


def wanted_splits(num_tiles: int, num_programs: int) -> int:
    """Splits that bring `num_tiles` tiles nearest to one program a multiprocessor, 1 to `MAX_SPLITS`."""
    return min(max(round(num_programs / max(num_tiles, 1)), 1), MAX_SPLITS)


def needs_small_tiles(in_features: int, element_size: int) -> bool:
    """Whether tiles pass through registers: float32, which the matrix unit does not multiply exactly, and rows of which
    triton does not know that they begin on 16 elements, which are not copied asynchronously."""
    return element_size == 4 or in_features % 16 != 0


def default_config(
    num_tokens: int, out_features: int, in_features: int, element_size: int, device: torch.device
) -> dict[str, int]:
    """The launch without a tuned table.

    One tile of tokens, so that every weight is read once. 64 rows of weights are the height of Hopper's matrix unit;
    from 33 tokens on 128 rows, because every tile reads all of x from L2. 256 bytes of a row are two lines of L2, and
    128 are one. The stages keep 40 KiB or more of weights on their way in every multiprocessor, where 4.3 TB/s at about
    0.8 us needs 26.
    Not measured yet.
    """
    block_m = min(max(next_power_of_2(num_tokens), 16), 64)
    block_n, block_k, stages = (64, 128, 4) if block_m < 64 else (128, 64, 4)
    if needs_small_tiles(in_features, element_size):
        block_n, block_k, stages = 32, 32, 3
    splits = wanted_splits(cdiv(out_features, block_n), multiprocessor_count(device))
    return {
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
        "BLOCK_K": block_k,
        "NUM_SPLITS": min(splits, max(in_features // (4 * block_k), 1)),
        "GROUP_N": 8,
        "num_warps": 4,
        "num_stages": stages,
    }


def deterministic_config(out_features: int, in_features: int, element_size: int) -> dict[str, int]:
    """The one launch of a weight for every batch: by the weight's shape alone, not even by the device.

    64 tokens a tile are little waste at one token, where the weights' bytes decide, and enough for a prompt to run from
    the matrix unit. Not measured yet.
    """
    block_m, block_n, block_k, stages = 64, 128, 64, 4
    if needs_small_tiles(in_features, element_size):
        block_m, block_n, block_k, stages = 16, 32, 32, 3
    return {
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
        "BLOCK_K": block_k,
        "NUM_SPLITS": min(wanted_splits(cdiv(out_features, block_n), 132), max(in_features // (4 * block_k), 1)),
        "GROUP_N": 8,
        "num_warps": 4,
        "num_stages": stages,
    }


def check_operands(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Raise ValueError unless `x` (T, K), `weight` (N, K) and `bias` (N,) go together in shape and layout."""
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1] or x.shape[1] == 0:
        raise ValueError(
            "x must be (num_tokens, in_features) and weight (out_features, in_features), got "
            f"{tuple(x.shape)} and {tuple(weight.shape)}"
        )
    check_unit_stride("x", x)
    check_unit_stride("weight", weight)
    if bias is not None:
        check_float("bias", bias)
        check_vector("bias", bias, weight.shape[0], bias.dtype)


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    deterministic: bool = False,
    config: Mapping[str, int] | None = None,
) -> Tensor:
    """Launch the linear layer; see `inflight_kernels.linear`. `config` overrides every choice, cuBLAS too."""
    check_float("x", x)
    check_dtype("weight", weight, x.dtype)
    check_operands(x, weight, bias)
    if bias is not None:
        check_dtype("bias", bias, x.dtype)
    num_tokens, in_features = x.shape
    out_features = weight.shape[0]
    if config is None and deterministic:
        config = deterministic_config(out_features, in_features, x.element_size())
    elif config is None and num_tokens > MAX_DECODE_TOKENS:
        return F.linear(x, weight, bias)
    elif config is None:
        default = default_config(num_tokens, out_features, in_features, x.element_size(), x.device)
        shape = {"m": str(default["BLOCK_M"]), "n": out_features, "k": in_features, "dtype": str(x.dtype)}
        config = tuned("linear", shape, default, x.device)
    return launch_linear(x, weight, bias, x.dtype, config, deterministic)
