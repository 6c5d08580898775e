"""Small decoders of random weights with heads of any sizes, and their compiled forms."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from compiled_network import BLOCK_SIZE
from torch import Tensor

from inflight.config import EngineConfig
from inflight.distributed.mapping import Mapping
from inflight.distributed.rank_group import SingleRank
from inflight.distributed.tensor_parallel import TensorParallelGroup
from inflight.layers.attention import Attention
from inflight.layers.decoder_layer import DecoderLayer
from inflight.layers.linear import ColumnParallelLinear, RowParallelLinear
from inflight.layers.mlp import GatedMLP
from inflight.layers.rms_norm import RMSNorm
from inflight.layers.rotary import RopeConfig, cos_sin_table
from inflight.layers.vocabulary import VocabularyParallelEmbedding, VocabularyParallelHead
from inflight.layers.weight import DenseWeight
from inflight.models.compiled import compile_network
from inflight.models.decoder import Decoder
from inflight.models.network import Network
from inflight.runtime.kv_cache import KVCache, KVCacheShape


def compile_alone(decoder: Decoder, cache: KVCache) -> Network:
    return compile_network(EngineConfig(cpu_compile="true"), decoder, cache.layers, torch.device("cpu"))


@dataclass(frozen=True)
class RandomHeads:
    seed: int
    head_dim: int
    num_kv_heads: int
    queries_of_key: int
    window: int


def random_decoder(heads: RandomHeads, dtype: torch.dtype, *, deterministic: bool = False) -> tuple[Decoder, KVCache]:
    """Two layers; the second has a window and other sizes. The same numbers for every type, those of bfloat16."""
    generator = torch.Generator().manual_seed(heads.seed)

    def random(*sizes: int, scale: float) -> Tensor:
        return (torch.randn(sizes, generator=generator) * scale).bfloat16().to(dtype)

    hidden = 64
    group = TensorParallelGroup.create(SingleRank(), Mapping(), torch.device("cpu"))
    cos_sin = cos_sin_table(RopeConfig(original_max_positions=1024), heads.head_dim, 1024)

    def columns(weight_OI: Tensor) -> ColumnParallelLinear:
        return ColumnParallelLinear(DenseWeight(weight_OI), None, deterministic=deterministic)

    def rows(weight_OI: Tensor) -> RowParallelLinear:
        return RowParallelLinear(DenseWeight(weight_OI), None, group, deterministic=deterministic)

    def layer(window: int, num_kv_heads: int, inner: int, eps: float) -> DecoderLayer:
        queries = num_kv_heads * heads.queries_of_key
        qkv_size = (queries + 2 * num_kv_heads) * heads.head_dim
        return DecoderLayer(
            input_norm=RMSNorm(1 + random(hidden, scale=0.1), eps),
            qkv=columns(random(qkv_size, hidden, scale=0.2)),
            attention=Attention(
                num_heads=queries,
                num_kv_heads=num_kv_heads,
                head_dim=heads.head_dim,
                scale=heads.head_dim**-0.5,
                sliding_window=window,
                cos_sin=cos_sin,
                dtype=dtype,
                deterministic=deterministic,
            ),
            output=rows(random(hidden, queries * heads.head_dim, scale=0.05)),
            post_attention_norm=RMSNorm(1 + random(hidden, scale=0.1), 1e-6),
            mlp=GatedMLP(
                gate_up=columns(random(2 * inner, hidden, scale=0.1)),
                down=rows(random(hidden, inner, scale=0.1)),
            ),
        )

    decoder = Decoder(
        embedding=VocabularyParallelEmbedding(random(203, hidden, scale=1.0), group),
        layers=[layer(0, heads.num_kv_heads, 90, 1e-6), layer(heads.window, heads.num_kv_heads + 1, 160, 0.5)],
        norm=RMSNorm(1 + random(hidden, scale=0.1), 1e-6),
        head=VocabularyParallelHead(random(203, hidden, scale=0.1), 203, group, deterministic),
    )
    shape = KVCacheShape(layers=decoder.cache_specs, block_size=BLOCK_SIZE)
    return decoder, KVCache(shape, 1200, torch.device("cpu"))


HEADS = [
    RandomHeads(seed, head_dim, num_kv_heads, queries_of_key, window)
    for seed, (head_dim, num_kv_heads, queries_of_key, window) in enumerate(
        [(32, 1, 1, 16), (96, 2, 1, 31), (160, 1, 8, 33), (256, 1, 2, 127), (64, 3, 3, 128), (128, 1, 9, 65)]
    )
]
