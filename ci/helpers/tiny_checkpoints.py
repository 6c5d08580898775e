"""Tiny random checkpoints of every native architecture, and the tokens that transformers generates with them.

All weights are random, also norms and biases that transformers initialises to 1 and 0, so that an omitted one is
noticed.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from references import generated
from transformers import (
    ArceeConfig,
    AutoModelForCausalLM,
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
    Gemma4TextConfig,
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
    OPTConfig,
    Phi3Config,
    PhiConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    SeedOssConfig,
    SmolLM3Config,
    StableLmConfig,
    Starcoder2Config,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from inflight.prompt_tuning import EmbeddingTable

SIZES: dict[str, Any] = {
    "vocab_size": 203,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
ONE_KV_HEAD_EACH = {key: value for key, value in SIZES.items() if key != "num_key_value_heads"}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
LINEAR = {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}


def _llama(**changes: Any) -> PreTrainedConfig:
    return LlamaConfig(**{**SIZES, "head_dim": 12, **changes})


def _mistral(**changes: Any) -> PreTrainedConfig:
    return MistralConfig(**{**SIZES, "head_dim": 16, "sliding_window": None, **changes})


def _qwen2(**changes: Any) -> PreTrainedConfig:
    return Qwen2Config(**{**SIZES, **changes})


def _qwen3(**changes: Any) -> PreTrainedConfig:
    return Qwen3Config(**{**SIZES, "head_dim": 16, **changes})


def _qwen3_moe(**changes: Any) -> PreTrainedConfig:
    experts = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 20}
    return Qwen3MoeConfig(**{**SIZES, "head_dim": 16, **experts, **changes})


def _mixtral(**changes: Any) -> PreTrainedConfig:
    return MixtralConfig(**{**SIZES, "head_dim": 16, "num_local_experts": 4, **changes})


def _phi3(partial_rotary_factor: float, **changes: Any) -> PreTrainedConfig:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": partial_rotary_factor}
    return Phi3Config(**{**SIZES, "rope_parameters": rope, **changes})


def _granite(**changes: Any) -> PreTrainedConfig:
    scales = {"embedding_multiplier": 3.0, "residual_multiplier": 0.6, "attention_multiplier": 0.15}
    return GraniteConfig(**{**SIZES, **scales, "logits_scaling": 1.7, **changes})


def _alternating(**changes: Any) -> dict[str, Any]:
    """Sizes with windows on some layers."""
    windows = ["sliding_attention", "full_attention", "sliding_attention"]
    return {**SIZES, "head_dim": 16, "sliding_window": 11, "layer_types": windows, **changes}


def _by_layer_type(full: dict[str, Any]) -> dict[str, Any]:
    """Rotary parameters of layers with a window, and others."""
    return {"sliding_attention": {"rope_type": "default", "rope_theta": 5000.0}, "full_attention": full}


GEMMA_4: dict[str, Any] = {
    **SIZES,
    "num_hidden_layers": 5,
    "layer_types": ["sliding_attention", "full_attention"] * 2 + ["full_attention"],
    "sliding_window": 11,
    "head_dim": 16,
    "global_head_dim": 24,
    "rope_parameters": _by_layer_type(
        {"rope_type": "proportional", "rope_theta": 1000.0, "partial_rotary_factor": 0.25}
    ),
    "num_kv_shared_layers": 3,
    "use_double_wide_mlp": True,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 210,
    "final_logit_softcapping": 3.0,
}
"""As the small ones are."""
GEMMA_4_EXPERTS: dict[str, Any] = {
    "num_kv_shared_layers": 0,
    "use_double_wide_mlp": False,
    "hidden_size_per_layer_input": 0,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "enable_moe_block": True,
    "num_experts": 6,
    "top_k_experts": 3,
    "moe_intermediate_size": 20,
}
OF_WIDE_GEMMA_4 = {"head_dim": 32, "global_head_dim": 64}


def _partial(factor: float) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": factor}


_GPT2: dict[str, Any] = {
    **{key: SIZES[key] for key in ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")},
    "n_embd": 48,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 128,
}


def _granite_moe(**changes: Any) -> PreTrainedConfig:
    experts = {"num_local_experts": 5, "num_experts_per_tok": 2}
    scales = {"embedding_multiplier": 3.0, "residual_multiplier": 0.6, "attention_multiplier": 0.15}
    return GraniteMoeConfig(**{**SIZES, **scales, "logits_scaling": 1.7, **experts, **changes})


def _qwen2_moe(**changes: Any) -> PreTrainedConfig:
    experts = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 20}
    return Qwen2MoeConfig(**{**SIZES, **experts, "shared_expert_intermediate_size": 36, **changes})


def _ernie4_5_moe(**changes: Any) -> PreTrainedConfig:
    experts = {"moe_num_experts": 6, "moe_k": 3, "moe_intermediate_size": 20, "moe_num_shared_experts": 2}
    return Ernie4_5_MoeConfig(**{**SIZES, **experts, **changes})


def _glm4_moe(**changes: Any) -> PreTrainedConfig:
    experts = {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 20, "n_shared_experts": 2}
    return Glm4MoeConfig(**{**SIZES, "head_dim": 16, **experts, "routed_scaling_factor": 1.5, **changes})


def _with_delta_nets(num_layers: int = 3, **changes: Any) -> dict[str, Any]:
    """Sizes with Gated DeltaNets in all layers but the second."""
    kinds = ["full_attention" if layer == 1 else "linear_attention" for layer in range(num_layers)]
    heads = {
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_conv_kernel_dim": 4,
    }
    return {**SIZES, "head_dim": 16, "layer_types": kinds, "rope_parameters": _partial(0.5), **heads, **changes}


LATENTS: dict[str, Any] = {
    **{key: value for key, value in SIZES.items() if key != "num_key_value_heads"},
    "num_key_value_heads": 4,
    "q_lora_rank": 20,
    "kv_lora_rank": 28,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 20,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
}
"""Of attention to latents, and experts behind the first layer."""
KIMI_LINEAR = {
    **{key: value for key, value in LATENTS.items() if key != "n_routed_experts"},
    **{"num_local_experts": 8, "linear_num_heads": 4, "linear_head_dim": 16, "n_group": 2},
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}


def _with_convolutions(**changes: Any) -> dict[str, Any]:
    """Sizes with short convolutions in the first and in the last layer."""
    return {**SIZES, "layer_types": ["conv", "full_attention", "conv"], **changes}


def _lfm2(**changes: Any) -> PreTrainedConfig:
    return Lfm2Config(**_with_convolutions(block_auto_adjust_ff_dim=False, **changes))


def _with_mamba(**changes: Any) -> dict[str, Any]:
    """Sizes with Mamba-2 in the first and in the last layer of Granite 4."""
    heads = {"mamba_n_heads": 4, "mamba_n_groups": 2, "mamba_d_state": 16, "mamba_chunk_size": 8}
    kinds = ["linear_attention", "full_attention", "linear_attention"]
    return {**SIZES, "layer_types": kinds, "shared_intermediate_size": 36, **heads, **changes}


def _granite_hybrid(**changes: Any) -> PreTrainedConfig:
    scales = {"embedding_multiplier": 3.0, "residual_multiplier": 0.6, "attention_multiplier": 0.15}
    return GraniteMoeHybridConfig(**_with_mamba(**scales, logits_scaling=1.7, **changes))


def _falcon_h1(**changes: Any) -> PreTrainedConfig:
    heads = {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_n_groups": 2, "mamba_d_state": 16, "mamba_chunk_size": 8}
    scales = {"embedding_multiplier": 3.0, "lm_head_multiplier": 0.8, "key_multiplier": 0.4, "ssm_in_multiplier": 1.3}
    branches = {"attention_out_multiplier": 0.7, "ssm_out_multiplier": 0.6, "mlp_multipliers": [0.8, 0.6]}
    sections = {"ssm_multipliers": [0.4, 0.7, 1.4, 0.8, 1.2]}
    return FalconH1Config(**{**SIZES, **heads, **scales, **branches, **sections, **changes})


def _nemotron_h(**changes: Any) -> PreTrainedConfig:
    kinds = ["linear_attention", "mlp", "full_attention", "linear_attention"]
    heads = {"mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 16, "chunk_size": 8}
    # Below any step of time: transformers keeps those of prompts above it.
    sizes = {**SIZES, "head_dim": 16, "layers_block_type": kinds, "time_step_min": 1e-9}
    return NemotronHConfig(**{**sizes, **heads, **changes})


def _nemotron_3(**changes: Any) -> PreTrainedConfig:
    kinds = ["linear_attention", "moe", "full_attention", "moe"]
    experts = {"n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 2, "moe_latent_size": 32}
    sizes = {"moe_intermediate_size": 20, "moe_shared_expert_intermediate_size": 36, "routed_scaling_factor": 2.5}
    return _nemotron_h(**{"layers_block_type": kinds, **experts, **sizes, **changes})


CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": _llama(),
    "llama-tied": _llama(tie_word_embeddings=True),
    "llama-biases": _llama(attention_bias=True, mlp_bias=True),
    "llama-one-kv-head": _llama(num_key_value_heads=1),
    "llama-all-kv-heads": _llama(num_key_value_heads=4),
    "llama-three-heads": _llama(num_attention_heads=3, num_key_value_heads=1),
    "llama-linear": _llama(rope_parameters=LINEAR),
    "llama-dynamic": _llama(
        rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}, max_position_embeddings=36
    ),
    "llama-llama3": _llama(rope_parameters=LLAMA3),
    "llama-yarn": _llama(rope_parameters=YARN),
    "mistral": _mistral(),
    "mistral-window": _mistral(sliding_window=11),
    "qwen2": _qwen2(),
    "qwen2-window": _qwen2(use_sliding_window=True, sliding_window=9, max_window_layers=1, tie_word_embeddings=True),
    "qwen2-yarn": _qwen2(rope_parameters={**YARN, "attention_factor": 1.3, "beta_fast": 16.0}),
    "qwen3": _qwen3(),
    "qwen3-window": _qwen3(
        use_sliding_window=True,
        sliding_window=13,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    "qwen3-biases": _qwen3(attention_bias=True, tie_word_embeddings=True),
    "qwen3-moe": _qwen3_moe(norm_topk_prob=True, mlp_only_layers=[1]),
    "qwen3-moe-shares": _qwen3_moe(
        norm_topk_prob=False, decoder_sparse_step=2, attention_bias=True, use_sliding_window=True, sliding_window=12
    ),
    "mixtral-window": _mixtral(sliding_window=11),
    "minimax-m2": MiniMaxM2Config(
        **{**SIZES, "head_dim": 16, "rope_parameters": _partial(0.5)}, num_local_experts=6, num_experts_per_tok=2
    ),
    "qwen2-moe": _qwen2_moe(mlp_only_layers=[1]),
    "qwen2-moe-window": _qwen2_moe(
        norm_topk_prob=True, qkv_bias=False, decoder_sparse_step=2, use_sliding_window=True, sliding_window=9
    ),
    "glm4-moe": _glm4_moe(attention_bias=True),
    "glm4-moe-groups": _glm4_moe(
        n_group=4, topk_group=2, norm_topk_prob=False, first_k_dense_replace=0, use_qk_norm=True, num_mtp_layers=0
    ),
    "deepseek-v2": DeepseekV2Config(**LATENTS | {"q_lora_rank": None}, mlp_bias=True),
    "deepseek-v2-groups": DeepseekV2Config(
        **LATENTS, topk_method="group_limited_greedy", n_group=4, topk_group=2, attention_bias=True
    ),
    "deepseek-v3": DeepseekV3Config(
        **LATENTS, n_group=4, topk_group=2, rope_parameters={**YARN, "mscale": 0.7, "mscale_all_dim": 1.3}
    ),
    "glm4-moe-lite": Glm4MoeLiteConfig(**LATENTS, mlp_layer_types=["sparse", "dense", "sparse"], rope_interleave=False),
    "kimi-linear": KimiLinearConfig(**KIMI_LINEAR),
    "ernie4.5-moe": _ernie4_5_moe(use_bias=False),
    "ernie4.5-moe-last": _ernie4_5_moe(moe_layer_start_index=0, moe_layer_interval=2, moe_num_shared_experts=0),
    "granite-moe": _granite_moe(attention_bias=True),
    "qwen3_5": Qwen3_5TextConfig(**_with_delta_nets()),
    "qwen3-next": Qwen3NextConfig(
        **_with_delta_nets(num_experts=6, num_experts_per_tok=2, moe_intermediate_size=20, linear_conv_kernel_dim=2)
    ),
    "lfm2": _lfm2(conv_bias=True),
    "lfm2-moe": Lfm2MoeConfig(
        **_with_convolutions(num_dense_layers=1, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=20)
    ),
    "granite-hybrid": _granite_hybrid(num_local_experts=0),
    "granite-hybrid-moe": _granite_hybrid(
        num_local_experts=5, mamba_n_groups=1, mamba_proj_bias=True, position_embedding_type="rope"
    ),
    "nemotron-h": _nemotron_h(use_bias=True, mlp_bias=True),
    "nemotron-3": _nemotron_3(mlp_bias=True),
    "bamba": BambaConfig(
        **{key: value for key, value in _with_mamba().items() if key != "layer_types"}, attn_layer_indices=[1]
    ),
    "falcon-h1": _falcon_h1(),
    "phi3": _phi3(1.0),
    "phi3-partial-window": _phi3(0.5, sliding_window=10, tie_word_embeddings=True),
    "granite": _granite(),
    "granite-biases": _granite(attention_bias=True, mlp_bias=True, embedding_multiplier=0.7),
    "smollm3": SmolLM3Config(**SIZES, no_rope_layers=[1, 0, 1]),
    "smollm3-window": SmolLM3Config(
        **_alternating(no_rope_layers=[0, 1, 1], use_sliding_window=True, attention_bias=True, mlp_bias=True)
    ),
    "olmo2": Olmo2Config(**SIZES),
    "olmo2-bias": Olmo2Config(**{**SIZES, "attention_bias": True}),
    "olmo3": Olmo3Config(**_alternating(rope_parameters=_by_layer_type(YARN))),
    "glm": GlmConfig(**{**SIZES, "head_dim": 16}, rope_parameters=_partial(0.5)),
    "glm4": Glm4Config(**{**SIZES, "head_dim": 16}, rope_parameters=_partial(0.25), attention_bias=True),
    "ernie4_5": Ernie4_5Config(**{**SIZES, "head_dim": 16}, use_bias=True),
    "seed-oss": SeedOssConfig(**{**SIZES, "head_dim": 20}, attention_out_bias=True, mlp_bias=True),
    "exaone4": Exaone4Config(**_alternating(sliding_window=None, layer_types=["full_attention"] * 3)),
    "exaone4-window": Exaone4Config(**_alternating()),
    "gemma2": Gemma2Config(
        **_alternating(query_pre_attn_scalar=24, attn_logit_softcapping=2.0, final_logit_softcapping=3.0)
    ),
    "gemma3": Gemma3TextConfig(**_alternating(rope_parameters=_by_layer_type(LINEAR), query_pre_attn_scalar=24)),
    "gemma4": Gemma4TextConfig(**GEMMA_4),
    "gemma4-experts": Gemma4TextConfig(**GEMMA_4 | GEMMA_4_EXPERTS),
    "cohere": CohereConfig(**SIZES, logit_scale=0.7, attention_bias=True),
    "cohere2": Cohere2Config(**_alternating(logit_scale=1.5)),
    "stablelm": StableLmConfig(**SIZES, rope_parameters=_partial(0.5), use_qkv_bias=True),
    "stablelm-parallel": StableLmConfig(**SIZES, rope_parameters=_partial(1.0), use_parallel_residual=True),
    "starcoder2": Starcoder2Config(**{**SIZES, "sliding_window": 11}, use_bias=True),
    "arcee": ArceeConfig(**{**SIZES, "head_dim": 16}, mlp_bias=True),
    "nemotron": NemotronConfig(**{**SIZES, "head_dim": 16}, rope_parameters=_partial(0.5)),
    "phi": PhiConfig(**SIZES, rope_parameters=_partial(0.5)),
    "gpt-neox": GPTNeoXConfig(**ONE_KV_HEAD_EACH, rope_parameters=_partial(0.5)),
    "gpt-neox-sequential": GPTNeoXConfig(
        **ONE_KV_HEAD_EACH, rope_parameters=_partial(1.0), use_parallel_residual=False, attention_bias=False
    ),
    "gpt-oss": GptOssConfig(**_alternating(num_local_experts=5, num_experts_per_tok=2, rope_parameters=YARN)),
    "gpt2": GPT2Config(**_GPT2, n_inner=None),
    "gpt2-erf": GPT2Config(**_GPT2, n_inner=80, activation_function="gelu"),
    "opt": OPTConfig(**{**ONE_KV_HEAD_EACH, "tie_word_embeddings": True}, ffn_dim=80, word_embed_proj_dim=48),
}

COMPILED_CONFIGS: dict[str, PreTrainedConfig] = {
    # Sizes that compiled layers take, in bfloat16. Biases everywhere, three query heads a key head.
    "llama-wide": _llama(
        max_position_embeddings=1024,
        hidden_size=96,
        intermediate_size=150,
        num_attention_heads=6,
        head_dim=32,
        attention_bias=True,
        mlp_bias=True,
        tie_word_embeddings=True,
    ),
    # Norms on the heads, windows on some layers, five query heads on one key head; the MLP needs padding.
    "qwen3-wide": _qwen3(
        max_position_embeddings=1024,
        hidden_size=64,
        intermediate_size=90,
        num_attention_heads=5,
        num_key_value_heads=1,
        head_dim=64,
        use_sliding_window=True,
        sliding_window=13,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
}


WIDE = {"max_position_embeddings": 1024, "hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
"""Heads of 32."""
OF_WIDE_LATENTS = {
    **{"num_key_value_heads": 2, "q_lora_rank": 32, "kv_lora_rank": 64},
    **{"qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 64},
}
COMPILED_FAMILIES: dict[str, PreTrainedConfig] = {
    "mistral-wide": _mistral(**WIDE, head_dim=32, sliding_window=40),
    "qwen2-wide": _qwen2(**WIDE),
    "qwen3_5-wide": Qwen3_5TextConfig(**_with_delta_nets(**WIDE, head_dim=32)),
    "lfm2-wide": _lfm2(**WIDE),
    "granite-hybrid-wide": _granite_hybrid(**WIDE, num_local_experts=0),
    "nemotron-h-wide": _nemotron_h(**WIDE | {"head_dim": 32}),
    "falcon-h1-wide": _falcon_h1(
        **WIDE, intermediate_size=128, mamba_n_groups=1, mamba_rms_norm=True, mamba_norm_before_gate=True
    ),
    "nemotron-3-wide": _nemotron_3(**WIDE | {"head_dim": 32}),
    "olmo2-wide": Olmo2Config(**{**SIZES, **WIDE}),
    "phi3-wide": _phi3(0.5, **WIDE),
    "granite-wide": _granite(**WIDE),
    "mixtral-wide": _mixtral(**WIDE, head_dim=32),
    "qwen3-moe-wide": _qwen3_moe(**WIDE, head_dim=32, norm_topk_prob=False, mlp_only_layers=[1]),
    "qwen2-moe-wide": _qwen2_moe(**WIDE),
    "glm4-moe-wide": _glm4_moe(**WIDE | {"head_dim": 32}, n_group=4, topk_group=2),
    "deepseek-v3-wide": DeepseekV3Config(
        **LATENTS | WIDE | OF_WIDE_LATENTS, n_group=4, topk_group=2, rope_parameters={**YARN, "mscale_all_dim": 1.0}
    ),
    "kimi-linear-wide": KimiLinearConfig(**KIMI_LINEAR | WIDE | OF_WIDE_LATENTS | {"linear_head_dim": 32}),
    "granite-moe-wide": _granite_moe(**WIDE),
    "gpt-oss-wide": GptOssConfig(**_alternating(**WIDE, head_dim=32, num_local_experts=5, num_experts_per_tok=2)),
    "gemma3-wide": Gemma3TextConfig(
        **_alternating(**WIDE, head_dim=32, rope_parameters=_by_layer_type(LINEAR), final_logit_softcapping=3.0)
    ),
    "gemma4-wide": Gemma4TextConfig(**GEMMA_4 | WIDE | OF_WIDE_GEMMA_4 | {"hidden_size_per_layer_input": 32}),
    "gemma4-experts-wide": Gemma4TextConfig(**GEMMA_4 | GEMMA_4_EXPERTS | WIDE | OF_WIDE_GEMMA_4),
    "cohere-wide": CohereConfig(**{**SIZES, **WIDE}, logit_scale=0.7),
}
"""Of the families that COMPILED_CONFIGS has none of."""


def architecture_of(name: str) -> str:
    """The class of transformers that computes `name` of CONFIGS."""
    architecture: str = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[CONFIGS[name].model_type]
    return architecture


class NearTie(Exception):
    """Greedy decoding of this prompt depends on rounding."""


@dataclass(frozen=True)
class TinyCheckpoint:
    folder: Path
    model: Any
    """transformers' own, float32, on the CPU."""
    margin: float = 1e-4
    """Relative difference of the two likeliest tokens' logits below which they are a near tie."""

    def expected(self, prompt: list[int], max_tokens: int, table: EmbeddingTable | None = None) -> list[int]:
        """Greedy continuation; NearTie where the two likeliest tokens are too close for another order of additions.

        `table`: embeddings of the ids beyond the vocabulary.
        """
        question = {
            "prompt": prompt,
            "max_tokens": max_tokens,
            "margin": self.margin,
            "table": hashlib.blake2b(repr(table).encode(), digest_size=8).hexdigest(),
        }
        tokens = generated(self.model, question, lambda: self._generate(prompt, max_tokens, table))
        if tokens is None:
            raise NearTie
        return tokens

    def _generate(self, prompt: list[int], max_tokens: int, table: EmbeddingTable | None) -> list[int] | None:
        """By transformers; None for a near tie."""
        token_ids = torch.tensor([prompt])
        inputs, start = {"input_ids": token_ids}, len(prompt)
        if table is not None:
            inputs, start = {"inputs_embeds": self._embed(token_ids, table)}, 0
        output = self.model.generate(
            **inputs,
            max_new_tokens=max_tokens,
            do_sample=False,
            output_scores=True,
            return_dict_in_generate=True,
        )
        for scores in output.scores:
            first, second = scores[0].topk(2).values.tolist()
            if first - second < self.margin * abs(first):
                return None
        tokens: list[int] = output.sequences[0, start:].tolist()
        return tokens

    @torch.inference_mode()
    def _embed(self, token_ids: torch.Tensor, table: EmbeddingTable) -> torch.Tensor:
        own = token_ids - SIZES["vocab_size"]
        rows = torch.from_numpy(table.rows(own.clamp(min=0).numpy()))
        embedded = self.model.get_input_embeddings()(token_ids.clamp(max=SIZES["vocab_size"] - 1))
        return torch.where(own[..., None] < 0, embedded, rows)

    def prompt(self, length: int, max_tokens: int, table: EmbeddingTable | None = None) -> tuple[list[int], list[int]]:
        """A prompt whose greedy continuation does not depend on rounding, and that continuation. With a `table` about
        half of its tokens are rows of that."""
        for seed in range(100):
            try:
                prompt = make_prompt(length, seed, 0 if table is None else table.num_rows)
                return prompt, self.expected(prompt, max_tokens, table)
            except NearTie:
                continue
        raise NearTie


