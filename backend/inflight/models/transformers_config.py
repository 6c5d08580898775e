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
from inflight.models.weight_formats import choose_weight_format


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformersConfig:
    """Has those fields of ModelConfig that exist for every network."""

    architecture: str
    vocab_size: int
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
        hf_config = read_hf_config(path)
        values = hf_config.to_dict()
        tell_defaults(path, read_config_file(path), values)
        weight_format = _weight_format(path, read_quantization(path, values))
        if hasattr(hf_config, "quantization_config"):
            del hf_config.quantization_config  # transformers would quantise the network itself
        network_class = _network_class(path, architecture, hf_config)
        max_positions = _max_positions(path, hf_config)
        return cls(
            architecture=architecture,
            vocab_size=int(hf_config.vocab_size),
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

    found: Any = transformers.AutoModelForCausalLM._model_mapping.get(type(hf_config), None)
    if getattr(found, "__name__", "") != architecture:
        raise ConfigurationError(
            f"{path}: {architecture} is not a causal language model of transformers {transformers.__version__}"
        )
    if hf_config.is_encoder_decoder:
        raise ConfigurationError(f"{path}: {architecture} has an encoder; only decoders are supported")
    if hf_config.get_text_config() is not hf_config:
        raise ConfigurationError(f"{path}: {architecture} reads more than text; only text models are supported")
    if not found._can_set_attn_implementation():
        raise ConfigurationError(
            f"{path}: the layers of {architecture} do not attend through transformers' attention interface, "
            "through which this engine provides its paged attention"
        )
    if found._is_stateful:
        raise ConfigurationError(
            f"{path}: {architecture} keeps a recurrent state, for which this engine has no cache; "
            "only networks whose layers all use attention are supported"
        )
    return found


def _max_positions(path: Path, hf_config: Any) -> int:
    max_positions = getattr(hf_config, "max_position_embeddings", None)
    if not isinstance(max_positions, int):
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
