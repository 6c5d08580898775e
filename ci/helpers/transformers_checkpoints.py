"""Tiny configurations of classes that transformers' modelling code computes, by name of the class's model type."""

from __future__ import annotations

from typing import Any

from tiny_checkpoints import SIZES
from transformers import CONFIG_MAPPING, PreTrainedConfig

WINDOW: dict[str, Any] = {"sliding_window": 9}
MIXED: dict[str, Any] = {**WINDOW, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
EXPERTS: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
QWEN_EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
GPT2: dict[str, Any] = {"n_embd": 64, "n_layer": 3, "n_head": 4}
GEMMA: dict[str, Any] = {**MIXED, "query_pre_attn_scalar": 16}
# By default transformers computes the attention by a function of torch, which does not cap scores.
CAPS: dict[str, Any] = {
    "attn_logit_softcapping": 2.0,
    "final_logit_softcapping": 5.0,
    "attn_implementation": "eager",
}
SCALES: dict[str, Any] = {"embedding_multiplier": 3.0, "residual_multiplier": 0.5, "logits_scaling": 2.0}
LONGROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + 0.1 * pair for pair in range(8)],
    "long_factor": [2.0 + pair for pair in range(8)],
}

LATENT: dict[str, Any] = {
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "first_k_dense_replace": 3,
}
"""Keys of 24 elements a head, values of 16."""


def make_config(model_type: str, **changes: Any) -> PreTrainedConfig:
    config: PreTrainedConfig = CONFIG_MAPPING[model_type](**{**SIZES, "hidden_size": 64, "head_dim": 16, **changes})
    return config


CONFIGS: dict[str, PreTrainedConfig] = {
    "afmoe": make_config("afmoe", **MIXED, **QWEN_EXPERTS, num_dense_layers=1),
    "apertus": make_config("apertus"),
    "arcee": make_config("arcee"),
    "cohere": make_config("cohere", tie_word_embeddings=True),
    "cohere2": make_config("cohere2", **MIXED, tie_word_embeddings=True),
    "deepseek_v3": make_config("deepseek_v3", **LATENT),
    "ernie4_5": make_config("ernie4_5"),
    "exaone4": make_config("exaone4", **MIXED),
    "gemma": make_config("gemma"),
    "gemma2": make_config("gemma2", **GEMMA, **CAPS),
    "gemma3_text": make_config("gemma3_text", **GEMMA),
    "glm": make_config("glm"),
    "glm4": make_config("glm4"),
    "gpt2": make_config("gpt2", **GPT2),
    "gpt_bigcode": make_config("gpt_bigcode", **GPT2),
    "gpt_neox": make_config("gpt_neox"),
    "gpt_oss": make_config("gpt_oss", **MIXED, **EXPERTS),
    "granite": make_config("granite", **SCALES, attention_multiplier=0.2),
    "granitemoe": make_config("granitemoe", **SCALES, **EXPERTS, attention_multiplier=0.2),
    "helium": make_config("helium"),
    "hunyuan_v1_dense": make_config("hunyuan_v1_dense"),
    "llama4_text": make_config("llama4_text", num_local_experts=2, intermediate_size_mlp=96, attention_chunk_size=128),
    "ministral": make_config("ministral", **MIXED),
    "mixtral": make_config("mixtral", **WINDOW, num_local_experts=4),
    "nemotron": make_config("nemotron"),
    "olmo": make_config("olmo"),
    "olmo2": make_config("olmo2"),
    "olmo3": make_config("olmo3", **MIXED),
    "olmoe": make_config("olmoe", num_experts=4, num_experts_per_tok=2),
    "opt": make_config("opt", ffn_dim=96, word_embed_proj_dim=64),
    "phi": make_config("phi", partial_rotary_factor=0.5),
    "phi3": make_config("phi3", **WINDOW),
    "phi3-longrope": make_config("phi3", rope_parameters=LONGROPE, original_max_position_embeddings=100),
    "phimoe": make_config("phimoe", **WINDOW, num_local_experts=4),
    "qwen2_moe": make_config("qwen2_moe", **QWEN_EXPERTS, shared_expert_intermediate_size=48),
    "qwen3_moe": make_config("qwen3_moe", **QWEN_EXPERTS),
    "seed_oss": make_config("seed_oss"),
    "smollm3": make_config("smollm3", no_rope_layer_interval=2),
    "stablelm": make_config("stablelm"),
    "starcoder2": make_config("starcoder2", **WINDOW),
}
