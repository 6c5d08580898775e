"""The decoder of Llama, Mistral, Qwen2 and Qwen3: embedding, layers, norm and head, for one rank.

ModelConfig holds the differences between them. Legend: T tokens, B rows that sample, D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from inflight.layers.attention import Attention, AttentionMetadata, CacheSpec, LayerCache
from inflight.layers.decoder_layer import DecoderLayer
from inflight.layers.mlp import GatedMLP
from inflight.layers.rms_norm import RMSNorm
from inflight.layers.rotary import cos_sin_table
from inflight.layers.vocabulary import VocabularyParallelEmbedding, VocabularyParallelHead
from inflight.models.config import ModelConfig
from inflight.models.weights import Columns, WeightLoader

NOT_WEIGHTS: tuple[str, ...] = ("rotary_emb.inv_freq",)
"""Endings of the names of tensors in old checkpoints that are not weights, but computed from config.json."""


@dataclass(slots=True, kw_only=True)
class Decoder:
    embedding: VocabularyParallelEmbedding
    layers: Sequence[DecoderLayer]
    norm: RMSNorm
    head: VocabularyParallelHead

    @property
    def cache_specs(self) -> tuple[CacheSpec, ...]:
        """See Network."""
        return tuple(
            CacheSpec(
                num_kv_heads=layer.attention.num_kv_heads,
                head_dim=layer.attention.head_dim,
                dtype=layer.qkv.weight_OI.dtype,
                sliding_window=layer.attention.sliding_window,
            )
            for layer in self.layers
        )

    def forward(self, token_ids_T: Tensor, caches: Sequence[LayerCache], metadata: AttentionMetadata) -> Tensor:
        """Hidden states (T, D) after the last norm. Writes this step's keys and values into `caches`."""
        return self.forward_layers(token_ids_T, caches, metadata, frozenset())[0]

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    def forward_layers(
        self, token_ids_T: Tensor, caches: Sequence[LayerCache], metadata: AttentionMetadata, wanted: frozenset[int]
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """See LayeredNetwork."""
        hidden_TD = self.embedding(token_ids_T)
        residual_TD: Tensor | None = None
        outputs: dict[int, Tensor] = {}
        for number, (layer, cache) in enumerate(zip(self.layers, caches, strict=True)):
            hidden_TD, residual_TD = layer(hidden_TD, residual_TD, cache, metadata)
            if number in wanted:
                outputs[number] = hidden_TD + residual_TD
        if residual_TD is None:
            return self.norm(hidden_TD), outputs
        return self.norm.add(hidden_TD, residual_TD)[0], outputs

    def logits(self, hidden_BD: Tensor) -> Tensor:
        """(B, V) of the tokens that sample, equal on every rank."""
        return self.head(hidden_BD)


def load_decoder(config: ModelConfig, loader: WeightLoader, num_positions: int) -> Decoder:
    """Read this rank's part of the network; `num_positions` is the length of the longest sequence to be computed.

    Raises ConfigurationError if the checkpoint's tensors are not exactly those that `config` requires.
    """
    heads = _heads_of_rank(config, loader)
    cos_sin = cos_sin_table(config.rope, config.head_dim, num_positions).to(loader.device)
    embedding = loader.vocabulary("model.embed_tokens", config.vocab_size, config.hidden_size)
    layers = [_load_layer(config, loader, heads, cos_sin, number) for number in range(config.num_layers)]
    norm = loader.norm("model.norm", config.hidden_size, config.rms_norm_eps)
    head_weight_UD = embedding.weight_UD
    ignored = NOT_WEIGHTS
    if config.tie_word_embeddings:
        ignored = (*ignored, "lm_head.weight")
    else:
        head_weight_UD = loader.vocabulary("lm_head", config.vocab_size, config.hidden_size).weight_UD
    loader.checkpoint.refuse_leftovers(ignored)
    head = VocabularyParallelHead(head_weight_UD, config.vocab_size, loader.group)
    return Decoder(embedding=embedding, layers=layers, norm=norm, head=head)


@dataclass(frozen=True, slots=True)
class RankHeads:
    """The heads of one rank: query heads [query_start, query_start + num_query) and likewise key/value heads."""

    num_query: int
    query_start: int
    num_kv: int
    kv_start: int


def num_local_kv_heads(num_kv_heads: int, num_ranks: int) -> int:
    """Key/value heads of each rank: at least one. With more ranks than heads, adjacent ranks hold copies of a head."""
    return max(num_kv_heads // num_ranks, 1)


def _heads_of_rank(config: ModelConfig, loader: WeightLoader) -> RankHeads:
    rank, size = loader.group.rank, loader.group.size
    num_query = loader.split("num_attention_heads", config.num_heads)
    num_kv = num_local_kv_heads(config.num_kv_heads, size)
    if config.num_kv_heads >= size or size % config.num_kv_heads:
        loader.split("num_key_value_heads", config.num_kv_heads)
    return RankHeads(num_query, rank * num_query, num_kv, rank * config.num_kv_heads // size)


def _load_layer(
    config: ModelConfig, loader: WeightLoader, heads: RankHeads, cos_sin: Tensor, number: int
) -> DecoderLayer:
    prefix = f"model.layers.{number}"
    attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
    head_dim, hidden_size = config.head_dim, config.hidden_size
    query_features, kv_features = config.num_heads * head_dim, config.num_kv_heads * head_dim
    kv_start, kv_size = heads.kv_start * head_dim, heads.num_kv * head_dim
    query = Columns(f"{attention}.q_proj", query_features, heads.query_start * head_dim, heads.num_query * head_dim)
    key = Columns(f"{attention}.k_proj", kv_features, kv_start, kv_size)
    value = Columns(f"{attention}.v_proj", kv_features, kv_start, kv_size)
    gate = loader.columns(f"{mlp}.gate_proj", config.intermediate_size)
    up = loader.columns(f"{mlp}.up_proj", config.intermediate_size)
    return DecoderLayer(
        input_norm=loader.norm(f"{prefix}.input_layernorm", hidden_size, config.rms_norm_eps),
        qkv=loader.stacked([query, key, value], hidden_size, config.qkv_bias),
        attention=Attention(
            num_heads=heads.num_query,
            num_kv_heads=heads.num_kv,
            head_dim=head_dim,
            scale=head_dim**-0.5,
            sliding_window=config.sliding_windows[number],
            cos_sin=cos_sin,
            q_norm_E=loader.vector(f"{attention}.q_norm.weight", head_dim) if config.qk_norm else None,
            k_norm_E=loader.vector(f"{attention}.k_norm.weight", head_dim) if config.qk_norm else None,
            norm_eps=config.rms_norm_eps,
        ),
        output=loader.rows(f"{attention}.o_proj", hidden_size, query_features, config.output_bias),
        post_attention_norm=loader.norm(f"{prefix}.post_attention_layernorm", hidden_size, config.rms_norm_eps),
        mlp=GatedMLP(
            gate_up=loader.stacked([gate, up], hidden_size, config.mlp_bias),
            down=loader.rows(f"{mlp}.down_proj", hidden_size, config.intermediate_size, config.mlp_bias),
        ),
    )
