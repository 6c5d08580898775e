"""The config.json that transformers would have for a GGUF file. What the engine would compute otherwise is refused."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

from inflight.errors import ConfigurationError
from inflight.gguf.architecture import Architecture
from inflight.gguf.architectures import ARCHITECTURE, find_architecture
from inflight.gguf.file import GgufFile
from inflight.gguf.rotary import LATENT_KEYS as LATENT_ROPE_KEYS
from inflight.gguf.rotary import SUPPORTED_KEYS as ROPE_KEYS
from inflight.gguf.rotary import rope_parameters
from inflight.gguf.tensor_types import BF16, F16, F32, FLOATS, NOT_READ, TensorType
from inflight.gguf.tensors import EMBEDDING, named_tensors, num_computed_layers

METHOD = "gguf"
"""quant_method of quantization_config, where a weight is quantised, or has not the shape that it has elsewhere."""
DTYPES = {F32.name: "float32", F16.name: "float16", BF16.name: "bfloat16"}
QUANTIZED_DTYPE = "bfloat16"
"""Of activations where weights are quantised: most such models were trained in it, and some overflow float16."""
SUPPORTED_KEYS = frozenset(
    {
        "vocab_size",
        "context_length",
        "embedding_length",
        "block_count",
        "nextn_predict_layers",
        "feed_forward_length",
        "tensor_data_layout",
        "attention.head_count",
        "attention.head_count_kv",
        "attention.key_length",
        "attention.value_length",
        "attention.sliding_window",
        "attention.sliding_window_pattern",
        *ROPE_KEYS,
    }
)
"""Of all architectures, below their names."""
FULL, SLIDING = "full_attention", "sliding_attention"
"""What config.json calls layers without and with a window."""


def config_of(file: GgufFile) -> dict[str, Any]:
    """Without the ids of special tokens. Raises ConfigurationError."""
    architecture = find_architecture(file.metadata)
    prefix = file.metadata.text(ARCHITECTURE)
    _refuse_unknown_keys(file, architecture, prefix)
    _refuse_unread_types(file)
    tensors = named_tensors(file)
    embedding = next((tensor for tensor in tensors.values() if tensor.info.name == EMBEDDING), None)
    if embedding is None:
        raise ConfigurationError(f"{file.path} has no tensor {EMBEDDING}: it is not a whole model")
    whole = file.metadata.whole
    num_heads = file.metadata.whole_of_all(f"{prefix}.attention.head_count")
    hidden_size = whole(f"{prefix}.embedding_length")
    latents = _latents(file, prefix) if architecture.attends_to_latents else {}
    head_dim = latents.get("head_dim") or _head_dim(file, prefix, hidden_size, num_heads)
    rotary_dim = whole(f"{prefix}.rope.dimension_count", head_dim)
    num_layers = num_computed_layers(file.metadata)
    windows = _windows(file, architecture, prefix, num_layers)
    own: Mapping[str, Any] = {}
    if architecture.own_values is not None:
        kinds = windows.get("layer_types", [FULL] * num_layers)
        own = architecture.own_values(file, prefix, [kind == SLIDING for kind in kinds])
    inner_names = {found[1] for name in tensors if (found := re.fullmatch(rf"{architecture.layers}\.\d+\.(.+)", name))}
    values: dict[str, Any] = {
        "architectures": [architecture.network],
        "model_type": architecture.model_type,
        "dtype": _dtype(file),
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden_size,
        "intermediate_size": own.get("intermediate_size") or _intermediate_size(file, prefix),
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": own.get("num_key_value_heads")
        or file.metadata.whole_of_all(f"{prefix}.attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "max_position_embeddings": whole(f"{prefix}.context_length"),
        "hidden_act": "silu",
        "tie_word_embeddings": f"{architecture.top_names['output']}.weight" not in tensors,
        "rope_parameters": rope_parameters(file, architecture, prefix, rotary_dim),
        **latents,
        **architecture.defaults,
        **_named_options(file, architecture, prefix),
        **{flag: name in inner_names for flag, name in architecture.flags.items()},
        **{key: _kinds(file, kinds, num_layers) for key, kinds in architecture.kinds.items()},
        **windows,
        **architecture.values,
        **own,
    }
    if architecture.has_query_scalar:
        is_of_hidden = num_layers == architecture.scalar_of_hidden
        values["query_pre_attn_scalar"] = hidden_size // num_heads if is_of_hidden else head_dim
    if rotary_dim != head_dim:
        if not architecture.rotates_parts:
            raise ConfigurationError(
                f"{file.path}: {prefix}.rope.dimension_count ({rotary_dim}) must be the size of a head ({head_dim})"
            )
        values["rope_parameters"]["partial_rotary_factor"] = rotary_dim / head_dim
    if architecture.has_turned_matrices or any(info.type not in FLOATS for info in file.tensors.values()):
        values["quantization_config"] = {"quant_method": METHOD}
    return values


def _refuse_unknown_keys(file: GgufFile, architecture: Architecture, prefix: str) -> None:
    neutral = architecture.neutral_values
    supported = SUPPORTED_KEYS | architecture.known_keys | neutral.keys()
    if architecture.attends_to_latents:
        supported |= {"attention.key_length_mla", "attention.value_length_mla", *LATENT_ROPE_KEYS}
    unknown = [key for key in file.metadata.keys_below(f"{prefix}.") if key.removeprefix(f"{prefix}.") not in supported]
    if unknown:
        raise ConfigurationError(
            f"{file.path}: {', '.join(sorted(unknown)[:3])} may change what the network computes, and is not supported"
        )
    for name, value in neutral.items():
        key = f"{prefix}.{name}"
        if key in file.metadata and file.metadata.scalar(key) != value:
            raise ConfigurationError(
                f"{file.path}: {key} must be {json.dumps(value)}, got {json.dumps(file.metadata.scalar(key))}"
            )


def _named_options(file: GgufFile, architecture: Architecture, prefix: str) -> dict[str, Any]:
    """Values that the file has under names of its own."""
    given = {key: name for key, name in architecture.optional_keys.items() if f"{prefix}.{key}" in file.metadata}
    named = {**architecture.needed_keys, **given}
    return {
        **{name: file.metadata.scalar(f"{prefix}.{key}") for key, name in named.items()},
        **{name: _quotient(file, prefix, *keys) for name, keys in architecture.quotients.items()},
    }


def _quotient(file: GgufFile, prefix: str, dividend: str, divisor: str) -> int:
    sizes = [file.metadata.whole(f"{prefix}.{key}") for key in (dividend, divisor)]
    if min(sizes) < 1 or sizes[0] % sizes[1]:
        raise ConfigurationError(
            f"{file.path}: {prefix}.{divisor} ({sizes[1]}) must divide {prefix}.{dividend} ({sizes[0]})"
        )
    return sizes[0] // sizes[1]


def _kinds(file: GgufFile, kinds: Mapping[str, str], num_layers: int) -> list[str]:
    """Of each layer, after the first of these tensors that it has."""
    found = []
    for layer in range(num_layers):
        names = (kind for stem, kind in kinds.items() if f"blk.{layer}.{stem}.weight" in file.tensors)
        kind = next(names, None)
        if kind is None:
            raise ConfigurationError(f"{file.path}: layer {layer} has none of the tensors {', '.join(kinds)}")
        found.append(kind)
    return found


def _intermediate_size(file: GgufFile, prefix: str) -> int:
    """Of experts where no layer has another feed-forward."""
    of_experts = f"{prefix}.expert_feed_forward_length"
    default = file.metadata.whole(of_experts) if of_experts in file.metadata else None
    return file.metadata.whole_of_all(f"{prefix}.feed_forward_length", default)


def _latents(file: GgufFile, prefix: str) -> dict[str, Any]:
    """Sizes of attention to latents. Files that have one matrix for keys and values of all heads say a head's sizes
    where others say a latent's."""
    rotated = file.metadata.whole(f"{prefix}.rope.dimension_count")
    of_key, of_value = (
        file.metadata.whole(f"{prefix}.attention.{name}_length_mla")
        if f"{prefix}.attention.{name}_length_mla" in file.metadata
        else file.metadata.whole(f"{prefix}.attention.{name}_length")
        for name in ("key", "value")
    )
    return {
        "num_key_value_heads": file.metadata.whole_of_all(f"{prefix}.attention.head_count"),
        "head_dim": rotated,
        "qk_nope_head_dim": of_key - rotated,
        "qk_rope_head_dim": rotated,
        "v_head_dim": of_value,
    }


