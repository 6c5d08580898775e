"""A checkpoint's config.json, read through transformers and checked: the sizes and options of the native decoder.

Knows no weights. Code of the checkpoint is never run. Options that the decoder would silently compute wrongly are
refused.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from inflight.errors import ConfigurationError
from inflight.layers.rotary import FREQUENCIES, RopeConfig
from inflight.models.config_file import (
    ConfigValues,
    NotNative,
    by_layer_type,
    check_values,
    read_config_file,
    read_quantization,
    tell_defaults,
)
from inflight.models.encoder_refusals import refuse_encoder
from inflight.models.families import ENCODERS, FAMILIES, HEADLESS
from inflight.models.families.decoders import with_score_tokens
from inflight.models.family import DescribeFamily, Family
from inflight.models.formats.format import WeightFormat
from inflight.models.hf_config import read_values
from inflight.models.text_parts import TEXT_PARTS, TextPart
from inflight.models.weight_formats import choose_weight_format
from inflight.output_config import Pooled
from inflight.score_tokens import ScoreTokens
from inflight_kernels.moe import MAX_CHOSEN_EXPERTS, MAX_EXPERTS

FULL, SLIDING = "full_attention", "sliding_attention"
"""Types of layers, as `layer_types` names them."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """Of one layer's attention."""

    num_kv_heads: int
    head_dim: int
    """Of a key; where latents are in the place of keys, of all that is kept of a token."""
    rotary_dim: int
    """Elements of each head that are rotated, its first ones; beside latents those of the key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Configuration of one decoder. Sizes are of the whole network, not of one rank's part."""

    architecture: str
    family: Family
    text_part: TextPart | None
    """Of a checkpoint of a text and others; None = it is of a text alone."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    heads: tuple[Heads, ...]
    """Per layer."""
    tie_word_embeddings: bool
    sliding_windows: tuple[int, ...]
    """Per layer: number of last keys that a token attends to, itself included; 0 = all."""
    ropes: tuple[RopeConfig | None, ...]
    """Per layer; None = its queries and keys are not rotated."""
    weight_format: WeightFormat
    max_position_embeddings: int
    max_positions: int
    """Longest sequence that the rotary embedding supports: above max_position_embeddings if rope scaling extends it."""
    dtype: torch.dtype
    """Of the checkpoint."""

    @property
    def pooled(self) -> Pooled:
        """See RequestLimits."""
        if self.family.scores is not None:
            return "scores"
        return "vectors" if self.family.encoder is not None or self.family.is_headless else ""

    @property
    def is_causal(self) -> bool:
        """See RequestLimits."""
        return self.family.encoder is None

    @property
    def has_token_types(self) -> bool:
        """See RequestLimits."""
        return self.family.encoder is not None and self.family.encoder.num_types > 1

    @classmethod
    def load(cls, checkpoint: str | Path, score_tokens: ScoreTokens | None = None) -> ModelConfig:
        """Read `checkpoint`/config.json; ConfigurationError says what is missing or not supported. `score_tokens`: by
        whose logits it scores texts; None = it does as its architecture says."""
        path = Path(checkpoint, "config.json")
        values = read_config_file(path)
        architecture = _architecture(path, values)
        text_part = TEXT_PARTS.get(architecture)
        if text_part is None:
            describe = _find_family(path, architecture)
            check_values(path, values)
        else:
            text = _text_config(path, values)
            describe = _find_family(path, text_part.architecture_of(text.get("model_type")))
            check_values(path, values)
            check_values(path, text)
        given, values = values, read_values(path)
        tell_defaults(path, given, values)
        family = describe(ConfigValues(path, values))
        if score_tokens is not None:
            family = with_score_tokens(path, family, score_tokens, int(values["vocab_size"]))
        weight_format = choose_weight_format(path, read_quantization(path, values))
        _check_experts(path, family)
        windows = _sliding_windows(path, family, values)
        ropes = _ropes(path, family, values, windows)
        max_positions = int(values["max_position_embeddings"])
        if family.positions is not None and family.positions.counts_all:
            max_positions = max(max_positions - family.positions.first, 1)
        return cls(
            architecture=architecture,
            family=family,
            text_part=text_part,
            vocab_size=int(values["vocab_size"]),
            hidden_size=int(values["hidden_size"]),
            intermediate_size=family.mlp.intermediate_size or int(values["intermediate_size"]),
            num_layers=int(values["num_hidden_layers"]),
            num_heads=int(values["num_attention_heads"]),
            heads=_heads_by_layer(path, family, values),
            tie_word_embeddings=bool(values.get("tie_word_embeddings", False)) and not family.has_own_head,
            sliding_windows=windows,
            ropes=ropes,
            weight_format=weight_format,
            max_position_embeddings=max_positions,
            max_positions=_max_positions(ropes, max_positions),
            dtype=read_dtype(path, values.get("dtype") or values.get("torch_dtype")),
        )


def read_architecture(path: Path) -> str:
    """The first entry of `architectures` in the config.json at `path`."""
    return _architecture(path, read_config_file(path))


def _architecture(path: Path, values: Mapping[str, Any]) -> str:
    check_values(path, values, ["architectures"])
    architectures = values.get("architectures") or []
    if not architectures:
        raise ConfigurationError(f"{path} names no architecture, such as {next(iter(FAMILIES))}")
    return str(architectures[0])


def _find_family(path: Path, architecture: str) -> DescribeFamily:
    families = {**FAMILIES, **ENCODERS, **HEADLESS}
    if architecture not in families:
        refuse_encoder(path, architecture, (*ENCODERS, *HEADLESS))
        known = ", ".join(families)
        raise NotNative(f"{path}: this engine has no layers of its own for {architecture}; it has them for {known}")
    return families[architecture]


def _text_config(path: Path, values: Mapping[str, Any]) -> Mapping[str, Any]:
    text = values.get("text_config") or {}
    if not isinstance(text, Mapping):
        raise ConfigurationError(f"{path}: text_config must be an object, got {reprlib.repr(text)}")
    return text


def _check_experts(path: Path, family: Family) -> None:
    experts = family.experts
    if experts is None:
        return
    num_chosen = experts.routing.num_chosen
    if num_chosen > experts.num_experts:
        raise ConfigurationError(
            f"{path}: num_experts_per_tok ({num_chosen}) must be at most the number of experts ({experts.num_experts})"
        )
    if fault := experts.routing.fault(experts.num_experts):
        raise ConfigurationError(f"{path}: {fault}")
    if experts.num_experts > MAX_EXPERTS or num_chosen > MAX_CHOSEN_EXPERTS:
        raise NotNative(
            f"{path}: {num_chosen} of {experts.num_experts} experts for each token are not supported; "
            f"{MAX_CHOSEN_EXPERTS} of {MAX_EXPERTS} are"
        )


def _heads_by_layer(path: Path, family: Family, values: Mapping[str, Any]) -> tuple[Heads, ...]:
    check_values(path, values, ["per_layer_config"])
    of_most, by_layer = _heads(path, family, values), values.get("per_layer_config") or {}
    if by_layer and not family.heads_by_layer:
        raise NotNative(f"{path}: per_layer_config is not supported for this architecture")
    if unknown := {key for each in by_layer.values() for key in each} - {"num_key_value_heads", "head_dim"}:
        raise NotNative(
            f"{path}: per_layer_config has {', '.join(sorted(unknown))}, which no layer may have of its own"
        )
    for each in by_layer.values():
        check_values(path, {**values, **each}, ["num_key_value_heads", "head_dim"])
    heads = [
        _heads(path, family, {**values, **by_layer[str(layer)]}) if str(layer) in by_layer else of_most
        for layer in range(int(values["num_hidden_layers"]))
    ]
    for layer, own in enumerate(heads):
        if own != heads[source := family.key_layer(layer)]:
            raise ConfigurationError(
                f"{path}: layer {layer} attends to the keys of layer {source}, and has other heads by per_layer_config"
            )
    return tuple(heads)


def _heads(path: Path, family: Family, values: Mapping[str, Any]) -> Heads:
    num_heads, hidden_size = int(values["num_attention_heads"]), int(values["hidden_size"])
    if family.attention.latents is not None:
        sizes = family.attention.latents.sizes
        if sizes.rotated % 2 or sizes.rotated < 4:
            raise ConfigurationError(f"{path}: qk_rope_head_dim must be an even number of at least 4")
        return Heads(
            num_kv_heads=num_heads, head_dim=sizes.row, rotary_dim=_rotary_dim(path, family, values, sizes.row)
        )
    num_kv_heads = int(family.num_kv_heads or values.get("num_key_value_heads") or num_heads)
    if num_heads % num_kv_heads:
        raise ConfigurationError(
            f"{path}: num_key_value_heads ({num_kv_heads}) must divide num_attention_heads ({num_heads})"
        )
    head_dim = values.get("head_dim")
    if head_dim is None:
        if hidden_size % num_heads:
            raise ConfigurationError(
                f"{path}: num_attention_heads ({num_heads}) must divide hidden_size ({hidden_size}) without a head_dim"
            )
        head_dim = hidden_size // num_heads
    # The rotary embedding rotates pairs of a head's elements, and yarn scaling needs more than one pair.
    if head_dim % 2 or head_dim < 4:
        raise ConfigurationError(f"{path}: head_dim must be an even number of at least 4, got {head_dim}")
    return Heads(
        num_kv_heads=num_kv_heads,
        head_dim=int(head_dim),
        rotary_dim=_rotary_dim(path, family, values, int(head_dim)),
    )


def _sliding_windows(path: Path, family: Family, values: Mapping[str, Any]) -> tuple[int, ...]:
    num_layers = int(values["num_hidden_layers"])
    window = int(values.get("sliding_window") or 0) if family.window is None else family.window
    if family.windowed_layers == "none":
        return (0,) * num_layers
    if family.windowed_layers == "all":
        return (window,) * num_layers
    return tuple(window if kind == SLIDING else 0 for kind in _layer_types(path, values))


def _layer_types(path: Path, values: Mapping[str, Any]) -> list[str]:
    num_layers, kinds = int(values["num_hidden_layers"]), values.get("layer_types") or []
    unknown = set(kinds) - {FULL, SLIDING}
    if unknown or len(kinds) != num_layers:
        raise ConfigurationError(
            f"{path}: layer_types must name {FULL} or {SLIDING} for each of {num_layers} layers, got {len(kinds)} "
            "entries" + (f" with {', '.join(sorted(unknown))}" if unknown else "")
        )
    return list(kinds)


def _rope_parameters(values: Mapping[str, Any]) -> dict[str, Any]:
    return {**(values.get("rope_scaling") or {}), **(values.get("rope_parameters") or {})}


def _rotary_dim(path: Path, family: Family, values: Mapping[str, Any], head_dim: int) -> int:
    """The number of a head's elements that are rotated."""
    parameters = _rope_parameters(values)
    factor = float(parameters.get("partial_rotary_factor") or values.get("partial_rotary_factor") or 1.0)
    if rope_kind(parameters) == "proportional":
        factor = 1.0  # of the rotated pairs, see RopeConfig
    if factor != 1.0 and not family.partial_rotary:
        raise NotNative(f"{path}: partial_rotary_factor other than 1 is not supported for this architecture")
    if family.attention.latents is not None:
        return family.attention.latents.sizes.rotated
    rotary_dim = family.rotary_dim or int(head_dim * factor)
    if rotary_dim % 2 or not 4 <= rotary_dim <= head_dim:
        if family.rotary_dim is not None:
            raise ConfigurationError(
                f"{path}: rotary_dim must be an even number from 4 to {head_dim}, got {rotary_dim}"
            )
        raise ConfigurationError(
            f"{path}: partial_rotary_factor {factor} must leave an even number, from 4 to {head_dim}, of each head's "
            f"elements to rotate, not {rotary_dim}"
        )
    return rotary_dim


