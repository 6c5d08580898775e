"""Which options in config.json llama.cpp's conversion writes to the metadata of a GGUF file, of each network."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gguf_gemma4 import KEYS

Named = str | Callable[[Any], Any]
"""An option of a configuration, or what is made of them."""
EXPERT_COUNTS: dict[str, Named] = {"expert_count": "num_experts", "expert_used_count": "num_experts_per_tok"}
LOCAL_EXPERTS: dict[str, Named] = {"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"}
SCALES: dict[str, Named] = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}
WINDOW: dict[str, Named] = {"attention.sliding_window": "sliding_window"}


def layers_that_attend(config: Any) -> list[bool]:
    kinds = getattr(config, "layers_block_type", None) or getattr(config, "layer_types", None)
    others = ("linear_attention", "mamba", "conv", "mlp", "moe")
    return [kind not in others for kind in kinds] if kinds else [True] * config.num_hidden_layers


def kind_of(config: Any) -> str:
    """Its model_type, which of Nemotron-H with experts has another name in files."""
    has_experts = "moe" in (getattr(config, "layers_block_type", None) or ())
    return f"{config.model_type}_moe" if has_experts else config.model_type


def _feed_forwards(config: Any) -> list[int]:
    """Of Nemotron-H, in each layer."""
    sizes = {"mlp": config.intermediate_size, "moe": config.moe_intermediate_size}
    return [sizes.get(kind, 0) for kind in config.layers_block_type]


DELTA_NETS: dict[str, Named] = {
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "ssm.state_size": "linear_key_head_dim",
    "ssm.group_count": "linear_num_key_heads",
    "ssm.time_step_rank": "linear_num_value_heads",
    "ssm.inner_size": lambda config: config.linear_num_value_heads * config.linear_value_head_dim,
    "full_attention_interval": lambda config: 4,
    # One for every layer, whichever attend.
    "attention.head_count_kv": "num_key_value_heads",
}
SHARED_EXPERT: dict[str, Named] = {
    **EXPERT_COUNTS,
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
SECTIONS: dict[str, Named] = {"rope.dimension_sections": lambda config: [11, 11, 10, 0]}
ROUTED: dict[str, Named] = {
    "expert_count": "n_routed_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_count": "n_shared_experts",
    "expert_weights_scale": "routed_scaling_factor",
}
LATENT_KEYS: dict[str, Named] = {
    **ROUTED,
    "attention.head_count_kv": lambda config: 1,
    "attention.q_lora_rank": "q_lora_rank",
    "attention.kv_lora_rank": "kv_lora_rank",
    "attention.key_length": lambda config: config.kv_lora_rank + config.qk_rope_head_dim,
    "attention.value_length": "kv_lora_rank",
    "attention.key_length_mla": lambda config: config.qk_nope_head_dim + config.qk_rope_head_dim,
    "attention.value_length_mla": "v_head_dim",
    "rope.dimension_count": "qk_rope_head_dim",
    "leading_dense_block_count": lambda config: 1,
}
WITH_SIGMOIDS: dict[str, Named] = {
    **LATENT_KEYS,
    "expert_gating_func": lambda config: 2,
    "expert_weights_norm": "norm_topk_prob",
}
MAMBA_KEYS: dict[str, Named] = {
    "ssm.conv_kernel": "mamba_d_conv",
    "ssm.state_size": "mamba_d_state",
    "ssm.group_count": "mamba_n_groups",
    "ssm.time_step_rank": "mamba_n_heads",
    "ssm.inner_size": lambda config: config.mamba_n_heads * config.mamba_d_head,
}
NEMOTRON_H_KEYS: dict[str, Named] = {
    "ssm.conv_kernel": "conv_kernel",
    "ssm.state_size": "ssm_state_size",
    "ssm.group_count": "n_groups",
    "ssm.time_step_rank": "mamba_num_heads",
    "ssm.inner_size": lambda config: config.mamba_num_heads * config.mamba_head_dim,
    "attention.key_length": "head_dim",
    "attention.value_length": "head_dim",
    "feed_forward_length": _feed_forwards,
    "rope.scaling.finetuned": lambda config: False,
}
MORE_KEYS: dict[str, dict[str, Named]] = {
    "gemma4_text": KEYS,
    "mistral": WINDOW,
    "mixtral": LOCAL_EXPERTS,
    "qwen2_moe": SHARED_EXPERT,
    "qwen3_next": {**DELTA_NETS, **SHARED_EXPERT},
    "qwen3_5_text": {**DELTA_NETS, **SECTIONS},
    "qwen3_5_moe_text": {**DELTA_NETS, **SHARED_EXPERT, **SECTIONS},
    "deepseek_v2": LATENT_KEYS,
    "deepseek_v3": WITH_SIGMOIDS,
    "glm4_moe_lite": WITH_SIGMOIDS,
    "lfm2": {"shortconv.l_cache": "conv_L_cache"},
    "lfm2_moe": {
        **EXPERT_COUNTS,
        "shortconv.l_cache": "conv_L_cache",
        "expert_feed_forward_length": "moe_intermediate_size",
        "leading_dense_block_count": "num_dense_layers",
        "expert_gating_func": lambda config: 2,
    },
    "granitemoehybrid": {
        **SCALES,
        **LOCAL_EXPERTS,
        **MAMBA_KEYS,
        "expert_shared_feed_forward_length": "shared_intermediate_size",
        "rope.scaling.finetuned": lambda config: False,
    },
    "bamba": {**MAMBA_KEYS, "rope.scaling.finetuned": lambda config: True},
    "kimi_linear": {
        **LATENT_KEYS,
        **LOCAL_EXPERTS,
        "attention.head_count_kv": lambda config: [int(each) for each in layers_that_attend(config)],
        "expert_gating_func": lambda config: 2,
        "ssm.conv_kernel": "linear_conv_kernel_dim",
        "kda.head_dim": "linear_head_dim",
    },
    "gpt2": {"feed_forward_length": lambda config: 4 * config.n_embd},
    "nemotron_h": NEMOTRON_H_KEYS,
    "nemotron_h_moe": {
        **NEMOTRON_H_KEYS,
        **ROUTED,
        "expert_weights_norm": "norm_topk_prob",
        "expert_shared_feed_forward_length": "moe_shared_expert_intermediate_size",
        "moe_latent_size": "moe_latent_size",
    },
    "falcon_h1": MAMBA_KEYS,
    "ernie4_5_moe": {
        "expert_count": "moe_num_experts",
        "expert_used_count": "moe_k",
        "expert_feed_forward_length": "moe_intermediate_size",
        "expert_shared_count": "moe_num_shared_experts",
        "expert_shared_feed_forward_length": "intermediate_size",
        "interleave_moe_layer_step": "moe_layer_interval",
        "leading_dense_block_count": "moe_layer_start_index",
    },
    "minimax_m2": {
        **LOCAL_EXPERTS,
        "expert_feed_forward_length": "intermediate_size",
        "expert_gating_func": lambda config: 2,
    },
    "stablelm": {"use_parallel_residual": "use_parallel_residual"},
    "gpt_neox": {"use_parallel_residual": "use_parallel_residual"},
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
        **ROUTED,
        "leading_dense_block_count": "first_k_dense_replace",
        "expert_weights_norm": "norm_topk_prob",
    },
    "cohere": {"logit_scale": "logit_scale"},
    "cohere2": {**WINDOW, "logit_scale": "logit_scale", "vocab_size": "vocab_size"},
    "exaone4": WINDOW,
}
"""Of the metadata -> of config.json, by its model_type."""
NAMES_WINDOWS = ("olmo3", "exaone4", "gemma4_text")
"""Those of which the file says which layers have a window."""
