"""Loads one rank's part of the native decoder, composed of the parts that its family describes.

Legend: T tokens, D hidden size, H query heads of this rank.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from inflight.distributed.tensor_parallel import TensorParallelGroup
from inflight.errors import ConfigurationError
from inflight.layers.attention import Attention
from inflight.layers.decoder_layer import Branch, DecoderLayer
from inflight.layers.gated_delta_net import GatedDeltaNet
from inflight.layers.mamba import Mamba
from inflight.layers.norm import Norm
from inflight.layers.norm_parts import NormPart, NormParts
from inflight.layers.part import OfScaled, Part, Scaled, SoftCapped
from inflight.layers.rotary import RopeConfig, cos_sin_table
from inflight.layers.self_attention import SelfAttention
from inflight.layers.short_conv import ShortConv
from inflight.layers.vocabulary import PositionedEmbedding, VocabularyParallelHead
from inflight.models.branch_loading import fused, norm_behind_part, scaled
from inflight.models.checkpoint import FLOAT_DTYPES, Checkpoint
from inflight.models.config import Heads, ModelConfig
from inflight.models.decoder import Decoder
from inflight.models.delta_net_weights import load_delta_net
from inflight.models.family import Family, without_first_name
from inflight.models.feed_forward_loading import load_feed_forward
from inflight.models.latent_weights import load_latent_attention
from inflight.models.layer_input_weights import load_layer_input_branch, load_layer_inputs
from inflight.models.mamba_weights import load_mamba
from inflight.models.mixer_tensors import DeltaNetTensors, MambaTensors, MixerTensors
from inflight.models.score_loading import load_score_head
from inflight.models.short_conv_weights import load_short_conv
from inflight.models.text_parts import renamed
from inflight.models.weights import Section, WeightLoader

logger = logging.getLogger(__name__)

NOT_WEIGHTS: tuple[str, ...] = (
    "rotary_emb.inv_freq",
    "attn.bias",
    "attn.masked_bias",
    "attention.bias",
    "attention.masked_bias",
)
"""Endings of the names of tensors in old checkpoints that are not weights, but computed from config.json, or masks."""


def load_decoder(config: ModelConfig, loader: WeightLoader, num_positions: int, layers: range | None = None) -> Decoder:
    """Read this rank's part of the network; `num_positions` is the length of the longest sequence to be computed.

    `layers`: those of its pipeline stage; None = all. The tensors of the others are checked, but not read.

    Raises ConfigurationError if the checkpoint's tensors are not exactly those that `config` requires.
    """
    config = _tied_as_in(loader.checkpoint, named_as_in(loader, config))
    family = config.family
    kinds = {(rope, heads.rotary_dim) for rope, heads in zip(config.ropes, config.heads, strict=True)}
    tables = {kind: cos_sin_table(*kind, num_positions).to(loader.device) for kind in kinds}
    own = range(config.num_layers) if layers is None else layers
    _check_stage(config, own)
    is_first, is_last = own.start == 0, own.stop == config.num_layers

    def loader_of(is_own: bool) -> WeightLoader:
        return loader if is_own else loader.elsewhere

    writes = family.scores is None and not family.is_headless
    if config.tie_word_embeddings and writes:
        own_table = loader_of(is_first or is_last)
        weight = own_table.head(family.embedding, config.vocab_size, config.hidden_size)
        embedding = own_table.by_vocabulary(family.embedding, config.vocab_size, config.hidden_size, weight)
    else:
        embedding = loader_of(is_first).by_vocabulary(family.embedding, config.vocab_size, config.hidden_size)
    positions_SD = None
    if family.positions is not None:
        positions_SD = loader_of(is_first).positions(
            family.positions, config.max_position_embeddings, num_positions, config.hidden_size
        )
    all_layers = [_load_layer(config, loader_of(number in own), tables, number) for number in range(config.num_layers)]
    layer_inputs = load_layer_inputs(config, loader)
    assert family.norm is not None, "a decoder without a last norm"
    norm = loader_of(is_last).norm(family.norm, "", config.hidden_size, family.norms)
    ignored = NOT_WEIGHTS
    head: Callable[[Tensor], Tensor] | None = None
    if family.scores is not None:
        head = load_score_head(config, family.scores, loader_of(is_last))
    elif writes:
        if not config.tie_word_embeddings:
            weight = loader_of(is_last).head(family.head, config.vocab_size, config.hidden_size)
        bias_U = loader_of(is_last).head_bias(family.head, config.vocab_size)
        rows = VocabularyParallelHead(weight, config.vocab_size, loader.group, loader.deterministic, bias_U)
        head = _finished(rows, family)
    if config.tie_word_embeddings or not writes:
        ignored = (*ignored, f"{family.head.name}.weight")
    extra_layers = range(config.num_layers, config.num_layers + family.num_extra_layers)
    unread = tuple(f"{family.layers}.{number}." for number in extra_layers) + _keys_of_none(config) + family.unread
    loader.checkpoint.refuse_leftovers(ignored, unread + (config.text_part.others if config.text_part else ()))
    embedding.factor = family.token_multiplier
    if family.rounds_token_multiplier:
        embedding.factor = loader.rounded(family.token_multiplier)
    embedding_part: Part[Tensor] = scaled(embedding, family.embedding_multiplier)
    if positions_SD is not None:
        embedding_part = PositionedEmbedding(embedding_part, positions_SD)
    return Decoder(
        embedding=embedding_part if is_first else None,
        layer_inputs=layer_inputs,
        layers=all_layers[own.start : own.stop],
        norm=norm if is_last else _norm_behind(config, loader, own),
        head=head if is_last else None,
        is_last=is_last,
        first_layer=own.start,
        hidden_size=config.hidden_size,
        dtype=loader.dtype,
    )


def _check_stage(config: ModelConfig, layers: range) -> None:
    """Raise ConfigurationError if a pipeline stage of these layers needs more of others than the residual stream."""
    if config.family.layer_inputs is not None and len(layers) < config.num_layers:
        raise ConfigurationError(
            f"{config.architecture} has inputs of every layer (hidden_size_per_layer_input), which pipeline stages do "
            "not hand on; set pipeline_parallel_size to 1"
        )
    for number in layers:
        if (source := config.family.key_layer(number)) not in layers:
            raise ConfigurationError(
                f"layer {number} of {config.architecture} attends to the keys and values of layer {source}, which "
                "another pipeline stage has; set pipeline_parallel_size to less"
            )


def _keys_of_none(config: ModelConfig) -> tuple[str, ...]:
    """Tensors that checkpoints have for keys and values of layers that use those of others."""
    family = config.family
    key_norm = () if family.attention.k_norm is None else (family.attention.k_norm.name,)
    return tuple(
        f"{family.layers}.{number}.{name}."
        for number in range(config.num_layers)
        if family.key_layer(number) != number
        for name in (*family.attention.qkv.names[1:], *key_norm)
    )


def _finished(head: Callable[[Tensor], Tensor], family: Family) -> Callable[[Tensor], Tensor]:
    """The head with what the family does to its logits."""
    if family.logits_multiplier != 1.0:
        head = Scaled(head, family.logits_multiplier)
    return head if family.logits_soft_cap == 0.0 else SoftCapped(head, family.logits_soft_cap)


def _norm_behind(config: ModelConfig, loader: WeightLoader, layers: range) -> Norm[Any]:
    """The first norm of the layer behind these."""
    family = config.family
    prefix = f"{family.layers}.{layers.stop}."
    return loader.norm(family.attention.norm, prefix, config.hidden_size, family.norms)


def named_as_in(loader: WeightLoader, config: ModelConfig) -> ModelConfig:
    """With names as the checkpoint has them: some were saved without the head, and so without the name beside it."""
    if config.text_part is not None:
        found = [each for each in renamed(config.family) if f"{each.embedding.name}.weight" in loader.checkpoint]
        return replace(config, family=found[0]) if found else config
    shorter = without_first_name(config.family)
    if f"{shorter.embedding.name}.weight" not in loader.checkpoint:
        return config
    if loader.adapters is not None:
        loader.adapters.prefix = config.family.layers.removesuffix(shorter.layers)
    return replace(config, family=shorter)


def _tied_as_in(checkpoint: Checkpoint, config: ModelConfig) -> ModelConfig:
    """Not tied where the checkpoint has a head of other values than the embedding, which transformers computes with
    then: some families save one whatever config.json says, and some that were tuned have got one of their own."""
    head, embedding = f"{config.family.head.name}.weight", f"{config.family.embedding.name}.weight"
    if not config.tie_word_embeddings or any(
        name not in checkpoint or checkpoint.dtype_of(name) not in FLOAT_DTYPES for name in (head, embedding)
    ):
        return config
    if checkpoint.has_equal_values(head, embedding):
        return config
    logger.info("%s is not the embedding, as tie_word_embeddings says: the checkpoint's own is computed", head)
    return replace(config, tie_word_embeddings=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFeatures:
    """What of each layer one rank computes."""

    num_heads: int
    num_kv_heads: int
    heads: Section
    queries: Section
    keys_or_values: Section
    head_dim: int


def num_local_kv_heads(num_kv_heads: int, num_ranks: int) -> int:
    """Key/value heads of each rank: at least one. With more ranks than heads, adjacent ranks hold copies of a head."""
    return max(num_kv_heads // num_ranks, 1)


def features_of_rank(config: ModelConfig, loader: WeightLoader, number: int) -> RankFeatures:
    heads, rank, size = config.heads[number], loader.group.rank, loader.group.size
    head_dim = heads.head_dim
    num_heads = loader.split("num_attention_heads", config.num_heads)
    num_kv_heads = num_local_kv_heads(heads.num_kv_heads, size)
    if heads.num_kv_heads >= size or size % heads.num_kv_heads:
        loader.split("num_key_value_heads", heads.num_kv_heads)
    first_kv_head = rank * heads.num_kv_heads // size
    return RankFeatures(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        heads=Section(config.num_heads, rank * num_heads, num_heads),
        queries=Section(config.num_heads * head_dim, rank * num_heads * head_dim, num_heads * head_dim),
        keys_or_values=Section(heads.num_kv_heads * head_dim, first_kv_head * head_dim, num_kv_heads * head_dim),
        head_dim=head_dim,
    )


def _load_layer(
    config: ModelConfig,
    loader: WeightLoader,
    tables: Mapping[tuple[RopeConfig | None, int], Tensor],
    number: int,
) -> DecoderLayer:
    family, branches = config.family, list[Branch]()
    if loader.adapters is not None:
        loader.adapters.number(family, number)
    mixer = family.mixer_of(number) if family.mixes(number) else None
    if mixer is not None:
        branches.append(_load_mixer(config, loader, mixer, number))
    if family.attends(number):
        cos_sin = tables[config.ropes[number], config.heads[number].rotary_dim]
        branches.append(_load_attention(config, loader, cos_sin, number, branches))
    if family.feeds_forward(number):
        branches += load_feed_forward(config, loader, number, branches)
    if family.layer_inputs is not None:
        branches.append(load_layer_input_branch(config, loader, number))
    scale = 1.0
    if family.layer_scale is not None:
        scale = loader.rounded(loader.checkpoint.read_number(f"{family.layers}.{number}.{family.layer_scale}"))
    return DecoderLayer(branches=branches, scale=scale)


def _load_mixer(config: ModelConfig, loader: WeightLoader, tensors: MixerTensors, number: int) -> Branch:
    family, prefix = config.family, f"{config.family.layers}.{number}."
    norm = loader.norm(family.attention.norm, prefix, config.hidden_size, family.norms)
    mixer: GatedDeltaNet | Mamba | ShortConv
    if isinstance(tensors, DeltaNetTensors):
        mixer = load_delta_net(loader, tensors, prefix, config.hidden_size)
    elif isinstance(tensors, MambaTensors):
        mixer = load_mamba(loader, tensors, prefix, config.hidden_size)
        mixer.output = scaled(mixer.output, tensors.output_multiplier)
    else:
        mixer = load_short_conv(loader, tensors, prefix, config.hidden_size)
    mixer.output = scaled(mixer.output, family.residual_multiplier)
    return Branch(norm=norm, stateful=mixer)


def _load_attention(
    config: ModelConfig,
    loader: WeightLoader,
    cos_sin: Tensor,
    number: int,
    before: Sequence[Branch],
) -> Branch:
    """`before`: the mixer that the layer has beside it, whose norm is that of both."""
    family, hidden_size = config.family, config.hidden_size
    tensors, prefix = family.attention, f"{family.layers}.{number}."
    features = features_of_rank(config, loader, number)
    if tensors.latents is not None:
        part = load_latent_attention(
            loader, tensors, tensors.latents, prefix, hidden_size, features.heads, config.ropes[number], cos_sin
        )
        own_norm, part.down = fused(family, loader.norm(tensors.norm, prefix, hidden_size, family.norms), part.down)
        norm_after = norm_behind_part(config, loader, tensors.norm_after, prefix)
        return Branch(norm=own_norm, stateful=part, norm_after=norm_after)
    source = family.key_layer(number)
    has_keys, values_are_keys = source == number, number in family.layers_without_values
    q_norm, k_norm = _load_qk_norms(config, loader, features, prefix, has_keys=has_keys)
    gates = (features.queries,) if tensors.is_gated else ()
    num_kv_sections = (1 if values_are_keys else 2) if has_keys else 0
    qkv_sections = (features.queries, *gates, *(features.keys_or_values,) * num_kv_sections)
    scales = loader.cache_scales(f"{family.layers}.{source}.{tensors.module}")
    qkv: Part[Tensor] = loader.by_outputs(family.qkv(number), prefix, qkv_sections, hidden_size)
    if tensors.input_multiplier != 1.0:
        qkv = OfScaled(qkv, tensors.input_multiplier)
    norm: Norm[Any]
    if before:
        norm = before[0].norm
    else:
        norm, qkv = fused(family, loader.norm(tensors.norm, prefix, hidden_size, family.norms), qkv)
    output = loader.by_inputs(tensors.output, prefix, hidden_size, features.queries)
    attention = Attention(
        num_heads=features.num_heads,
        num_kv_heads=features.num_kv_heads,
        head_dim=features.head_dim,
        scale=features.head_dim**-0.5 if tensors.scale is None else tensors.scale,
        sliding_window=config.sliding_windows[number],
        cos_sin=cos_sin,
        dtype=loader.cache_dtype,
        k_scale=scales.k,
        v_scale=scales.v,
        q_norm=q_norm,
        k_norm=k_norm,
        v_norm=_no_weight(loader, family, features.head_dim) if tensors.normalizes_values else None,
        norms_all_heads=tensors.norms_all_heads,
        norm_parts=_qk_norm_parts(config.heads[number], config, loader.group) if tensors.norms_all_heads else None,
        norm_eps=family.norms.eps,
        adjacent_pairs=tensors.adjacent_pairs,
        is_gated=tensors.is_gated,
        soft_cap=tensors.soft_cap,
        sinks_H=None if tensors.sinks is None else loader.of_heads(f"{prefix}{tensors.sinks.name}", features.heads),
        deterministic=loader.deterministic,
        values_are_keys=values_are_keys,
        shared_back=_num_attending(family, range(source, number)),
    )
    return Branch(
        norm=norm,
        stateful=SelfAttention(
            qkv=qkv,
            attention=attention,
            output=scaled(output, family.residual_multiplier * tensors.output_multiplier),
        ),
        norm_after=norm_behind_part(config, loader, tensors.norm_after, prefix),
        is_beside=bool(before),
    )


def _num_attending(family: Family, layers: range) -> int:
    """Parts of these layers that keep a state, where all attend."""
    assert not layers or not family.mixers, "keys and values are shared by networks that attend in every layer only"
    return len(layers)


def _no_weight(loader: WeightLoader, family: Family, size: int) -> Tensor:
    """What a norm without a weight multiplies."""
    return torch.ones(size, dtype=torch.float32 if family.norms.rounds_once else loader.dtype, device=loader.device)


def _load_qk_norms(
    config: ModelConfig, loader: WeightLoader, features: RankFeatures, prefix: str, *, has_keys: bool
) -> list[Tensor | None]:
    tensors, norms = config.family.attention, config.family.norms
    of_a_head = Section(features.head_dim, 0, features.head_dim)
    parts = (features.queries, features.keys_or_values) if tensors.norms_all_heads else (of_a_head, of_a_head)
    return [
        None if tensor is None else loader.norm_weight(tensor, prefix, part.num_features, norms, part)
        for tensor, part in zip((tensors.q_norm, tensors.k_norm if has_keys else None), parts, strict=True)
    ]


def _qk_norm_parts(heads: Heads, config: ModelConfig, group: TensorParallelGroup) -> NormParts | None:
    """Of ranks with copies of one key head the first one counts."""
    if group.size == 1:
        return None
    parts = [
        NormPart(range(0, group.size, max(group.size // count, 1)), count * heads.head_dim)
        for count in (config.num_heads, heads.num_kv_heads)
    ]
    return NormParts(group, tuple(parts))
