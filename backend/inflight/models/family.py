"""What a family's file says about its network: the tensors of a checkpoint, how each is split over the ranks, options.

Only descriptions; decoder_loading.py composes the network from them. Names of tensors are given without the ending
`.weight` or `.bias`; those within a layer are relative to it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from inflight.models.config_file import ConfigValues
from inflight.models.mixer_tensors import MixerTensors
from inflight.models.split_tensors import NotSplit, SplitByInputs, SplitByOutputs, SplitByVocabulary
from inflight.output_config import Pooling
from inflight.score_tokens import ScoreTokens
from inflight_kernels import Activation
from inflight_kernels.moe.routing import Routing


@dataclass(frozen=True, slots=True)
class LearnedPositions:
    """A table with a row for each position, which is added to the embedding of a token there. Every rank holds it."""

    name: str
    first: int = 0
    """Row of position 0."""
    counts_all: bool = False
    """Whether max_position_embeddings counts the rows before it, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NormStyle:
    """How a network normalises: all of it, heads too."""

    eps: float
    centers: bool = False
    """Whether the mean is subtracted first: LayerNorm."""
    bias: bool = False
    """Of LayerNorm."""
    adds_one: bool = False
    """Whether what is multiplied is the checkpoint's weight plus 1."""
    rounds_once: bool = False
    """Whether the product with the weight is rounded and not, before it, what is multiplied."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentSizes:
    """Of attention to latents: elements of each head's query that are not rotated, those that are, as many as of the
    key beside a latent, those of a latent, and those of a head's value."""

    plain: int
    rotated: int
    latent: int
    value: int

    @property
    def row(self) -> int:
        """What is kept of a token."""
        return self.latent + self.rotated


