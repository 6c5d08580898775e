"""A checkpoint's config.json for transformers' modelling code: the values that the runtime needs.

Networks that their class or configuration alone show to be unsupported are refused here, before any weight is read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from inflight.errors import ConfigurationError
from inflight.models.config import read_architecture, read_dtype
from inflight.models.config_file import read_config_file, read_quantization, tell_defaults
from inflight.models.formats.coded import CodedFormat
from inflight.models.formats.dense import DenseFormat
from inflight.models.hf_config import read_hf_config
from inflight.models.transformers_refusals import REFUSED
from inflight.models.weight_formats import choose_weight_format

POSITION_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_target_positions", "seq_length")
"""Names that configurations have for the number of positions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformersConfig:
    """Has those fields of ModelConfig that exist for every network."""

    architecture: str
    vocab_size: int
    hidden_size: int
    """0 = unknown: not every class's configuration says it."""
    max_position_embeddings: int
    max_positions: int
    """Longest sequence that the network's positions support."""
    dtype: torch.dtype
    """Of the checkpoint."""
    weight_format: CodedFormat | DenseFormat
    network_class: Any
    """A class of transformers for causal language models."""
    hf_config: Any
    """transformers' PreTrainedConfig."""

    @classmethod
    def load(cls, checkpoint: str | Path) -> TransformersConfig:
        """Read `checkpoint`/config.json; ConfigurationError says what is missing or not supported."""
        path = Path(checkpoint, "config.json")
        architecture = read_architecture(path)
        if architecture in REFUSED:
            raise ConfigurationError(f"{path}: {architecture} cannot be served: {REFUSED[architecture]}")
        hf_config = read_hf_config(path)
        values = hf_config.to_dict()
        tell_defaults(path, read_config_file(path), values)
        weight_format = _weight_format(path, read_quantization(path, values))
        if hasattr(hf_config, "quantization_config"):
            del hf_config.quantization_config  # transformers would quantise the network itself
        network_class = _network_class(path, architecture, hf_config)
        # Of a network that reads more than text, the part that does; it is served for text alone.
        text_config = hf_config.get_text_config(decoder=True)
        vocab_size = getattr(text_config, "vocab_size", None)
        if not isinstance(vocab_size, int):
            raise ConfigurationError(f"{path} has no vocab_size")
        max_positions = _max_positions(path, text_config)
        return cls(
            architecture=architecture,
            vocab_size=vocab_size,
            hidden_size=int(getattr(text_config, "hidden_size", 0)),
            max_position_embeddings=max_positions,
            max_positions=max_positions,
            dtype=read_dtype(path, hf_config.dtype),
            weight_format=weight_format,
            network_class=network_class,
            hf_config=hf_config,
        )


def _weight_format(path: Path, quantization: Mapping[str, Any]) -> CodedFormat | DenseFormat:
    weight_format = choose_weight_format(path, quantization)
    if not isinstance(weight_format, CodedFormat | DenseFormat):
        raise ConfigurationError(
            f"{path}: quantized checkpoints ({weight_format.quantized}) are not supported with transformers' modelling "
            "code; use the float16, bfloat16 or float32 one"
        )
    return weight_format


def _network_class(path: Path, architecture: str, hf_config: Any) -> Any:
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    found: Any = transformers.AutoModelForCausalLM._model_mapping.get(type(hf_config), None)
    if architecture in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        # Some read the configuration of more than text, or that of their text alone.
        by_name = getattr(transformers, architecture, None)
        found = by_name if isinstance(hf_config, getattr(by_name, "config_class", ())) else found
    if getattr(found, "__name__", "") != architecture:
        raise ConfigurationError(
            f"{path}: {architecture} is not a causal language model of transformers {transformers.__version__}"
        )
    if hf_config.is_encoder_decoder:
        raise ConfigurationError(f"{path}: {architecture} has an encoder; only decoders are supported")
    if found._is_stateful or _recurrent_layers(hf_config.get_text_config(decoder=True)):
        raise ConfigurationError(
            f"{path}: {architecture} keeps a recurrent state, for which this engine has no cache; "
            "only networks whose layers all use attention are supported"
        )
    return found


def _recurrent_layers(text_config: Any) -> bool:
    """Whether transformers' cache of such a network keeps more than what each token has."""
    from transformers import DynamicCache
    from transformers.cache_utils import LinearAttentionCacheLayerMixin

    return any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in DynamicCache(config=text_config).layers)


def _max_positions(path: Path, hf_config: Any) -> int:
    told = (getattr(hf_config, key, None) for key in POSITION_KEYS)
    max_positions = next((value for value in told if isinstance(value, int)), None)
    if max_positions is None:
        raise ConfigurationError(f"{path} does not say for how many positions the network is made")
    return min([max_positions, *_unscaled_positions(hf_config, max_positions)])


def _unscaled_positions(hf_config: Any, max_positions: int) -> Iterator[int]:
    """Positions up to which rope scalings that depend on the longest sequence of a step have no effect.

    Beyond them a token's rotation would depend on the other sequences of its step, and would no longer match that of
    the keys in the cache.
    """
    parameters: Mapping[str, Any] = getattr(hf_config, "rope_parameters", None) or {}
    for rope in (parameters, *parameters.values()):
        if isinstance(rope, Mapping) and rope.get("rope_type") in ("dynamic", "longrope"):
            yield int(rope.get("original_max_position_embeddings") or max_positions)
