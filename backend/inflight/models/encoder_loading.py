"""Loads one rank's part of an encoder, composed of the parts that its family describes, as decoder_loading.py does.

A network that normalises sums is one whose norms stand one branch later: what is behind a branch is what the next one
begins with, and the residual stream from there on (StreamNorm).

Legend: D hidden size, H query heads of this rank, P positions.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from inflight.layers.decoder_layer import Branch, DecoderLayer
from inflight.layers.disentangled_attention import DisentangledAttention
from inflight.layers.encoder_attention import EncoderAttention
from inflight.layers.encoder_embedding import EncoderEmbedding
from inflight.layers.norm import LayerNorm, NoNorm, Norm, StreamNorm
from inflight.layers.rotary import cos_sin_table
from inflight.models.config import ModelConfig
from inflight.models.decoder import Decoder
from inflight.models.decoder_loading import NOT_WEIGHTS, features_of_rank, named_as_in
from inflight.models.family import DistanceBias, EncoderTensors, PlaceTensors
from inflight.models.feed_forward_loading import load_mlp
from inflight.models.score_loading import load_score_head
from inflight.models.split_tensors import NotSplit
from inflight.models.weights import WeightLoader

COMPUTED = (*NOT_WEIGHTS, "embeddings.position_ids", "embeddings.token_type_ids")
"""Endings of the names of tensors that are not weights."""


def load_encoder(config: ModelConfig, loader: WeightLoader, num_positions: int) -> Decoder:
    """Read this rank's part; `num_positions`: of the longest text to be computed. Raises ConfigurationError if the
    checkpoint's tensors are not exactly those that `config` requires."""
    config = named_as_in(loader, config)
    family, size = config.family, config.hidden_size
    assert family.encoder is not None, "a decoder has its own loader"
    embedding = _load_embedding(config, family.encoder, loader, num_positions)
    bias_HP = None
    if family.encoder.distance_bias is not None:
        bias_HP = _load_bias(config, family.encoder.distance_bias, loader, num_positions)
    places_SD = torch.empty(0)
    if (places := family.encoder.places) is not None:
        places_SD = loader.table(NotSplit(places.name), 2 * places.span, size)
    layers = list[DecoderLayer]()
    behind: Norm[Any] = NoNorm()
    for number in range(config.num_layers):
        prefix = f"{family.layers}.{number}."
        attention: EncoderAttention | DisentangledAttention
        if family.encoder.places is None:
            attention = _load_attention(config, loader, num_positions, number, bias_HP)
        else:
            attention = _load_disentangled(config, family.encoder.places, loader, num_positions, number, places_SD)
        mlp = load_mlp(config, loader, family.mlp, number, prefix)
        reads_norm = family.encoder.normalizes_sums or number > 0 or family.encoder.embedding_norm is None
        tensors = (family.attention.norm if reads_norm else None, family.mlp.norm)
        norms: list[Norm[Any]] = [loader.norm(each, prefix, size, family.norms) for each in tensors]
        before, between = behind, norms[1]
        if family.encoder.normalizes_sums:
            between, behind = StreamNorm(norms[0]), StreamNorm(norms[1])
        else:
            before = norms[0]
        layers.append(DecoderLayer(branches=[Branch(norm=before, part=attention), Branch(norm=between, part=mlp)]))
    if family.norm is not None:
        behind = loader.norm(family.norm, "", size, family.norms)
    head = None if family.scores is None else load_score_head(config, family.scores, loader)
    loader.checkpoint.refuse_leftovers(COMPUTED, family.unread)
    return Decoder(embedding=embedding, layers=layers, norm=behind, head=head, hidden_size=size, dtype=loader.dtype)


def _load_embedding(
    config: ModelConfig, encoder: EncoderTensors, loader: WeightLoader, num_positions: int
) -> EncoderEmbedding:
    family, size = config.family, config.hidden_size
    tokens = loader.by_vocabulary(family.embedding, config.vocab_size, size)
    positions_SD = types_YD = None
    if family.positions is not None:
        positions_SD = loader.positions(family.positions, config.max_position_embeddings, num_positions, size)
    if encoder.types is not None:
        types_YD = loader.table(encoder.types, encoder.num_types, size)
    norm = loader.norm(encoder.embedding_norm, "", size, family.norms)
    return EncoderEmbedding(tokens=tokens, positions_SD=positions_SD, types_YD=types_YD, norm=norm)