@dataclass(frozen=True, slots=True, kw_only=True)
class NarrowQueries:
    """What queries are made of: `size` features, after a norm."""

    size: int
    norm: NotSplit
    queries: SplitByOutputs
    """Makes queries of them: of each head the part that is not rotated, then the one that is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentTensors:
    """Of attention to latents, which all heads share: DeepSeek's."""

    sizes: LatentSizes
    norm: NotSplit
    """Of latents."""
    keys_and_values: str
    """Makes of a latent each head's key, and behind it its value."""
    narrow_queries: NarrowQueries | None
    """None = queries are made of what the branch reads."""
    norms: NormStyle
    """Of latents and narrow queries."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionTensors:
    """One branch of a layer."""

    norm: NotSplit | None
    """Of what it reads; None = it reads the residual stream as it is."""
    qkv: SplitByOutputs
    """Sections: queries, gates if `is_gated`, keys, values; with latents queries, as NarrowQueries has them, or what
    those are made of, and then latents with the key beside each."""
    is_gated: bool = False
    """Whether what the heads compute is multiplied by the sigmoid of gates, one for each of its elements."""
    latents: LatentTensors | None = None
    """In the place of keys and values; then what follows is as in this list, but for norms of heads, scale, sinks and
    caps, which there are not."""
    q_norm: NotSplit | None = None
    """Norm of the queries before their rotation."""
    k_norm: NotSplit | None = None
    normalizes_values: bool = False
    """Whether each head's values have a norm too, without a weight."""
    norms_all_heads: bool = False
    """Whether these are norms of all heads together; else of each by itself."""
    adjacent_pairs: bool = False
    """Which elements of a head are rotated together, see `rope_and_kv_write`."""
    output: SplitByInputs
    norm_after: NotSplit | None = None
    """Of what it adds to the residual stream."""
    scale: float | None = None
    """Factor of the scores; None: the reciprocal of the square root of the head's size."""
    sinks: NotSplit | None = None
    """A logit for each head in the softmax of its scores, which has no value. This is a tensor's whole name."""
    soft_cap: float = 0.0
    """Most that a score can be, approached by tanh; 0 = any."""
    input_multiplier: float = 1.0
    """Of what the branch reads."""
    output_multiplier: float = 1.0

    @property
    def module(self) -> str:
        """Name of the module that these are part of: scales of its KV cache are called by it."""
        return self.output.name.rpartition(".")[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class MLPTensors:
    """The other branch of a layer."""

    norm: NotSplit | None
    """As of attention; in parallel to it None = that of attention."""
    gate_up: SplitByOutputs
    """Sections: gate, up; only up where there is no gate."""
    down: SplitByInputs
    is_gated: bool = True
    intermediate_size: int | None = None
    """Features of a section; None = as config.json says under that name."""
    double_layers: frozenset[int] = frozenset()
    """Numbers of the layers where these are twice as many."""
    norm_after: NotSplit | None = None
    activation: Activation = Activation.SILU
    gate_multiplier: float = 1.0
    output_multiplier: float = 1.0
    respelt: tuple[str, str] | None = None
    """What the names begin with, and what they begin with instead in checkpoints that transformers has saved."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StackedExperts:
    """All experts of a layer in two tensors, named with their endings: gates and then ups (E, 2I, D), or without gates
    ups alone, and (E, D, I)."""

    router: str
    gate_up: str
    down: str
    is_transposed: bool = False
    """(E, D, 2I), the columns of gate and up in turn, and (E, I, D): gpt-oss. In MXFP4 `<name>_blocks` (E, 2I, D / 32,
    16), the rows of gate and up in turn, and (E, D, I / 32, 16), with `<name>_scales`, a number for each block."""


STACKED_EXPERTS = StackedExperts(router="mlp.gate", gate_up="mlp.experts.gate_up_proj", down="mlp.experts.down_proj")
"""As transformers' `save_pretrained` writes them with `save_original_format=False`, whatever most families publish."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedExpertTensors:
    """The feed-forward that computes every token beside the chosen experts."""

    gate_up: SplitByOutputs
    """Sections: gate, up; only up where experts have no gates."""
    down: SplitByInputs
    intermediate_size: int
    gate: NotSplit | None = None
    """(1, D): its sigmoid is a token's factor of what they compute."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NarrowExperts:
    """What chosen experts read and write in place of the hidden features: fewer, `size` of them."""

    size: int
    inputs: SplitByOutputs
    """Makes them of the hidden features; every rank has it whole, as the next."""
    output: SplitByInputs
    """Makes hidden features of their sum."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BesideMLP:
    """Of experts that are beside the layer's MLP and read the same stream, with norms around both, and behind their
    sum the one that others have behind their MLP."""

    norm: NotSplit
    """Of what experts read."""
    norm_after: NotSplit
    """Of what they compute."""
    mlp_norm_after: NotSplit
    router_scale: str
    """(D,), this tensor's whole name: the weight of a norm of what the router reads, times the square root of D."""
    factors: str
    """(E,), likewise: of the weight of each expert."""


@dataclass(frozen=True, slots=True)
class ChoiceBias:
    """What is added to a router's scores for the choice alone."""

    names: tuple[str, ...]
    """Of its tensor, whole, of which a checkpoint has one."""
    is_row: bool = False
    """(1, E) and not (E,)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertTensors:
    """What the layers with a mixture of experts have between the norms that others have around their MLP. Names are
    those of the published checkpoints."""

    layers: frozenset[int]
    """Numbers of the layers that have one."""
    num_experts: int
    routing: Routing
    intermediate_size: int
    """Of each expert."""
    router: NotSplit
    router_bias: bool = False
    choice_bias: ChoiceBias | None = None
    experts: str = "mlp.experts"
    """Name of the list of experts: the tensors of expert 3 begin with its name and `.3.`."""
    gate: str | None = "gate_proj"
    """None = experts have no gate, nor have shared ones."""
    up: str = "up_proj"
    down: str = "down_proj"
    has_biases: bool = False
    """Of each of these. Stacked they are `<gate_up>_bias` (E, 2I), in the order of `gate_up`, and `<down>_bias`
    (E, D)."""
    stacked: tuple[StackedExperts, ...] = (STACKED_EXPERTS,)
    """Other layouts that a checkpoint may have."""
    activation: Activation = Activation.SILU
    shared: SharedExpertTensors | None = None
    narrow: NarrowExperts | None = None
    beside: BesideMLP | None = None
    """None = in the place of the MLP."""

    @property
    def first_products(self) -> tuple[str, ...]:
        """Gate and up, or up alone."""
        return (self.up,) if self.gate is None else (self.gate, self.up)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerInputTensors:
    """What layers read of each token beside the residual stream, see LayerInputs. Every rank has them whole, but for
    the table."""

    size: int
    """Features of each layer."""
    vocab_size: int
    """Rows of the table."""
    table: SplitByVocabulary
    projection: SplitByOutputs
    norm: NotSplit
    gate: SplitByOutputs
    """Within a layer, as what follows."""
    activation: Activation
    output: SplitByInputs
    norm_after: NotSplit
    """Of what is added to the residual stream."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreTensors:
    """What makes scores of a text's hidden states. Every rank has it whole."""

    num_labels: int
    pooling: Pooling
    """Which hidden state it reads."""
    dense: SplitByOutputs | None = None
    """(D, D), before `output`."""
    activation: Activation | None = None
    """Behind `dense`; None = tanh."""
    norm: NotSplit | None = None
    """Behind that."""
    output: SplitByOutputs | None
    """(labels, D); None = the score is made of logits of `tokens`."""
    tokens: ScoreTokens | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DistanceBias:
    """What is added to scores by the distance of two tokens: a number for each head and bucket of distances (T5)."""

    name: str
    """(buckets, heads)."""
    num_buckets: int
    max_distance: int
    """From which on all are in one bucket."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceTensors:
    """A table of what stands for the distance of two tokens, of which all layers make keys and queries (DeBERTa)."""

    name: str
    """(2 * span, D)."""
    norm: NotSplit | None
    num_buckets: int
    """Of distances in one direction; 0 = each has its own."""
    max_distance: int
    reads_keys: bool
    reads_queries: bool

    @property
    def span(self) -> int:
        """Rows for one direction."""
        return self.num_buckets or self.max_distance


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderTensors:
    """What an encoder has in the place of a head. In its layers each token sees those behind it, too."""

    embedding_norm: NotSplit | None
    """Of the sum of embeddings; None = there is none."""
    types: NotSplit | None = None
    """Embeddings of the first text and the second one of a pair, (num_types, D)."""
    num_types: int = 0
    normalizes_sums: bool = True
    """Whether the norms of attention and MLP are of the sums behind them; else of what these read, and then the first
    layer has none before attention where embeddings have one."""
    distance_bias: DistanceBias | None = None
    places: PlaceTensors | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One architecture's network, for one checkpoint's config.json."""

    embedding: SplitByVocabulary
    layers: str
    """Name of the list of layers: the tensors of layer 3 begin with its name and `.3.`."""
    norms: NormStyle
    attention: AttentionTensors
    mlp: MLPTensors
    """Of the layers without experts; its norms of all."""
    norm: NotSplit | None
    """None = the last layer's are the last, as in encoders that normalise sums."""
    head: SplitByVocabulary
    """Not read where the checkpoint ties it to the embedding, and in encoders."""
    has_own_head: bool = False
    """Whether `tie_word_embeddings` counts for nothing."""

    num_kv_heads: int | None = None
    """None = as config.json says."""
    heads_by_layer: bool = False
    """Whether `per_layer_config` is honoured: layers with key/value heads of another number or size than the others."""
    key_layers: tuple[int, ...] = ()
    """Of each layer the one whose keys and values it attends to: itself, or an earlier one. () = all have their own."""
    layers_without_values: frozenset[int] = frozenset()
    """Numbers of the layers whose values are what keys are before their norm and rotation."""
    is_parallel: bool = False
    """Whether both branches of a layer read the same stream."""
    mixers: tuple[MixerTensors, ...] = ()
    """Of layers without attention."""
    attends_beside_mixers: bool = False
    """Whether layers with a mixer attend too, beside it: both read what the norm before attention gives."""
    mixing_layers: frozenset[int] | None = None
    """Numbers of the layers that attend, or have such a mixer; None = all."""
    feed_forward_layers: frozenset[int] | None = None
    """Numbers of the layers with a feed-forward or experts; None = all."""
    experts: ExpertTensors | None = None
    encoder: EncoderTensors | None = None
    """None = a decoder."""
    scores: ScoreTensors | None = None
    is_headless: bool = False
    """A decoder that gives hidden states alone."""
    layer_inputs: LayerInputTensors | None = None
    layer_scale: str | None = None
    """(1,), within a layer this tensor's whole name: factor of the residual stream behind it."""
    positions: LearnedPositions | None = None
    num_extra_layers: int = 0
    """Layers behind the last one, which predict further tokens; they are not read."""
    unread: tuple[str, ...] = ()
    """Beginnings of the names of other tensors that are not."""
    windowed_layers: Literal["none", "all", "layer_types"] = "none"
    """Layers that attend to the last `sliding_window` tokens only: none, all, or those that `layer_types` names."""
    window: int | None = None
    """Of an encoder's layers in the place of `sliding_window`: tokens before and behind each that it sees."""
    rotated_layers: Literal["all", "windowed"] | frozenset[int] = "all"
    """Layers whose queries and keys are rotated by their positions: all, those with a window, or of these numbers."""
    partial_rotary: bool = False
    """Whether `partial_rotary_factor` is honoured: the first part of each head is rotated, the rest is not."""
    rotary_dim: int | None = None
    """Elements of each head that are rotated; None = as that factor says."""
    embedding_multiplier: float = 1.0
    """Of what the first layer reads: embeddings of tokens, and those that requests bring."""
    token_multiplier: float = 1.0
    """Of embeddings of tokens alone."""
    rounds_token_multiplier: bool = True
    """Whether it is rounded to the type of the activations."""
    residual_multiplier: float = 1.0
    """Of both branches' outputs before they are added to the residual stream."""
    logits_multiplier: float = 1.0
    logits_soft_cap: float = 0.0
    """Most that a logit can be, approached by tanh; 0 = any."""

    def mixer_of(self, layer: int) -> MixerTensors | None:
        """None = it attends alone, if it mixes tokens at all."""
        return next((mixer for mixer in self.mixers if layer in mixer.layers), None)

    def attends(self, layer: int) -> bool:
        return self.mixes(layer) and (self.attends_beside_mixers or self.mixer_of(layer) is None)

    def mixes(self, layer: int) -> bool:
        return self.mixing_layers is None or layer in self.mixing_layers

    def feeds_forward(self, layer: int) -> bool:
        return self.feed_forward_layers is None or layer in self.feed_forward_layers

    def key_layer(self, layer: int) -> int:
        """The one whose keys and values it attends to."""
        return self.key_layers[layer] if self.key_layers else layer

    def qkv(self, layer: int) -> SplitByOutputs:
        """What a layer has of `attention.qkv`."""
        qkv = self.attention.qkv
        if self.key_layer(layer) != layer:
            return replace(qkv, names=qkv.names[:1])
        return replace(qkv, names=qkv.names[:-1]) if layer in self.layers_without_values else qkv


DescribeFamily = Callable[[ConfigValues], Family]
"""What a family's file defines: from the options in a checkpoint's config.json to the description of its network."""


def without_first_name(family: Family) -> Family:
    """The same with names as a checkpoint of the network without its head has them: `layers` for `model.layers`."""
    return with_body_names(family, lambda name: name.partition(".")[2] or name)


def with_body_names(family: Family, rename: Callable[[str], str]) -> Family:
    """The same with other names of all but the head."""
    inputs = family.layer_inputs
    if inputs is not None:
        inputs = replace(
            inputs,
            table=replace(inputs.table, name=rename(inputs.table.name)),
            projection=replace(inputs.projection, names=tuple(map(rename, inputs.projection.names))),
            norm=replace(inputs.norm, name=rename(inputs.norm.name)),
        )
    encoder = family.encoder
    if encoder is not None:
        bias, places = encoder.distance_bias, encoder.places
        encoder = replace(
            encoder,
            embedding_norm=encoder.embedding_norm
            and replace(encoder.embedding_norm, name=rename(encoder.embedding_norm.name)),
            types=encoder.types and replace(encoder.types, name=rename(encoder.types.name)),
            distance_bias=bias and replace(bias, name=rename(bias.name)),
            places=places
            and replace(
                places,
                name=rename(places.name),
                norm=places.norm and replace(places.norm, name=rename(places.norm.name)),
            ),
        )
    return replace(
        family,
        encoder=encoder,
        embedding=replace(family.embedding, name=rename(family.embedding.name)),
        layer_inputs=inputs,
        positions=family.positions and replace(family.positions, name=rename(family.positions.name)),
        layers=rename(family.layers),
        norm=family.norm and replace(family.norm, name=rename(family.norm.name)),
    )
