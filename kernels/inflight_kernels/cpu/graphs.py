"""What gets compiled: a decoder layer's operations as pure functions of tensors that torch.export can trace.

Legend: T tokens, B decoding rows, L block-table width, S block size, H query heads, K key/value heads, E head size,
D hidden size, I intermediate size, O output features. Formulas and rounding are the reference's (rms_norm,
rope_and_kv_write, decode_attention, silu_and_mul), which the tests compare with. No function here decides anything by a
tensor's value.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._inductor.inductor_prims import force_stride_order

ROWS_AT_ONCE = (4, 2, 1)
"""Rows that a matrix-vector loop walks side by side, the first that divides them: each is a stream of its own to
memory. 30 layers of 7 MB: 11.7 ms with 1, 10.1 with 2, 9.9 with 4 (2 cores of a Xeon with AVX-512, 2026-11-21)."""


@dataclass(frozen=True, kw_only=True)
class LayerShape:
    """What the compiled code has built in."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    sliding_window: int
    norm_eps: float
    qk_norm_eps: float


def stored(x: Tensor) -> Tensor:
    """`x`, written to memory once: inductor inlines a producer into its consumer's loop, and computes it there again
    for every element that the consumer makes of it."""
    kept: Tensor = force_stride_order(x, x.stride())
    return kept


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x32 = x.float()
    normed = x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + eps)
    return normed.to(x.dtype) * weight


def rotate(x_THE: Tensor, cos_sin_T2R: Tensor) -> Tensor:
    cos, sin = cos_sin_T2R.unsqueeze(1).chunk(2, dim=-1)
    half = cos.shape[-1]
    x1, x2 = x_THE[..., :half].float(), x_THE[..., half : 2 * half].float()
    rotated = torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1).to(x_THE.dtype)
    return torch.cat((rotated, x_THE[..., 2 * half :]), dim=-1) if 2 * half < x_THE.shape[-1] else rotated


