"""Tiny networks to write as GGUF files."""

from __future__ import annotations

from typing import Any

from gguf_gemma4 import GEMMA_4
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
    GlmConfig,
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
    "glm": GlmConfig(**_wide(), rope_parameters=_partial(0.5), attention_bias=True),
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
