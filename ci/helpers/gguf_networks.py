"""Tiny networks to write as GGUF files, and which options in config.json llama.cpp's conversion writes of each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gguf_gemma4 import GEMMA_4, KEYS
from tiny_checkpoints import SIZES
from transformers import (
    ArceeConfig,
    BambaConfig,
    Cohere2Config,
    CohereConfig,
    DeepseekV2Config,
    DeepseekV3Config,
    Ernie4_5_MoeConfig,
    Ernie4_5Config,
    Exaone4Config,
    FalconH1Config,
    Gemma2Config,
    Gemma3TextConfig,
    Glm4Config,
    Glm4MoeConfig,
    Glm4MoeLiteConfig,
    GPT2Config,
    GPTNeoXConfig,
    GptOssConfig,
    GraniteConfig,
    GraniteMoeConfig,
    GraniteMoeHybridConfig,
    KimiLinearConfig,
    Lfm2Config,
    Lfm2MoeConfig,
    LlamaConfig,
    MiniMaxM2Config,
    MistralConfig,
    MixtralConfig,
    NemotronConfig,
    NemotronHConfig,
    Olmo2Config,
    Olmo3Config,
    Phi3Config,
    PhiConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    SeedOssConfig,
    SmolLM3Config,
    StableLmConfig,
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
DELTA_NET = {
    **HEADS_OF_32,
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
}
LATENTS = {
    **WIDE,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
}
LATENT_YARN = {**YARN, "mscale": 0.7, "mscale_all_dim": 0.7}
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 32, "mamba_n_groups": 2, "mamba_d_state": 16, "mamba_chunk_size": 8}
GRANITE_HYBRID = {
    **HEADS_OF_32,
    **{**MAMBA, "mamba_n_groups": 1},
    **GRANITE,
    "layer_types": ["mamba", "attention", "mamba"],
    "shared_intermediate_size": 96,
}
NEMOTRON_H = {
    **HEADS_OF_32,
    "head_dim": 32,
    "mamba_num_heads": 4,
    "mamba_head_dim": 32,
    "n_groups": 2,
    "ssm_state_size": 16,
    "chunk_size": 8,
    # Below any step of time: transformers keeps those of prompts above it.
    "time_step_min": 1e-9,
}
CONVOLUTIONS = {**HEADS_OF_32, "layer_types": ["conv", "full_attention", "conv"], "tie_word_embeddings": True}


def _wide(**changes: Any) -> dict[str, Any]:
    return {**WIDE, "head_dim": 32, **changes}


def _partial(factor: float) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": factor}


def _by_type(full: dict[str, Any], theta: float) -> dict[str, Any]:
    return {"full_attention": full, "sliding_attention": {"rope_type": "default", "rope_theta": theta}}


CONFIGS: dict[str, PreTrainedConfig] = {
    **GEMMA_4,
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
    "ernie4_5-moe": Ernie4_5_MoeConfig(
        **{**HEADS_OF_32, "intermediate_size": 64},
        moe_num_experts=4,
        moe_k=2,
        moe_intermediate_size=32,
        moe_num_shared_experts=2,
        moe_layer_start_index=1,
        use_bias=False,
    ),
    "minimax-m2": MiniMaxM2Config(
        **_wide(num_local_experts=4, num_experts_per_tok=2, scoring_func="sigmoid"),
        rotary_dim=16,
        rope_parameters=_partial(0.5),
    ),
    "stablelm": StableLmConfig(**WIDE, rope_parameters=_partial(0.5), use_qkv_bias=True),
    "stablelm-parallel": StableLmConfig(**WIDE, rope_parameters=_partial(0.25), use_parallel_residual=True),
    "gptneox": GPTNeoXConfig(
        **{key: value for key, value in WIDE.items() if key != "num_key_value_heads"}, rope_parameters=_partial(0.5)
    ),
    "arcee": ArceeConfig(**_wide(head_dim=16)),
    "nemotron": NemotronConfig(**_wide(head_dim=16), rope_parameters=_partial(0.5)),
    "qwen3_5": Qwen3_5TextConfig(**{**DELTA_NET, "tie_word_embeddings": True}, rope_parameters=_partial(0.25)),
    "qwen3_5-moe": Qwen3_5MoeTextConfig(
        **DELTA_NET, **SHARED, shared_expert_intermediate_size=64, rope_parameters=_partial(0.25)
    ),
    "qwen3-next": Qwen3NextConfig(
        **DELTA_NET, **SHARED, shared_expert_intermediate_size=64, rope_parameters=_partial(0.5)
    ),
    "deepseek-v2": DeepseekV2Config(**LATENTS, q_lora_rank=None, rope_parameters=LATENT_YARN),
    "deepseek-v2-groups": DeepseekV2Config(
        **LATENTS, q_lora_rank=32, topk_method="group_limited_greedy", n_group=4, topk_group=2
    ),
    "deepseek-v3": DeepseekV3Config(
        **LATENTS, q_lora_rank=32, n_group=4, topk_group=2, rope_parameters=LATENT_YARN, scoring_func="sigmoid"
    ),
    "glm4-moe-lite": Glm4MoeLiteConfig(
        **LATENTS, q_lora_rank=32, n_group=1, topk_group=1, scoring_func="sigmoid", norm_topk_prob=True
    ),
    "lfm2": Lfm2Config(**CONVOLUTIONS, block_auto_adjust_ff_dim=False),
    "lfm2-moe": Lfm2MoeConfig(
        **CONVOLUTIONS, num_dense_layers=1, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32
    ),
    "granite-hybrid": GraniteMoeHybridConfig(
        **{**GRANITE_HYBRID, "intermediate_size": 96}, num_local_experts=0, num_experts_per_tok=0
    ),
    "bamba": BambaConfig(
        **{key: value for key, value in GRANITE_HYBRID.items() if key not in (*GRANITE, "layer_types")}
        | {"mamba_n_groups": 2, "hidden_size": 64, "attn_layer_indices": [1]},
    ),
    "kimi-linear": KimiLinearConfig(
        **{key: value for key, value in LATENTS.items() if key != "n_routed_experts"},
        num_local_experts=8,
        n_group=2,
        topk_group=1,
        linear_num_heads=4,
        linear_head_dim=32,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
    ),
    "gpt2": GPT2Config(
        **{key: WIDE[key] for key in ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")},
        n_embd=64,
        n_layer=3,
        n_head=2,
        n_positions=128,
    ),
    "granite-hybrid-moe": GraniteMoeHybridConfig(**GRANITE_HYBRID, num_local_experts=4, num_experts_per_tok=2),
    "nemotron-h": NemotronHConfig(**NEMOTRON_H, layers_block_type=["mamba", "mlp", "attention", "mamba"]),
    "nemotron-3": NemotronHConfig(
        **{**NEMOTRON_H, "intermediate_size": 32},
        layers_block_type=["mamba", "moe", "attention", "moe"],
        n_routed_experts=8,
        num_experts_per_tok=3,
        n_group=1,
        topk_group=1,
        moe_intermediate_size=32,
        moe_shared_expert_intermediate_size=64,
        routed_scaling_factor=2.5,
    ),
    "falcon-h1": FalconH1Config(
        **HEADS_OF_32,
        **MAMBA,
        head_dim=32,
        mamba_d_ssm=128,
        mamba_rms_norm=False,
        embedding_multiplier=3.0,
        lm_head_multiplier=0.8,
        key_multiplier=0.4,
        attention_out_multiplier=0.7,
        ssm_in_multiplier=1.3,
        ssm_out_multiplier=0.6,
        mlp_multipliers=[0.8, 0.6],
        ssm_multipliers=[0.4, 0.7, 1.4, 0.8, 1.2],
    ),
    "phi2": PhiConfig(**{**WIDE, "intermediate_size": 256}, rope_parameters=_partial(0.5)),
}
DESCRIBED_OTHERWISE = ("qwen3-next", "glm4-moe-lite", "falcon-h1")
"""Those whose files are read as another class of transformers, or with other constants, that compute the same."""
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
