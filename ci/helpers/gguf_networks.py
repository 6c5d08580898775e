"""Tiny networks to write as GGUF files, and which options in config.json llama.cpp's conversion writes of each."""

from __future__ import annotations

from typing import Any

from tiny_checkpoints import SIZES
from transformers import (
    ArceeConfig,
    Cohere2Config,
    CohereConfig,
    Ernie4_5Config,
    Exaone4Config,
    Gemma2Config,
    Gemma3TextConfig,
    Glm4Config,
    Glm4MoeConfig,
    GptOssConfig,
    GraniteConfig,
    GraniteMoeConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    NemotronConfig,
    Olmo2Config,
    Olmo3Config,
    Phi3Config,
    PhiConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    SeedOssConfig,
    SmolLM3Config,
    Starcoder2Config,
)

WIDE: dict[str, Any] = {**SIZES, "hidden_size": 64, "intermediate_size": 128}
"""Sizes that have whole groups; those of K-quants need 256."""
HEADS_OF_32: dict[str, Any] = {**WIDE, "num_attention_heads": 2, "num_key_value_heads": 1}
WIDE_256: dict[str, Any] = {**WIDE, "hidden_size": 256, "intermediate_size": 256}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
LINEAR = {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0}
GRANITE = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.625,
    "attention_multiplier": 0.125,
    "logits_scaling": 1.75,
}
SHARED = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


def _wide(**changes: Any) -> dict[str, Any]:
    return {**WIDE, "head_dim": 32, **changes}


def _partial(factor: float) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": factor}


def _by_type(full: dict[str, Any], theta: float) -> dict[str, Any]:
    return {"full_attention": full, "sliding_attention": {"rope_type": "default", "rope_theta": theta}}


CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**WIDE),
    "llama-256": LlamaConfig(**WIDE_256),
    "llama-tied": LlamaConfig(**{**WIDE, "tie_word_embeddings": True, "head_dim": 32}),
    "llama-biases": LlamaConfig(**WIDE, attention_bias=True, mlp_bias=True),
    "llama-llama3": LlamaConfig(**{**WIDE, "head_dim": 64}, rope_parameters=LLAMA3),
    "llama-linear": LlamaConfig(**WIDE, rope_parameters={"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0}),
    "mistral-window": MistralConfig(**WIDE, head_dim=16, sliding_window=11),
    "mixtral": MixtralConfig(**WIDE_256, head_dim=64, num_local_experts=4, sliding_window=None),
    "qwen2": Qwen2Config(**WIDE),
    "qwen2-yarn": Qwen2Config(**WIDE, rope_parameters=YARN),
    "qwen3": Qwen3Config(**WIDE, head_dim=32),
    "qwen3-moe": Qwen3MoeConfig(
        **WIDE, head_dim=32, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, norm_topk_prob=True
    ),
    "phi3": Phi3Config(
        **WIDE,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        sliding_window=12,
    ),
    "granite": GraniteConfig(**WIDE, **GRANITE),
    "granite-moe": GraniteMoeConfig(**HEADS_OF_32, **GRANITE, num_local_experts=4, num_experts_per_tok=2),
    "gemma2": Gemma2Config(
        **_wide(tie_word_embeddings=True, sliding_window=11, query_pre_attn_scalar=32),
        attn_logit_softcapping=2.0,
        final_logit_softcapping=3.0,
    ),
    "gemma3": Gemma3TextConfig(
        **_wide(tie_word_embeddings=True, sliding_window=11, query_pre_attn_scalar=32, num_hidden_layers=6),
        rope_parameters=_by_type({**LINEAR, "rope_theta": 1e6}, 10000.0),
    ),
    "gemma3-global": Gemma3TextConfig(
        **_wide(tie_word_embeddings=True, query_pre_attn_scalar=32, layer_types=["full_attention"] * 3),
        rope_parameters=_by_type(YARN, 10000.0),
    ),
    "gpt-oss": GptOssConfig(
        **_wide(sliding_window=11, num_local_experts=4, num_experts_per_tok=2),
        rope_parameters={**YARN, "truncate": False},
    ),
    "smollm3": SmolLM3Config(**{**WIDE, "num_hidden_layers": 5}),
    "olmo2": Olmo2Config(**WIDE),
    "olmo3": Olmo3Config(
        **{**WIDE, "sliding_window": 11, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
        rope_parameters=_by_type(YARN, 5000.0),
    ),
    "glm4": Glm4Config(**_wide(), rope_parameters=_partial(0.5), attention_bias=True),
    "glm4-moe": Glm4MoeConfig(
        **_wide(n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, n_shared_experts=2),
        rope_parameters=_partial(0.5),
        routed_scaling_factor=1.5,
        attention_bias=True,
        use_qk_norm=True,
    ),
    "qwen2-moe": Qwen2MoeConfig(**HEADS_OF_32, **SHARED, shared_expert_intermediate_size=64),
    "cohere": CohereConfig(**{**WIDE, "tie_word_embeddings": True}, logit_scale=0.75),
    "cohere2": Cohere2Config(
        **{**HEADS_OF_32, "tie_word_embeddings": True, "sliding_window": 11, "num_hidden_layers": 4}, logit_scale=1.5
    ),
    "starcoder2": Starcoder2Config(**{**WIDE, "tie_word_embeddings": True}, sliding_window=None, use_bias=True),
    "seed-oss": SeedOssConfig(**_wide(), attention_bias=True, attention_out_bias=False),
    "exaone4": Exaone4Config(**_wide(sliding_window=None, layer_types=["full_attention"] * 3)),
    "exaone4-window": Exaone4Config(**_wide(sliding_window=11, num_hidden_layers=4), rope_parameters=LLAMA3),
    "ernie4_5": Ernie4_5Config(**_wide(head_dim=16)),
    "arcee": ArceeConfig(**_wide(head_dim=16)),
    "nemotron": NemotronConfig(**_wide(head_dim=16), rope_parameters=_partial(0.5)),
    "phi2": PhiConfig(**{**WIDE, "intermediate_size": 256}, rope_parameters=_partial(0.5)),
}
EXPERT_COUNTS = {"expert_count": "num_experts", "expert_used_count": "num_experts_per_tok"}
LOCAL_EXPERTS = {"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"}
SCALES = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}
WINDOW = {"attention.sliding_window": "sliding_window"}
MORE_KEYS: dict[str, dict[str, str]] = {
    "mistral": WINDOW,
    "mixtral": LOCAL_EXPERTS,
    "qwen2_moe": {
        **EXPERT_COUNTS,
        "expert_feed_forward_length": "moe_intermediate_size",
        "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    },
    "qwen3_moe": {**EXPERT_COUNTS, "expert_feed_forward_length": "moe_intermediate_size"},
    "phi3": WINDOW,
    "granite": SCALES,
    "granitemoe": {**SCALES, **LOCAL_EXPERTS},
    "gemma2": {
        **WINDOW,
        "attn_logit_softcapping": "attn_logit_softcapping",
        "final_logit_softcapping": "final_logit_softcapping",
    },
    "gemma3_text": WINDOW,
    "gpt_oss": {**WINDOW, **LOCAL_EXPERTS, "expert_feed_forward_length": "intermediate_size"},
    "olmo3": WINDOW,
    "glm4_moe": {
        "expert_count": "n_routed_experts",
        "expert_used_count": "num_experts_per_tok",
        "expert_group_count": "n_group",
        "expert_group_used_count": "topk_group",
        "expert_feed_forward_length": "moe_intermediate_size",
        "expert_shared_count": "n_shared_experts",
        "leading_dense_block_count": "first_k_dense_replace",
        "expert_weights_scale": "routed_scaling_factor",
        "expert_weights_norm": "norm_topk_prob",
    },
    "cohere": {"logit_scale": "logit_scale"},
    "cohere2": {**WINDOW, "logit_scale": "logit_scale", "vocab_size": "vocab_size"},
    "exaone4": WINDOW,
}
"""Of the metadata -> of config.json, by its model_type."""
NAMES_WINDOWS = ("olmo3", "exaone4")
"""Those of which the file says which layers have a window."""