def make_checkpoint(folder: Path, name: str, dtype: torch.dtype = torch.float32, **save_options: Any) -> TinyCheckpoint:
    """Write the checkpoint `name` of CONFIGS, COMPILED_CONFIGS or COMPILED_FAMILIES to `folder`."""
    return write_checkpoint(
        folder, {**CONFIGS, **COMPILED_CONFIGS, **COMPILED_FAMILIES}[name], len(name), dtype, **save_options
    )


def write_checkpoint(
    folder: Path, config: PreTrainedConfig, seed: int, dtype: torch.dtype = torch.float32, **save_options: Any
) -> TinyCheckpoint:
    """Write a checkpoint of random weights to `folder`."""
    generator = torch.Generator().manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).to(dtype).eval()
    if needs_eager(config):
        model.set_attn_implementation("eager")
    fill_with_noise(model, generator)
    model.save_pretrained(folder, **save_options)
    return TinyCheckpoint(folder, model)


@torch.no_grad()
def fill_with_noise(model: Any, generator: torch.Generator) -> None:
    """Random weights with which the network's answers are not trivial."""
    for parameter_name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        parameter.copy_(noise * _scale_of(parameter_name, parameter.dim()))
        if parameter.dim() == 1 and parameter_name.endswith("weight"):
            parameter += 1  # of a norm
    for buffer_name, buffer in model.named_buffers():
        if buffer_name.endswith(("e_score_correction_bias", "expert_bias")):
            buffer.copy_(0.2 * torch.randn(buffer.shape, generator=generator))
        if buffer_name.endswith("layer_scalar"):
            buffer.copy_(0.3 * torch.randn(buffer.shape, generator=generator) + 1)