def _load_attention(
    config: ModelConfig, loader: WeightLoader, num_positions: int, number: int, bias_HP: Tensor | None
) -> EncoderAttention:
    tensors, prefix = config.family.attention, f"{config.family.layers}.{number}."
    features = features_of_rank(config, loader, number)
    sections = (features.queries, features.keys_or_values, features.keys_or_values)
    rope, cos_sin = config.ropes[number], None
    if rope is not None:
        cos_sin = cos_sin_table(rope, config.heads[number].rotary_dim, num_positions).to(loader.device)
    return EncoderAttention(
        qkv=loader.by_outputs(tensors.qkv, prefix, sections, config.hidden_size),
        output=loader.by_inputs(tensors.output, prefix, config.hidden_size, features.queries),
        num_heads=features.num_heads,
        head_dim=features.head_dim,
        scale=features.head_dim**-0.5,
        window=config.sliding_windows[number],
        cos_sin=cos_sin,
        bias_HP=bias_HP,
    )


def _load_disentangled(
    config: ModelConfig,
    places: PlaceTensors,
    loader: WeightLoader,
    num_positions: int,
    number: int,
    places_SD: Tensor,
) -> DisentangledAttention:
    tensors, prefix = config.family.attention, f"{config.family.layers}.{number}."
    features = features_of_rank(config, loader, number)
    norm = None if places.norm is None else loader.norm(places.norm, "", config.hidden_size, config.family.norms)
    assert norm is None or isinstance(norm, LayerNorm), "tables have no other"
    distances_P = torch.arange(1 - num_positions, num_positions)
    return DisentangledAttention(
        qkv=loader.by_outputs(tensors.qkv, prefix, (features.queries,) * 3, config.hidden_size),
        output=loader.by_inputs(tensors.output, prefix, config.hidden_size, features.queries),
        num_heads=features.num_heads,
        head_dim=features.head_dim,
        places_SD=places_SD,
        norm=norm,
        buckets_P=_signed_buckets(distances_P, places).to(loader.device),
        reads_keys=places.reads_keys,
        reads_queries=places.reads_queries,
    )


def _signed_buckets(distances_P: Tensor, places: PlaceTensors) -> Tensor:
    """Half of them for small distances, one by one, the others by the logarithm (He et al. 2021,
    https://arxiv.org/abs/2111.09543, appendix A.5)."""
    if not places.num_buckets:
        return distances_P
    exact = places.num_buckets // 2
    far_P = distances_P.abs().clamp(min=exact).float()
    part_P = torch.log(far_P / exact) / torch.log(torch.tensor((places.max_distance - 1) / exact))
    large_P = (torch.ceil(part_P * (exact - 1)) + exact).long() * distances_P.sign()
    return torch.where(distances_P.abs() <= exact, distances_P, large_P)


def _load_bias(config: ModelConfig, tensor: DistanceBias, loader: WeightLoader, num_positions: int) -> Tensor:
    """float32 (H, 2P - 1), by the distance of a key from its query, from 1 - P to P - 1."""
    features = features_of_rank(config, loader, 0)
    shape = (tensor.num_buckets, config.num_heads)
    table_UH = torch.empty(shape, dtype=torch.float32, device=loader.device)
    loader.checkpoint.copy_into(table_UH, f"{tensor.name}.weight", shape)
    buckets_P = _buckets(torch.arange(1 - num_positions, num_positions), tensor.num_buckets, tensor.max_distance)
    own = slice(features.heads.start, features.heads.start + features.heads.size)
    return table_UH[buckets_P.to(loader.device)].mT[own].contiguous()


def _buckets(distances_P: Tensor, num_buckets: int, max_distance: int) -> Tensor:
    """Of keys behind the query those of the second half: small distances one by one, larger ones by their logarithm
    (Raffel et al. 2020, https://arxiv.org/abs/1910.10683, section 2.1)."""
    half, exact = num_buckets // 2, num_buckets // 4
    far_P = distances_P.abs()
    logarithm_P = torch.log(far_P.clamp(min=1).float() / exact) / math.log(max_distance / exact)
    large_P = (exact + (logarithm_P * (half - exact)).long()).clamp(max=half - 1)
    return torch.where(far_P < exact, far_P, large_P) + half * (distances_P > 0)
