"""The native decoder: embedding, layers, norm and head of one rank, composed of the parts that its family describes.

A pipeline stage has some of the layers: the first one the embedding too, the last one the norm and the head.

Legend: T tokens, B rows that sample, D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from inflight.layers.attention import Attention, AttentionMetadata, CacheSpec, LayerCache
from inflight.layers.decoder_layer import DecoderLayer
from inflight.layers.fp8 import fuse_quantization
from inflight.layers.mlp import GatedMLP
from inflight.layers.part import Part, Scaled
from inflight.layers.rms_norm import Norm, RMSNorm
from inflight.layers.rotary import cos_sin_table
from inflight.layers.vocabulary import VocabularyParallelEmbedding, VocabularyParallelHead
from inflight.models.config import ModelConfig
from inflight.models.weights import Section, WeightLoader

NOT_WEIGHTS: tuple[str, ...] = ("rotary_emb.inv_freq",)
"""Endings of the names of tensors in old checkpoints that are not weights, but computed from config.json."""


@dataclass(slots=True, kw_only=True)
class Decoder:
    embedding: Part[Tensor] | None
    """None = an earlier stage has it: the input is the residual stream (T, D) instead of token ids."""
    layers: Sequence[DecoderLayer]
    norm: RMSNorm
    """Behind the last layer. A stage that has no head ends with the first norm of the next one's layers, of which only
    the sum counts: the residual stream."""
    head: Callable[[Tensor], Tensor] | None
    """None = a later stage has it."""
    first_layer: int = 0
    """Number of the first of `layers` in the whole network."""

    @property
    def cache_specs(self) -> tuple[CacheSpec, ...]:
        """See Network."""
        return tuple(layer.attention.cache_spec for layer in self.layers)

    @property
    def input_size(self) -> int | None:
        """D, if its input is the residual stream; None = token ids."""
        return None if self.embedding is not None else self.norm.weight_D.shape[0]

    def forward(self, x_T: Tensor, caches: Sequence[LayerCache], metadata: AttentionMetadata) -> Tensor:
        """Hidden states (T, D) after the last norm, or the residual stream. Writes this step's keys and values into
        `caches`."""
        return self.forward_layers(x_T, caches, metadata, frozenset())[0]

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    def forward_layers(
        self, x_T: Tensor, caches: Sequence[LayerCache], metadata: AttentionMetadata, wanted: frozenset[int]
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """See LayeredNetwork."""
        norms: list[Norm[Any]] = [*(layer.input_norm for layer in self.layers), self.norm]
        normed_TD, stream_TD = self._begin(x_T, norms[0], metadata)
        outputs: dict[int, Tensor] = {}
        for number, (layer, cache) in enumerate(zip(self.layers, caches, strict=True)):
            output_TD, residual_TD = layer(normed_TD, stream_TD, cache, metadata)
            normed_TD, stream_TD = norms[number + 1].add(output_TD, residual_TD, metadata)
            if self.first_layer + number in wanted:
                outputs[self.first_layer + number] = stream_TD
        return stream_TD if self.head is None else normed_TD, outputs

    def by_layer(self) -> list[Decoder]:
        """The same network as stages of one layer each, whose results are their layers' outputs; and what is behind the
        last one, its norm, if this one has a head."""
        stages = []
        for number, layer in enumerate(self.layers):
            norm = self.layers[number + 1].input_norm if number + 1 < len(self.layers) else self.norm
            assert isinstance(norm, RMSNorm), "quantised products, which have no stages"
            embedding = None if number else self.embedding
            first_layer = self.first_layer + number
            stages.append(
                replace(self, embedding=embedding, layers=[layer], norm=norm, head=None, first_layer=first_layer)
            )
        return stages if self.head is None else [*stages, replace(self, embedding=None, layers=[])]

    def _begin(self, x_T: Tensor, norm: Norm[Any], metadata: AttentionMetadata) -> tuple[Any, Tensor]:
        """The residual stream, normalised and as it is."""
        if isinstance(self.embedding, VocabularyParallelEmbedding):
            table_VD = self.embedding.table(metadata)
            if table_VD is not None:
                return norm.of_embeddings(x_T, table_VD)
        stream_TD = x_T if self.embedding is None else self.embedding(x_T, metadata)
        return norm(stream_TD, metadata), stream_TD

    def logits(self, hidden_BD: Tensor) -> Tensor:
        """(B, V) of the tokens that sample, equal on every rank."""
        assert self.head is not None, "logits of a stage that is not the last"
        return self.head(hidden_BD)


def load_decoder(config: ModelConfig, loader: WeightLoader, num_positions: int, layers: range | None = None) -> Decoder:
    """Read this rank's part of the network; `num_positions` is the length of the longest sequence to be computed.

    `layers`: those of its pipeline stage; None = all. The tensors of the others are checked, but not read.

    Raises ConfigurationError if the checkpoint's tensors are not exactly those that `config` requires.
    """
    family = config.family
    features = _features_of_rank(config, loader)
    cos_sin = cos_sin_table(config.rope, config.rotary_dim, num_positions).to(loader.device)
    own = range(config.num_layers) if layers is None else layers
    is_first, is_last = own.start == 0, own.stop == config.num_layers

    def loader_of(is_own: bool) -> WeightLoader:
        return loader if is_own else loader.elsewhere

    is_embedding_own = is_first or (is_last and config.tie_word_embeddings)
    embedding = loader_of(is_embedding_own).by_vocabulary(family.embedding, config.vocab_size, config.hidden_size)
    all_layers = [
        _load_layer(config, loader_of(number in own), features, cos_sin, number) for number in range(config.num_layers)
    ]
    norm = loader_of(is_last).norm(family.norm, "", config.hidden_size, config.rms_norm_eps)
    ignored = NOT_WEIGHTS
    if config.tie_word_embeddings:
        ignored = (*ignored, f"{family.head.name}.weight")
        weight = loader_of(is_last).head(family.embedding, config.vocab_size, config.hidden_size, embedding.weight_UD)
    else:
        weight = loader_of(is_last).head(family.head, config.vocab_size, config.hidden_size)
    loader.checkpoint.refuse_leftovers(ignored)
    head = VocabularyParallelHead(weight, config.vocab_size, loader.group, loader.deterministic)
    scaled_head = head if family.logits_multiplier == 1.0 else Scaled(head, family.logits_multiplier)
    return Decoder(
        embedding=_scaled(embedding, family.embedding_multiplier) if is_first else None,
        layers=all_layers[own.start : own.stop],
        norm=norm if is_last else _norm_behind(config, loader, own),
        head=scaled_head if is_last else None,
        first_layer=own.start,
    )


def _norm_behind(config: ModelConfig, loader: WeightLoader, layers: range) -> RMSNorm:
    """The first norm of the layer behind these."""
    family = config.family
    prefix = f"{family.layers}.{layers.stop}."
    return loader.norm(family.attention.norm, prefix, config.hidden_size, config.rms_norm_eps)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFeatures:
    """What of each layer one rank computes."""

    num_heads: int
    num_kv_heads: int
    queries: Section
    keys_or_values: Section


def num_local_kv_heads(num_kv_heads: int, num_ranks: int) -> int:
    """Key/value heads of each rank: at least one. With more ranks than heads, adjacent ranks hold copies of a head."""
    return max(num_kv_heads // num_ranks, 1)


def _features_of_rank(config: ModelConfig, loader: WeightLoader) -> RankFeatures:
    rank, size, head_dim = loader.group.rank, loader.group.size, config.head_dim
    num_heads = loader.split("num_attention_heads", config.num_heads)
    num_kv_heads = num_local_kv_heads(config.num_kv_heads, size)
    if config.num_kv_heads >= size or size % config.num_kv_heads:
        loader.split("num_key_value_heads", config.num_kv_heads)
    first_kv_head = rank * config.num_kv_heads // size
    return RankFeatures(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        queries=Section(config.num_heads * head_dim, rank * num_heads * head_dim, num_heads * head_dim),
        keys_or_values=Section(config.num_kv_heads * head_dim, first_kv_head * head_dim, num_kv_heads * head_dim),
    )


def _load_layer(
    config: ModelConfig, loader: WeightLoader, features: RankFeatures, cos_sin: Tensor, number: int
) -> DecoderLayer:
    family = config.family
    attention, mlp, prefix = family.attention, family.mlp, f"{family.layers}.{number}."
    hidden_size, eps = config.hidden_size, config.rms_norm_eps
    head_norms = [
        None if tensor is None else loader.vector(f"{prefix}{tensor.name}.weight", config.head_dim)
        for tensor in (attention.q_norm, attention.k_norm)
    ]
    qkv_sections = (features.queries, features.keys_or_values, features.keys_or_values)
    scales = loader.cache_scales(f"{prefix}{attention.module}")
    if loader.adapters is not None:
        loader.adapters.number(family, number)
    input_norm, qkv = fuse_quantization(
        loader.norm(attention.norm, prefix, hidden_size, eps),
        loader.by_outputs(attention.qkv, prefix, qkv_sections, hidden_size),
    )
    output = loader.by_inputs(attention.output, prefix, hidden_size, features.queries)
    post_attention_norm, feed_forward = fuse_quantization(
        loader.norm(mlp.norm, prefix, hidden_size, eps), _load_mlp(config, loader, number, prefix)
    )
    return DecoderLayer(
        input_norm=input_norm,
        qkv=qkv,
        attention=Attention(
            num_heads=features.num_heads,
            num_kv_heads=features.num_kv_heads,
            head_dim=config.head_dim,
            scale=config.head_dim**-0.5 if family.attention_scale is None else family.attention_scale,
            sliding_window=config.sliding_windows[number],
            cos_sin=cos_sin,
            dtype=loader.cache_dtype,
            k_scale=scales.k,
            v_scale=scales.v,
            q_norm_E=head_norms[0],
            k_norm_E=head_norms[1],
            norm_eps=eps,
            deterministic=loader.deterministic,
        ),
        output=_scaled(output, family.residual_multiplier),
        post_attention_norm=post_attention_norm,
        mlp=_scaled(feed_forward, family.residual_multiplier),
    )


def _load_mlp(config: ModelConfig, loader: WeightLoader, number: int, prefix: str) -> Part[Tensor]:
    mlp, experts = config.family.mlp, config.family.experts
    if experts is not None and number in experts.layers:
        return loader.experts(experts, prefix, config.hidden_size)
    intermediate = loader.even_section("intermediate_size", config.intermediate_size)
    return GatedMLP(
        gate_up=loader.by_outputs(mlp.gate_up, prefix, (intermediate, intermediate), config.hidden_size),
        down=loader.by_inputs(mlp.down, prefix, config.hidden_size, intermediate),
    )


def _scaled(part: Part[Any], multiplier: float) -> Part[Any]:
    return part if multiplier == 1.0 else Scaled(part, multiplier)
