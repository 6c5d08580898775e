"""Per-head norm, rotary embedding and KV-cache write in torch. Knows no sequences: every token has its own slot."""

from __future__ import annotations

import torch
from torch import Tensor

from inflight_kernels.norm.reference import rms_norm
from inflight_kernels.quantization.reference import quantize_per_token


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, adjacent_pairs: bool) -> Tensor:
    """Rotation of x (T, heads, D) by cos and sin (T, 1, R) in float32; the rest of a head is not changed."""
    half = cos.shape[-1]
    first, second = slice(0, half), slice(half, 2 * half)
    if adjacent_pairs:
        first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    x1, x2 = x[..., first].float(), x[..., second].float()
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    y[..., first] = torch.addcmul(x1 * cos, x2, sin, value=-1)
    y[..., second] = torch.addcmul(x2 * cos, x1, sin)
    if 2 * half < x.shape[-1]:
        y[..., 2 * half :] = x[..., 2 * half :]
    return y


def rope_and_kv_write(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    q_norm_weight: Tensor | None = None,
    k_norm_weight: Tensor | None = None,
    norm_eps: float = 1e-6,
    k_scale: float | Tensor = 1.0,
    v_scale: float | Tensor = 1.0,
    adjacent_pairs: bool = False,
) -> Tensor:
    """Rotate q and k, write k and v to their slots, return the rotated q."""
    k = rope(k, cos_sin, positions, k_norm_weight, norm_eps, adjacent_pairs)
    _write(slot_mapping, (k_cache, k, k_scale), (v_cache, v, v_scale))
    return rope(q, cos_sin, positions, q_norm_weight, norm_eps, adjacent_pairs)


def rope(
    q: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    norm_weight: Tensor | None = None,
    norm_eps: float = 1e-6,
    adjacent_pairs: bool = False,
) -> Tensor:
    """Normalise and rotate heads (T, heads, D)."""
    if norm_weight is not None:
        normed = rms_norm(q, norm_weight, norm_eps)
        assert isinstance(normed, Tensor)
        q = normed
    cos, sin = cos_sin[positions].unsqueeze(1).chunk(2, dim=-1)
    return _rotate(q, cos, sin, adjacent_pairs)


def rope_and_latent_write(
    q: Tensor,
    latent: Tensor,
    norm_weight: Tensor,
    norm_eps: float,
    cos_sin: Tensor,
    positions: Tensor,
    cache: Tensor,
    slot_mapping: Tensor,
    out: Tensor | None = None,
    scale: float | Tensor = 1.0,
    adjacent_pairs: bool = False,
) -> Tensor:
    """Normalise the latent, rotate q and the key behind the latent, write both to their slots, return the rotated q."""
    size = len(norm_weight)
    cos, sin = cos_sin[positions].unsqueeze(1).chunk(2, dim=-1)
    normed = rms_norm(latent[:, :size], norm_weight, norm_eps)
    assert isinstance(normed, Tensor)
    key = _rotate(latent[:, None, size:], cos, sin, adjacent_pairs)
    _write(slot_mapping, (cache, torch.cat([normed[:, None], key], dim=-1), scale))
    rotated = _rotate(q, cos, sin, adjacent_pairs)
    return rotated if out is None else out.copy_(rotated)


def _write(slot_mapping: Tensor, *parts: tuple[Tensor, Tensor, float | Tensor]) -> None:
    """To the slots of each cache its rows (T, Hkv, D), by its scale, or with a scale of each that is written too."""
    written = None
    if len(slot_mapping) and int(slot_mapping.amin()) < 0:
        written = (slot_mapping >= 0).nonzero().squeeze(1)
        slot_mapping = slot_mapping[written]
    for cache, all_rows, scale in parts:
        rows, block_size = all_rows if written is None else all_rows[written], cache.shape[1]
        places = (slot_mapping // block_size, slot_mapping % block_size)
        if isinstance(scale, Tensor):
            rows, scales = quantize_per_token(rows, torch.int8)
            scale.index_put_(places, scales)
        elif cache.dtype == torch.float8_e4m3fn:
            rows = (rows.float() * (1.0 / scale)).clamp(-448.0, 448.0).to(cache.dtype)
        # torch has no index_put_ for float8; a uint8 view shares its memory.
        bits = torch.uint8 if cache.dtype.itemsize == 1 else cache.dtype
        cache.view(bits).index_put_(places, rows.view(bits))
