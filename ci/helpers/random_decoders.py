"""Small decoders of random weights with heads of any sizes, and their compiled forms."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from compiled_network import BLOCK_SIZE
from thread_ranks import ThreadRanks
from torch import Tensor

from inflight.config import EngineConfig
from inflight.distributed.parallel_groups import ParallelGroups
from inflight.distributed.tensor_parallel import TensorParallelGroup
from inflight.layers.attention import Attention, AttentionMetadata
from inflight.layers.decoder_layer import Branch, DecoderLayer
from inflight.layers.linear import ColumnParallelLinear, RowParallelLinear
from inflight.layers.mlp import GatedMLP
from inflight.layers.norm import RMSNorm
from inflight.layers.rotary import RopeConfig, cos_sin_table
from inflight.layers.self_attention import SelfAttention
from inflight.layers.vocabulary import VocabularyParallelEmbedding, VocabularyParallelHead
from inflight.layers.weight import DenseWeight
from inflight.models.compiled import compile_network
from inflight.models.decoder import Decoder
from inflight.models.decoder_loading import num_local_kv_heads
from inflight.models.network import Network
from inflight.runtime.state_store import StateShape, StateStore

ALONE = TensorParallelGroup()
FP8_SCALES = (0.3, 0.07)
"""Of keys and values: no power of two, so that a scale that is left out changes bits."""


def compile_alone(decoder: Decoder, cache: StateStore, group: TensorParallelGroup = ALONE) -> Network:
    groups = ParallelGroups(tensor=group)
    return compile_network(EngineConfig(cpu_compile="true"), decoder, cache.states, torch.device("cpu"), groups)


class DecoderOnRanks:
    """A random decoder, on one rank or on several that are threads. Each has a cache of its own."""

    def __init__(
        self,
        heads: RandomHeads,
        ranks: ThreadRanks | None = None,
        dtype: torch.dtype = torch.bfloat16,
        *,
        deterministic: bool = False,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        """`deterministic`: as this key makes the layers; else they are compiled. `kv_dtype`: see random_decoder."""
        self._ranks = ranks
        groups: Sequence[TensorParallelGroup] = [ALONE] if ranks is None else ranks.connect()
        options = {"deterministic": deterministic, "kv_dtype": kv_dtype}
        parts = [random_decoder(heads, dtype, group, **options) for group in groups]
        self._caches = [cache for _, cache in parts]
        self._networks: list[Network] = [decoder for decoder, _ in parts]
        if not deterministic:
            self._networks = self._on_each(lambda rank: compile_alone(*parts[rank], groups[rank]))

    @property
    def kept_tensors(self) -> list[Tensor]:
        """Of all ranks."""
        return [tensor for cache in self._caches for tensor in cache.block_tensors]

    def hidden(self, token_ids_T: Tensor, metadata: AttentionMetadata) -> Tensor:
        """(T, D), the same bits on all ranks."""
        return self._same(lambda rank: self._forward(rank, token_ids_T, metadata))

    def logits(self, hidden_BD: Tensor) -> Tensor:
        """(B, V), likewise."""
        return self._same(lambda rank: self._networks[rank].logits(hidden_BD))

    @torch.inference_mode()
    def _forward(self, rank: int, token_ids_T: Tensor, metadata: AttentionMetadata) -> Tensor:
        return self._networks[rank].forward(token_ids_T, self._caches[rank].states, metadata)

    def _same(self, compute: Callable[[int], Tensor]) -> Tensor:
        first, *others = self._on_each(compute)
        assert all(torch.equal(first, other) for other in others)
        return first

    def _on_each(self, compute: Callable[[int], Any]) -> list[Any]:
        return [compute(0)] if self._ranks is None else self._ranks.run(compute)


@dataclass(frozen=True)
class RandomHeads:
    seed: int
    head_dim: int
    num_kv_heads: int
    queries_of_key: int
    window: int
    soft_cap: float = 0.0
    has_sinks: bool = False


def random_decoder(
    heads: RandomHeads,
    dtype: torch.dtype,
    group: TensorParallelGroup = ALONE,
    *,
    deterministic: bool = False,
    kv_dtype: torch.dtype | None = None,
) -> tuple[Decoder, StateStore]:
    """Two layers; the second has a window and other sizes. The same numbers for every type, those of bfloat16, and on
    every rank a part of those of one rank. `kv_dtype`: of the cache, of which FP8_SCALES divide fp8; None = `dtype`."""
    k_scale, v_scale = FP8_SCALES if kv_dtype == torch.float8_e4m3fn else (1.0, 1.0)
    generator = torch.Generator().manual_seed(heads.seed)

    def random(*sizes: int, scale: float) -> Tensor:
        return (torch.randn(sizes, generator=generator) * scale).bfloat16().to(dtype)

    def part(weight: Tensor, dim: int = 0) -> Tensor:
        """This rank's even share; zeros behind the last one's."""
        size = -(-weight.shape[dim] // group.size)
        missing = size * group.size - weight.shape[dim]
        return F.pad(weight, (0, 0, 0, missing)).narrow(dim, group.rank * size, size).contiguous()

    def qkv(queries: int, num_kv_heads: int) -> Tensor:
        sizes = [count * heads.head_dim for count in (queries, num_kv_heads, num_kv_heads)]
        q, *kv = random(sum(sizes), hidden, scale=0.2).split(sizes)
        first = group.rank * num_kv_heads // group.size * heads.head_dim
        size = num_local_kv_heads(num_kv_heads, group.size) * heads.head_dim
        return torch.cat((part(q), *(each[first : first + size] for each in kv)))

    hidden = 64
    cos_sin = cos_sin_table(RopeConfig(original_max_positions=1024), heads.head_dim, 1024)

    def columns(weight_OI: Tensor) -> ColumnParallelLinear:
        return ColumnParallelLinear(DenseWeight(weight_OI), None, deterministic=deterministic)

    def rows(weight_OI: Tensor) -> RowParallelLinear:
        return RowParallelLinear(DenseWeight(weight_OI), None, group, deterministic=deterministic)

    def layer(window: int, num_kv_heads: int, inner: int, eps: float) -> DecoderLayer:
        queries = num_kv_heads * heads.queries_of_key
        sinks = random(queries, scale=2.0).float().chunk(group.size)[group.rank] if heads.has_sinks else None
        input_norm = RMSNorm(1 + random(hidden, scale=0.1), eps)
        attention = SelfAttention(
            qkv=columns(qkv(queries, num_kv_heads)),
            attention=Attention(
                num_heads=queries // group.size,
                num_kv_heads=num_local_kv_heads(num_kv_heads, group.size),
                head_dim=heads.head_dim,
                scale=heads.head_dim**-0.5,
                sliding_window=window,
                cos_sin=cos_sin,
                dtype=kv_dtype or dtype,
                k_scale=k_scale,
                v_scale=v_scale,
                deterministic=deterministic,
                soft_cap=heads.soft_cap,
                sinks_H=sinks,
            ),
            output=rows(part(random(hidden, queries * heads.head_dim, scale=0.05), 1)),
        )
        post_attention_norm = RMSNorm(1 + random(hidden, scale=0.1), 1e-6)
        mlp = GatedMLP(
            gate_up=columns(torch.cat([part(each) for each in random(2 * inner, hidden, scale=0.1).chunk(2)])),
            down=rows(part(random(hidden, inner, scale=0.1), 1)),
        )
        return DecoderLayer(
            branches=(Branch(norm=input_norm, stateful=attention), Branch(norm=post_attention_norm, part=mlp))
        )

    decoder = Decoder(
        embedding=VocabularyParallelEmbedding(part(random(203, hidden, scale=1.0)), group, dtype),
        layers=[layer(0, heads.num_kv_heads, 90, 1e-6), layer(heads.window, heads.num_kv_heads + 1, 160, 0.5)],
        norm=RMSNorm(1 + random(hidden, scale=0.1), 1e-6),
        head=VocabularyParallelHead(DenseWeight(part(random(203, hidden, scale=0.1))), 203, group, deterministic),
        hidden_size=hidden,
        dtype=dtype,
    )
    shape = StateShape(specs=decoder.state_specs, block_size=BLOCK_SIZE)
    return decoder, StateStore(shape, 1200, torch.device("cpu"))


HEADS = [
    RandomHeads(seed, head_dim, num_kv_heads, queries_of_key, window)
    for seed, (head_dim, num_kv_heads, queries_of_key, window) in enumerate(
        [(32, 1, 1, 16), (96, 2, 1, 31), (160, 1, 8, 33), (256, 1, 2, 127), (64, 3, 3, 128), (128, 1, 9, 65)]
    )
]
CAPPED = RandomHeads(6, 64, 2, 3, 100, soft_cap=2.0)
WITH_SINKS = RandomHeads(7, 32, 1, 8, 16, has_sinks=True)