def matrix_vector(x_1I: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    """x @ weight.T + bias of one row, (1, O), summed in float32 and rounded once."""
    x_I = stored(x_1I[0].float())
    num_outputs, num_inputs = weight_OI.shape
    streams = next(rows for rows in ROWS_AT_ONCE if num_outputs % rows == 0)
    parts = weight_OI.view(streams, num_outputs // streams, num_inputs)
    y_O = torch.cat([(parts[part].float() * x_I).sum(-1) for part in range(streams)])
    if bias_O is not None:
        y_O = y_O + bias_O.float()
    return y_O.to(x_1I.dtype)[None]


class _OfShape(torch.nn.Module):
    """A graph that has a layer's shape built in, and says so in its representation, by which it is kept on disk."""

    def __init__(self, shape: LayerShape) -> None:
        super().__init__()
        self.shape = shape

    def extra_repr(self) -> str:
        return repr(self.shape)


class AddNorm(_OfShape):
    """(norm(hidden + residual), hidden + residual)."""

    def forward(self, hidden_TD: Tensor, residual_TD: Tensor, weight_D: Tensor) -> tuple[Tensor, Tensor]:
        residual_TD = stored(hidden_TD + residual_TD)
        return rms_norm(residual_TD, weight_D, self.shape.norm_eps), residual_TD


class SiluAndMul(torch.nn.Module):
    """silu(gate) * up."""

    def forward(self, gate_up_TI: Tensor) -> Tensor:
        gate, up = gate_up_TI.chunk(2, dim=-1)
        return F.silu(gate.float()).to(gate_up_TI.dtype) * up


class RopeAndWrite(_OfShape):
    """Split heads, normalise them (Qwen3), rotate, write keys and values to their slots, give the queries."""

    def forward(
        self,
        qkv_TC: Tensor,
        cos_sin_PR: Tensor,
        positions_T: Tensor,
        keys: Tensor,
        values: Tensor,
        slot_mapping_T: Tensor,
        q_norm_E: Tensor | None,
        k_norm_E: Tensor | None,
    ) -> Tensor:
        shape = self.shape
        heads = qkv_TC.view(-1, shape.num_heads + 2 * shape.num_kv_heads, shape.head_dim)
        q, k, v = torch.split(heads, [shape.num_heads, shape.num_kv_heads, shape.num_kv_heads], dim=1)
        if q_norm_E is not None and k_norm_E is not None:
            q, k = rms_norm(q, q_norm_E, shape.qk_norm_eps), rms_norm(k, k_norm_E, shape.qk_norm_eps)
        cos_sin_T2R = cos_sin_PR[positions_T]
        block_size = keys.shape[1]
        blocks, offsets = slot_mapping_T // block_size, slot_mapping_T % block_size
        keys.index_put_((blocks, offsets), rotate(k, cos_sin_T2R))
        values.index_put_((blocks, offsets), v)
        return rotate(q, cos_sin_T2R)


class DecodeAttention(_OfShape):
    """One query token a row over its blocks of the cache, padded to the longest row of the batch."""

    def forward(
        self, q_BHE: Tensor, keys: Tensor, values: Tensor, block_table_BL: Tensor, seq_lens_B: Tensor
    ) -> Tensor:
        shape, (batch, width) = self.shape, block_table_BL.shape
        context = width * keys.shape[1]
        kv_shape = (batch, context, shape.num_kv_heads, shape.head_dim)
        k_BCKE = keys[block_table_BL].view(kv_shape).float()
        v_BCKE = values[block_table_BL].view(kv_shape).float()
        q_BKGE = q_BHE.float().view(batch, shape.num_kv_heads, -1, shape.head_dim)
        scores_BKGC = (q_BKGE.unsqueeze(3) * k_BCKE.permute(0, 2, 1, 3).unsqueeze(2)).sum(-1) * shape.scale
        places_C = torch.arange(context)
        visible_BC = places_C < seq_lens_B[:, None]
        if shape.sliding_window:
            visible_BC = visible_BC & (places_C >= seq_lens_B[:, None] - shape.sliding_window)
        scores_BKGC = scores_BKGC.masked_fill(~visible_BC[:, None, None, :], float("-inf"))
        weights_BKGC = stored(torch.softmax(scores_BKGC, dim=-1))
        attended_BKGE = (weights_BKGC.unsqueeze(-1) * v_BCKE.permute(0, 2, 1, 3).unsqueeze(2)).sum(3)
        return attended_BKGE.to(q_BHE.dtype).reshape(q_BHE.shape)


class TokenProduct(torch.nn.Module):
    """x @ weight.T of one row."""

    def forward(self, x_1I: Tensor, weight_OI: Tensor) -> Tensor:
        return matrix_vector(x_1I, weight_OI, None)


class TokenLayer(_OfShape):
    """A whole layer for a batch of one token: its products are matrix-vector loops, so nothing leaves the program."""

    def __init__(self, shape: LayerShape) -> None:
        super().__init__(shape)
        self.add_norm = AddNorm(shape)
        self.rope_and_write = RopeAndWrite(shape)
        self.attention = DecodeAttention(shape)
        self.silu_and_mul = SiluAndMul()

    def forward(
        self,
        hidden_1D: Tensor,
        residual_1D: Tensor,
        position_1: Tensor,
        slot_1: Tensor,
        block_table_1L: Tensor,
        seq_len_1: Tensor,
        keys: Tensor,
        values: Tensor,
        cos_sin_PR: Tensor,
        input_norm_D: Tensor,
        qkv_CD: Tensor,
        qkv_bias_C: Tensor | None,
        q_norm_E: Tensor | None,
        k_norm_E: Tensor | None,
        output_DC: Tensor,
        output_bias_D: Tensor | None,
        post_norm_D: Tensor,
        gate_up_ID: Tensor,
        gate_up_bias_I: Tensor | None,
        down_DI: Tensor,
        down_bias_D: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        normed_1D, residual_1D = self.add_norm(hidden_1D, residual_1D, input_norm_D)
        qkv_1C = matrix_vector(normed_1D, qkv_CD, qkv_bias_C)
        q_1HE = self.rope_and_write(qkv_1C, cos_sin_PR, position_1, keys, values, slot_1, q_norm_E, k_norm_E)
        attended_1HE = self.attention(stored(q_1HE), keys, values, block_table_1L, seq_len_1)
        added_1D = matrix_vector(attended_1HE.view(1, -1), output_DC, output_bias_D)
        normed_1D, residual_1D = self.add_norm(added_1D, residual_1D, post_norm_D)
        gate_up_1I = matrix_vector(normed_1D, gate_up_ID, gate_up_bias_I)
        return matrix_vector(self.silu_and_mul(gate_up_1I), down_DI, down_bias_D), residual_1D
