"""A tiny configuration of every class that transformers has for causal language models, made from its defaults.

Sizes are found by the names that configurations have for them; what a class needs besides stands in `ITS_OWN`.
"""

from __future__ import annotations

from typing import Any

from tiny_checkpoints import SIZES
from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

HIDDEN, INNER, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 64, 96, 3, 4, 2, 16
LEAST: dict[str, Any] = {
    **{key: SIZES[key] for key in ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")},
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embedding_size", "word_embed_proj_dim"), HIDDEN),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "decoder_ffn_dim"), INNER),
    **dict.fromkeys(("encoder_ffn_dim", "intermediate_size_mlp", "dense_intermediate_size", "dim_feedforward"), INNER),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "decoder_layers", "encoder_layers"), LAYERS),
    **dict.fromkeys(("num_layers", "num_decoder_layers", "num_encoder_layers"), LAYERS),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"), HEADS),
    **dict.fromkeys(("encoder_attention_heads", "num_decoder_attention_heads"), HEADS),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "multi_query_group_num"), KV_HEADS),
    **dict.fromkeys(("head_dim", "attention_head_dim"), HEAD_DIM),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_target_positions"), 128),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k"), 2),
    **dict.fromkeys(("moe_intermediate_size", "expert_ffn_hidden_size", "expert_intermediate_size"), 32),
    **dict.fromkeys(("shared_expert_intermediate_size", "shared_intermediate_size"), 32),
    **dict.fromkeys(("n_group", "topk_group"), 1),
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "rotary_dim": 8,
    "sliding_window": 9,
    "first_k_dense_replace": 1,
    "rope_parameters": None,
    "tie_word_embeddings": False,
    "is_decoder": True,
}
"""By a key of configurations."""
ITS_OWN: dict[str, dict[str, Any]] = {}


def defaults_of(model_type: str) -> dict[str, Any]:
    return CONFIG_MAPPING[model_type]().to_dict()


def tiny_config(model_type: str) -> PreTrainedConfig:
    """Raises what transformers raises for what it does not accept."""
    own = ITS_OWN.get(model_type, {})
    values = _shrunken(defaults_of(model_type))
    config: PreTrainedConfig = CONFIG_MAPPING[model_type](**{**values, **own})
    return config


def _shrunken(defaults: dict[str, Any]) -> dict[str, Any]:
    changed: dict[str, Any] = {}
    for key, value in defaults.items():
        if key.endswith("_config") and isinstance(value, dict) and "model_type" in value:
            changed[key] = {"model_type": value["model_type"], **_shrunken(value)}
        elif key in LEAST and not (key == "sliding_window" and value is None):
            changed[key] = LEAST[key]
    return changed


MODEL_TYPES = dict(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
"""Name of a model type -> the class."""