def _ropes(
    path: Path, family: Family, values: Mapping[str, Any], windows: Sequence[int]
) -> tuple[RopeConfig | None, ...]:
    """Of each layer."""
    parameters = _rope_parameters(values)
    of_types = {kind: _rope(path, values, of_type) for kind, of_type in by_layer_type(parameters).items()}
    if of_types:
        kinds = _layer_types(path, values)
        if missing := set(kinds) - of_types.keys():
            raise ConfigurationError(f"{path}: rope_parameters has nothing for layers of type {', '.join(missing)}")
        ropes = [of_types[kind] for kind in kinds]
    else:
        ropes = [_rope(path, values, parameters)] * len(windows)

    def is_rotated(layer: int) -> bool:
        if family.rotated_layers == "windowed":
            return windows[layer] > 0
        return family.rotated_layers == "all" or layer in family.rotated_layers

    return tuple(rope if is_rotated(layer) else None for layer, rope in enumerate(ropes))


def rope_kind(parameters: Mapping[str, Any]) -> str:
    """Under the name that transformers 5 has for it, or the one before."""
    return str(parameters.get("rope_type") or parameters.get("type") or "default")


def _rope(path: Path, values: Mapping[str, Any], parameters: Mapping[str, Any]) -> RopeConfig:
    """From `parameters`: those that transformers 5 calls so, or `rope_theta` and `rope_scaling` of before."""
    kind = rope_kind(parameters)
    if kind not in FREQUENCIES:
        raise NotNative(f"{path}: rope type {kind!r} is not supported; these are: {', '.join(FREQUENCIES)}")
    original = parameters.get("original_max_position_embeddings") or values["max_position_embeddings"]
    if kind == "dynamic":
        original = values["max_position_embeddings"]
    optional = {
        key: float(parameters[key])
        for key in ("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
        if parameters.get(key) is not None
    }
    if kind == "proportional":
        optional["rotated_part"] = part = float(parameters.get("partial_rotary_factor") or 1.0)
        if part > 1:
            raise ConfigurationError(f"{path}: partial_rotary_factor must be at most 1, got {part}")
    attention_factor = parameters.get("attention_factor")
    factor = parameters.get("factor")
    if factor is None:
        if kind in ("linear", "dynamic", "llama3"):
            raise ConfigurationError(f"{path}: rope type {kind} needs a factor")
        factor = values["max_position_embeddings"] / original
    rope = RopeConfig(
        kind=kind,
        theta=float(parameters.get("rope_theta") or values.get("rope_theta") or 10_000.0),
        factor=float(factor),
        original_max_positions=int(original),
        truncate=bool(parameters.get("truncate", True)),
        attention_factor=None if attention_factor is None else float(attention_factor),
        **optional,
    )
    if kind == "llama3" and rope.low_freq_factor >= rope.high_freq_factor:
        raise ConfigurationError(f"{path}: high_freq_factor must be more than low_freq_factor")
    return rope


def _max_positions(ropes: Iterable[RopeConfig | None], max_position_embeddings: int) -> int:
    stretched = [
        int(rope.factor * rope.original_max_positions) if rope.kind != "default" else 0 for rope in ropes if rope
    ]
    return max(max_position_embeddings, min(stretched, default=0))


def read_dtype(path: Path, value: object) -> torch.dtype:
    """The checkpoint's dtype as config.json or transformers spells it; float32 if it names none."""
    name = str(value or "float32").removeprefix("torch.")
    if name not in DTYPES:
        raise ConfigurationError(f"{path}: dtype {name} is not supported; these are: {', '.join(DTYPES)}")
    return DTYPES[name]
