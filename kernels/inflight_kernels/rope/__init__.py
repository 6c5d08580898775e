"""Rotary embedding of queries and keys, and writing keys and values, or latents, to their cache slots."""

from __future__ import annotations

from torch import Tensor

from inflight_kernels.dispatch import implementation


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
    """Rotate `q` and `k`, write `k` and `v` into the cache, return the rotated q as a new contiguous (T, Hq, D).

    q (T, Hq, D), k and v (T, Hkv, D), float, may be views of one buffer. `cos_sin` (max_positions, 2R) float32 holds
    [cos | sin] of R = rotary_dim / 2 angles each; rotary_dim may be less than D, then the rest of a head is not
    changed. Rotation pairs element r with r + R (Llama, GPT-NeoX), or with `adjacent_pairs` 2r with 2r + 1 (GLM,
    Cohere). `positions` and `slot_mapping` (T,) int64; a negative slot is not written. With both norm weights (D,),
    each head of q and k is RMS-normalised first (Qwen3), and rounded as by `rms_norm`.

    A cache of torch.float8_e4m3fn (on a GPU from compute capability 8.9 on) holds k / k_scale and v / v_scale, computed
    from values rounded to the dtype of q and clamped to +-448. One of torch.int8 is written with its scales, float32
    (num_blocks, block_size, Hkv): each head of a token is quantised by itself, as by `quantize_per_token`. With any
    other cache both scales must be 1. On a GPU a token's result is bitwise independent of the other tokens.
    """
    result: Tensor = implementation(q, __name__).rope_and_kv_write(
        q,
        k,
        v,
        cos_sin,
        positions,
        k_cache,
        v_cache,
        slot_mapping,
        q_norm_weight,
        k_norm_weight,
        norm_eps,
        k_scale,
        v_scale,
        adjacent_pairs,
    )
    return result


def rope(
    q: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    norm_weight: Tensor | None = None,
    norm_eps: float = 1e-6,
    adjacent_pairs: bool = False,
) -> Tensor:
    """Rotate `q` alone, for keys that are in a cache already: as `rope_and_kv_write`, which returns the same bits."""
    result: Tensor = implementation(q, __name__).rope(q, cos_sin, positions, norm_weight, norm_eps, adjacent_pairs)
    return result


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
    """Write each token's latent, RMS-normalised, and the key beside it, rotated, into the cache; return the rotated q.

    `latent` (T, L + R) float: L elements that become the values of all heads and, with the rotated R behind them, their
    keys, one row (L + R) of `cache` (num_blocks, block_size, 1, L + R). It may be a view of a wider buffer, and does
    not hold its values afterwards. q (T, Hq, R), the part of each query that is rotated, may be a view too, and so may
    `out`, to which it is written if given. `norm_weight` (L,); `cos_sin` (max_positions, R); `positions`,
    `slot_mapping`, `adjacent_pairs`, dtypes and rounding as in `rope_and_kv_write`. A cache of torch.float8_e4m3fn
    holds all of a row / scale; of torch.int8 a row is quantised by itself, with its scale, float32 (num_blocks,
    block_size, 1), written to `scale`.
    """
    result: Tensor = implementation(q, __name__).rope_and_latent_write(
        q,
        latent,
        norm_weight,
        norm_eps,
        cos_sin,
        positions,
        cache,
        slot_mapping,
        out,
        scale,
        adjacent_pairs,
    )
    return result