def _refuse_unread_types(file: GgufFile) -> None:
    for info in file.tensors.values():
        if info.type.name in NOT_READ:
            raise ConfigurationError(
                f"{file.path}: tensor {info.name} is of type {info.type.name}, of which no weights are read; use "
                "another quantisation of the model, such as Q8_0 or Q4_K_M"
            )


def _head_dim(file: GgufFile, prefix: str, hidden_size: int, num_heads: int) -> int:
    if num_heads < 1 or (hidden_size % num_heads and f"{prefix}.attention.key_length" not in file.metadata):
        raise ConfigurationError(
            f"{file.path}: {prefix}.attention.head_count ({num_heads}) must divide {prefix}.embedding_length "
            f"({hidden_size})"
        )
    head_dim = file.metadata.whole(f"{prefix}.attention.key_length", hidden_size // num_heads)
    of_values = file.metadata.whole(f"{prefix}.attention.value_length", head_dim)
    if of_values != head_dim or head_dim < 1:
        raise ConfigurationError(
            f"{file.path}: {prefix}.attention.value_length ({of_values}) must be the key_length ({head_dim})"
        )
    return head_dim


def _windows(file: GgufFile, architecture: Architecture, prefix: str, num_layers: int) -> dict[str, Any]:
    key, windows = f"{prefix}.attention.sliding_window", architecture.windows
    size = file.metadata.whole_of_all(key, 0 if windows is None else windows.size)
    is_endless = size >= file.metadata.whole(f"{prefix}.context_length")
    if windows is None:
        if size and not is_endless:
            raise ConfigurationError(f"{file.path}: {key} is not supported for this architecture")
        return {}
    if windows.period == 1:
        return {"sliding_window": None if is_endless else size or None}
    # Layers without a window may be others, of which the window is not all.
    has_window = _pattern(file, f"{key}_pattern", windows.period, num_layers) if size else [False] * num_layers
    return {
        "sliding_window": size or None,
        "layer_types": [SLIDING if has else FULL for has in has_window],
    }


def _pattern(file: GgufFile, key: str, period: int, num_layers: int) -> list[bool]:
    """Which layers have a window."""
    value = file.metadata.values.get(key, period)
    if type(value) is tuple and len(value) == num_layers:
        return [bool(each) for each in value]
    if type(value) is int and value > 0:
        return [layer % value < value - 1 for layer in range(num_layers)]
    raise ConfigurationError(f"{file.path}: {key} must be a number of layers, or say of each of {num_layers} layers")


def _dtype(file: GgufFile) -> str:
    """Of activations: the type of most of the matrices' bytes."""
    sizes: Counter[TensorType] = Counter()
    for info in file.tensors.values():
        if len(info.shape) > 1:
            sizes[info.type] += info.num_bytes
    most = sizes.most_common(1)
    return DTYPES.get(most[0][0].name, QUANTIZED_DTYPE) if most else QUANTIZED_DTYPE
