"""The config.json that transformers would have for a GGUF file. What the engine would compute otherwise is refused."""

from __future__ import annotations

from collections import Counter
from typing import Any

from inflight.errors import ConfigurationError
from inflight.gguf.architectures import ARCHITECTURE, MISTRAL, MIXTRAL, Architecture, find_architecture
from inflight.gguf.file import GgufFile
from inflight.gguf.rotary import SUPPORTED_KEYS as ROPE_KEYS
from inflight.gguf.rotary import rope_parameters
from inflight.gguf.tensor_types import BF16, F16, F32, FLOATS, NOT_READ, TensorType
from inflight.gguf.tensors import named_tensors

METHOD = "gguf"
"""quant_method of quantization_config, where a weight is quantised."""
DTYPES = {F32.name: "float32", F16.name: "float16", BF16.name: "bfloat16"}
QUANTIZED_DTYPE = "bfloat16"
"""Of activations where weights are quantised: most such models were trained in it, and some overflow float16."""
SUPPORTED_KEYS = frozenset(
    {
        "vocab_size",
        "context_length",
        "embedding_length",
        "block_count",
        "feed_forward_length",
        "tensor_data_layout",
        "attention.head_count",
        "attention.head_count_kv",
        "attention.key_length",
        "attention.value_length",
        "attention.layer_norm_rms_epsilon",
        "attention.sliding_window",
        "attention.causal",
        "attention.scale",
        "embedding_scale",
        "residual_scale",
        "logit_scale",
        "expert_count",
        "expert_used_count",
        "expert_feed_forward_length",
        "expert_weights_norm",
        *ROPE_KEYS,
    }
)
"""Below the architecture's name."""
GRANITE_SCALES = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}


def config_of(file: GgufFile) -> dict[str, Any]:
    """Without the ids of special tokens. Raises ConfigurationError."""
    architecture = find_architecture(file.metadata)
    prefix = file.metadata.text(ARCHITECTURE)
    _refuse_unknown_keys(file, prefix)
    _refuse_unread_types(file)
    tensors = named_tensors(file)
    embedding = tensors.get("model.embed_tokens.weight")
    if embedding is None:
        raise ConfigurationError(f"{file.path} has no tensor token_embd.weight: it is not a whole model")
    whole = file.metadata.whole
    num_heads = file.metadata.whole_of_all(f"{prefix}.attention.head_count")
    hidden_size = whole(f"{prefix}.embedding_length")
    head_dim = _head_dim(file, prefix, hidden_size, num_heads)
    rotary_dim = whole(f"{prefix}.rope.dimension_count", head_dim)
    values: dict[str, Any] = {
        "architectures": [architecture.network],
        "model_type": architecture.model_type,
        "dtype": _dtype(file),
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden_size,
        "intermediate_size": file.metadata.whole_of_all(f"{prefix}.feed_forward_length"),
        "num_hidden_layers": whole(f"{prefix}.block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": file.metadata.whole_of_all(f"{prefix}.attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "max_position_embeddings": whole(f"{prefix}.context_length"),
        "rms_norm_eps": file.metadata.number(f"{prefix}.attention.layer_norm_rms_epsilon"),
        "hidden_act": "silu",
        "attention_bias": "model.layers.0.self_attn.o_proj.bias" in tensors,
        "mlp_bias": "model.layers.0.mlp.down_proj.bias" in tensors,
        "tie_word_embeddings": "lm_head.weight" not in tensors,
        "rope_parameters": rope_parameters(file, prefix, rotary_dim),
        **_sliding_window(file, architecture, prefix),
        **_experts(file, architecture, prefix),
        **_scales(file, prefix),
    }
    if rotary_dim != head_dim:
        if not architecture.rotates_parts:
            raise ConfigurationError(
                f"{file.path}: {prefix}.rope.dimension_count ({rotary_dim}) must be the size of a head ({head_dim})"
            )
        values["rope_parameters"]["partial_rotary_factor"] = rotary_dim / head_dim
    if any(info.type not in FLOATS for info in file.tensors.values()):
        values["quantization_config"] = {"quant_method": METHOD}
    return values


def _refuse_unknown_keys(file: GgufFile, prefix: str) -> None:
    unknown = [
        key for key in file.metadata.keys_below(f"{prefix}.") if key.removeprefix(f"{prefix}.") not in SUPPORTED_KEYS
    ]
    if unknown:
        raise ConfigurationError(
            f"{file.path}: {', '.join(sorted(unknown)[:3])} may change what the network computes, and is not supported"
        )
    if not file.metadata.flag(f"{prefix}.attention.causal", True):
        raise ConfigurationError(f"{file.path}: {prefix}.attention.causal must be true, got false")


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


def _sliding_window(file: GgufFile, architecture: Architecture, prefix: str) -> dict[str, Any]:
    key = f"{prefix}.attention.sliding_window"
    window = file.metadata.whole_of_all(key, 0)
    if window >= file.metadata.whole(f"{prefix}.context_length"):
        window = 0
    if window and architecture.model_type not in (MISTRAL.model_type, MIXTRAL.model_type, "phi3"):
        raise ConfigurationError(f"{file.path}: {key} is not supported for this architecture")
    return {"sliding_window": window or None}


def _experts(file: GgufFile, architecture: Architecture, prefix: str) -> dict[str, Any]:
    if not architecture.experts:
        return {}
    whole = file.metadata.whole
    num_experts, num_chosen = whole(f"{prefix}.expert_count"), whole(f"{prefix}.expert_used_count")
    if not file.metadata.flag(f"{prefix}.expert_weights_norm", True):
        raise ConfigurationError(f"{file.path}: {prefix}.expert_weights_norm must be true, got false")
    if architecture is MIXTRAL:
        return {"num_local_experts": num_experts, "num_experts_per_tok": num_chosen}
    return {
        "num_experts": num_experts,
        "num_experts_per_tok": num_chosen,
        "moe_intermediate_size": whole(f"{prefix}.expert_feed_forward_length"),
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _scales(file: GgufFile, prefix: str) -> dict[str, float]:
    """Granite's constant factors, which others must not have."""
    given = {key: name for key, name in GRANITE_SCALES.items() if f"{prefix}.{key}" in file.metadata}
    if prefix != "granite" and given:
        raise ConfigurationError(f"{file.path}: {prefix}.{next(iter(given))} is not supported for this architecture")
    return {name: file.metadata.number(f"{prefix}.{key}") for key, name in given.items()}


def _dtype(file: GgufFile) -> str:
    """Of activations: the type of most of the matrices' bytes."""
    sizes: Counter[TensorType] = Counter()
    for info in file.tensors.values():
        if len(info.shape) > 1:
            sizes[info.type] += info.num_bytes
    most = sizes.most_common(1)
    return DTYPES.get(most[0][0].name, QUANTIZED_DTYPE) if most else QUANTIZED_DTYPE
