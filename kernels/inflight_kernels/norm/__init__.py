"""RMSNorm, alone and with the residual addition or the embedding before it, and with its result quantised; LayerNorm,
alone and with the residual addition; RMSNorm of columns that several ranks have."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from inflight_kernels.dispatch import implementation
from inflight_kernels.norm.part_squares import PartSquares


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
    """RMSNorm over the last dimension of `x` (..., H), float, with `weight` (H,) of the same dtype or float32.

    Without `residual` returns the normalised tensor. With it, normalises s = x + residual, rounded to the dtype, and
    returns (norm(s), s). Rounds as Hugging Face Llama does: the normalised value is rounded before it is multiplied by
    the weight. With a float32 weight beside another dtype only the product is rounded (Gemma, OLMo 2, gpt-oss). On a
    GPU a row's result is bitwise independent of the other rows.
    """
    result: Tensor | tuple[Tensor, Tensor] = implementation(x, __name__).rms_norm(x, weight, eps, residual)
    return result


def row_squares(sections: Sequence[Tensor], gate: Tensor | None = None) -> Tensor:
    """The sum of the squares of each row's columns in each of `sections` (T, any number), float; with `gate`, of their
    shape and dtype, as they are times silu(gate). Returns float32 (T, number of sections). On a GPU a row's sums are
    bitwise independent of the other rows."""
    result: Tensor = implementation(sections[0], __name__).row_squares(sections, gate)
    return result


def rms_norm_of_part(
    x: Tensor,
    weight: Tensor,
    eps: float,
    squares: PartSquares,
    gate: Tensor | None = None,
    gate_first: bool = False,
) -> Tensor:
    """RMSNorm of some of a row's columns, `x` (T, C), float, by the squares of all of them. `weight` (C,) of the same
    dtype or float32.

    Rounds as `rms_norm` of all columns does; with `gate` (T, C), as `gated_rms_norm`, which explains `gate_first`, does
    with silu. On a GPU a row's result is bitwise independent of the other rows.
    """
    result: Tensor = implementation(x, __name__).rms_norm_of_part(x, weight, eps, squares, gate, gate_first)
    return result


def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, residual: Tensor | None = None
) -> Tensor | tuple[Tensor, Tensor]:
    """LayerNorm over the last dimension of `x` (..., H), float, with `weight` and `bias` (H,) of the same dtype.

    `residual` and what is returned as in `rms_norm`. Mean and variance (of what is left when the mean is subtracted)
    are float32, and the result is rounded once, as torch.nn.functional.layer_norm does. On a GPU a row's result is
    bitwise independent of the other rows.
    """
    result: Tensor | tuple[Tensor, Tensor]
    result = implementation(x, __name__).layer_norm(x, weight, bias, eps, residual)
    return result


def embedding_rms_norm(token_ids: Tensor, table: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(norm(s), s) of the rows s of `table` (V, H) that `token_ids` (T,), int64, name; both (T, H). Rounds and is
    independent of other rows as `rms_norm` of them."""
    result: tuple[Tensor, Tensor] = implementation(token_ids, __name__).embedding_rms_norm(
        token_ids, table, weight, eps
    )
    return result


def rms_norm_quantized(
    x: Tensor,
    weight: Tensor,
    eps: float,
    residual: Tensor | None = None,
    dtype: torch.dtype = torch.float8_e4m3fn,
    scale: float | None = None,
    group_size: int = 0,
) -> tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]:
    """The same, with the result quantised in the same launch as by `quantize_per_token`, which explains `scale` and
    `group_size`.

    Returns (q, scales), or (q, scales, s) with `residual`: q (..., H) of `dtype`, scales (...) or (..., G), float32, s
    as above.
    """
    result: tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]
    result = implementation(x, __name__).rms_norm_quantized(x, weight, eps, residual, dtype, scale, group_size)
    return result


def embedding_rms_norm_quantized(
    token_ids: Tensor,
    table: Tensor,
    weight: Tensor,
    eps: float,
    dtype: torch.dtype = torch.float8_e4m3fn,
    scale: float | None = None,
    group_size: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """`embedding_rms_norm`, with the norm quantised in the same launch as by `quantize_per_token`, which explains
    `scale` and `group_size`: returns (q, scales, s), q (T, H) of `dtype`, scales (T,) or (T, G) float32."""
    result: tuple[Tensor, Tensor, Tensor] = implementation(token_ids, __name__).embedding_rms_norm_quantized(
        token_ids, table, weight, eps, dtype, scale, group_size
    )
    return result
