"""Tiny networks of Gemma 4 to write as GGUF files, and the metadata that llama.cpp's conversion writes of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tiny_checkpoints import SIZES
from transformers import Gemma4TextConfig, PreTrainedConfig

_SIZES: dict[str, Any] = {
    **SIZES,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 5,
    "layer_types": ["sliding_attention", "full_attention"] * 2 + ["full_attention"],
    "sliding_window": 11,
    "head_dim": 32,
    "global_head_dim": 64,
    "tie_word_embeddings": True,
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    },
}
GEMMA_4: dict[str, PreTrainedConfig] = {
    "gemma4": Gemma4TextConfig(
        **_SIZES,
        num_kv_shared_layers=3,
        use_double_wide_mlp=True,
        hidden_size_per_layer_input=32,
        vocab_size_per_layer_input=SIZES["vocab_size"],
        final_logit_softcapping=3.0,
    ),
    "gemma4-experts": Gemma4TextConfig(
        **_SIZES,
        hidden_size_per_layer_input=0,
        num_global_key_value_heads=1,
        attention_k_eq_v=True,
        enable_moe_block=True,
        num_experts=4,
        top_k_experts=2,
        moe_intermediate_size=32,
    ),
}


def size_of_global_heads(config: Any) -> int:
    """Of Gemma 4, in layers without a window."""
    return _of_global_layers(config, "head_dim")


def _of_global_layers(config: Any, name: str) -> int:
    layer = config.layer_types.index("full_attention")
    found: int = getattr(config.per_layer_config[layer], name, None) or getattr(config, name)
    return found


def _key_heads(config: Any) -> list[int]:
    of_global = _of_global_layers(config, "num_key_value_heads")
    return [of_global if kind == "full_attention" else config.num_key_value_heads for kind in config.layer_types]


def _mlp_widths(config: Any) -> list[int]:
    num_own = config.num_hidden_layers - config.num_kv_shared_layers
    doubled = 2 if config.use_double_wide_mlp else 1
    width = config.intermediate_size
    return [width if layer < num_own else doubled * width for layer in range(config.num_hidden_layers)]


KEYS: dict[str, str | Callable[[Any], Any]] = {
    "attention.sliding_window": "sliding_window",
    "final_logit_softcapping": "final_logit_softcapping",
    "attention.shared_kv_layers": "num_kv_shared_layers",
    "embedding_length_per_layer_input": "hidden_size_per_layer_input",
    "attention.head_count_kv": _key_heads,
    "feed_forward_length": _mlp_widths,
    "attention.key_length": size_of_global_heads,
    "attention.value_length": size_of_global_heads,
    "attention.key_length_swa": "head_dim",
    "attention.value_length_swa": "head_dim",
    "rope.dimension_count": size_of_global_heads,
    "rope.dimension_count_swa": "head_dim",
    "expert_count": "num_experts",
    "expert_used_count": "top_k_experts",
    "expert_feed_forward_length": "moe_intermediate_size",
}
"""Of the metadata -> of config.json."""