def needs_eager(config: PreTrainedConfig) -> bool:
    """Whether all other implementations of attention leave its caps or sinks out."""
    return bool(getattr(config, "attn_logit_softcapping", None)) or config.model_type == "gpt_oss"


def _scale_of(parameter_name: str, num_dims: int) -> float:
    """With larger biases every answer would be one token again and again."""
    if num_dims > 1:
        return 0.2
    return {"weight": 0.3, "bias": 0.1}.get(parameter_name.rpartition(".")[2], 0.5)


def make_prompt(length: int, seed: int = 0, num_own: int = 0) -> list[int]:
    """Random token ids; with `num_own` above 0, every other one is one of so many ids beyond the vocabulary."""
    generator = torch.Generator().manual_seed(1000 * seed + length)
    tokens: list[int] = torch.randint(1, SIZES["vocab_size"], (length,), generator=generator).tolist()
    return [SIZES["vocab_size"] + token % num_own if num_own and i % 2 else token for i, token in enumerate(tokens)]


def make_table(num_rows: int, num_features: int = SIZES["hidden_size"], seed: int = 0) -> EmbeddingTable:
    """Random embeddings of the size of a checkpoint's own."""
    generator = torch.Generator().manual_seed(seed)
    return EmbeddingTable.of((0.2 * torch.randn(num_rows, num_features, generator=generator)).numpy())
