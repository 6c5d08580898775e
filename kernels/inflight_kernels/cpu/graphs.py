"""What gets compiled: a decoder layer's operations as pure functions of tensors that torch.export can trace.

Legend: T tokens, B decoding rows, L block-table width, S block size, H query heads, K key/value heads, E head size,
D hidden size, I intermediate size. Formulas and rounding are the reference's (rms_norm, rope_and_kv_write,
decode_attention, silu_and_mul), which the tests compare with. No function here decides anything by a tensor's value.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._inductor.inductor_prims import force_stride_order


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


class AddNorm(torch.nn.Module):
    """(norm(hidden + residual), hidden + residual)."""

    def __init__(self, shape: LayerShape) -> None:
        super().__init__()
        self.shape = shape

    def extra_repr(self) -> str:
        return repr(self.shape)

    def forward(self, hidden_TD: Tensor, residual_TD: Tensor, weight_D: Tensor) -> tuple[Tensor, Tensor]:
        residual_TD = stored(hidden_TD + residual_TD)
        return rms_norm(residual_TD, weight_D, self.shape.norm_eps), residual_TD


class SiluAndMul(torch.nn.Module):
    """silu(gate) * up."""

    def forward(self, gate_up_TI: Tensor) -> Tensor:
        gate, up = gate_up_TI.chunk(2, dim=-1)
        return F.silu(gate.float()).to(gate_up_TI.dtype) * up


class RopeAndWrite(AddNorm):
    """Split heads, normalise them (Qwen3), rotate, write keys and values to their slots, give the queries."""

    def forward(  # type: ignore[override]
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


class DecodeAttention(AddNorm):
    """One query token a row over its blocks of the cache, padded to the longest row of the batch."""

    def forward(  # type: ignore[override]
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
