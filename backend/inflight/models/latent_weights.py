"""Loads one rank's part of attention to latents: from what a family declares to a part of a network.

Every rank computes and keeps the latents of all tokens; heads are divided.

Legend: D hidden size, H heads of this rank, N elements of a head's query that are not rotated, L of a latent, V of a
value.
"""

from __future__ import annotations

from torch import Tensor

from inflight.layers.fp8 import fuse_quantization
from inflight.layers.latent_attention import LatentAttention, QueryExpansion
from inflight.layers.norm import RMSNorm
from inflight.layers.rotary import RopeConfig, score_factor
from inflight.models.family import AttentionTensors, LatentTensors
from inflight.models.formats.format import Block
from inflight.models.weights import Section, WeightLoader, times


def load_latent_attention(
    loader: WeightLoader,
    attention: AttentionTensors,
    tensors: LatentTensors,
    prefix: str,
    hidden_size: int,
    heads: Section,
    rope: RopeConfig | None,
    cos_sin: Tensor,
) -> LatentAttention:
    """`prefix`: of the layer's tensors. `heads`: this rank's."""
    sizes, narrow = tensors.sizes, tensors.narrow_queries
    queries, values = (times(heads, size) for size in (sizes.plain + sizes.rotated, sizes.value))
    first = queries if narrow is None else Section(narrow.size, 0, narrow.size)
    down = loader.by_outputs(attention.qkv, prefix, (first, Section(sizes.row, 0, sizes.row)), hidden_size)
    expansion = None
    if narrow is not None:
        weight_C = loader.norm_weight(narrow.norm, prefix, narrow.size, tensors.norms)
        wide = loader.by_outputs(narrow.queries, prefix, (queries,), narrow.size)
        norm, linear = fuse_quantization(RMSNorm(weight_C, tensors.norms.eps), wide)
        expansion = QueryExpansion(norm=norm, linear=linear)
    keys_HLN, values_HVL = _load_heads(loader, tensors, prefix, heads)
    return LatentAttention(
        down=down,
        expand_queries=expansion,
        keys_HLN=keys_HLN,
        values_HVL=values_HVL,
        latent_norm_L=loader.norm_weight(tensors.norm, prefix, sizes.latent, tensors.norms),
        norm_eps=tensors.norms.eps,
        cos_sin=cos_sin,
        scale=(sizes.plain + sizes.rotated) ** -0.5 * score_factor(rope),
        adjacent_pairs=attention.adjacent_pairs,
        dtype=loader.cache_dtype,
        cache_scale=loader.cache_scales(f"{prefix}{attention.module}").k,
        deterministic=loader.deterministic,
        output=loader.by_inputs(attention.output, prefix, hidden_size, values),
    )


def _load_heads(loader: WeightLoader, tensors: LatentTensors, prefix: str, heads: Section) -> tuple[Tensor, Tensor]:
    """(H, L, N) and (H, V, L): what makes keys and values of latents, N and then V rows of each head. No adapter
    changes them, and they are floats, whatever the format."""
    sizes = tensors.sizes
    of_head = sizes.plain + sizes.value
    rows = times(heads, of_head)
    block = Block(
        name=f"{prefix}{tensors.keys_and_values}",
        num_outputs=rows.num_features,
        num_inputs=sizes.latent,
        outputs=range(rows.start, rows.start + rows.size),
        inputs=range(sizes.latent),
    )
    keys = loader.empty(heads.size, sizes.latent, sizes.plain)
    values = loader.empty(heads.size, sizes.value, sizes.latent)
    both = loader.floats(block).view(heads.size, of_head, sizes.latent)
    if loader.checkpoint.is_read and not keys.is_meta:
        keys.copy_(both[:, : sizes.plain].mT)
        values.copy_(both[:, sizes.plain :])
    return keys, values
