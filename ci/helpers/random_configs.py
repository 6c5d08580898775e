"""Configurations of native families drawn by a seed: over what their config.json allows, in tiny sizes."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
from typing import Any

from transformers import AutoConfig, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from inflight.models.families import FAMILIES

FLAGS = (False, True)
WINDOWS = (2, 5, 9, 16)
"""Not 1, for which transformers' cache keeps all keys."""
SOME_WINDOWS: dict[str, Any] = {"sliding_window": WINDOWS, "layer_types": ("full_attention", "sliding_attention")}
"""`layer_types` has a choice for each layer."""
PARTIAL = (0.5, 0.75, 1.0)
GEMMA: dict[str, Any] = {
    **SOME_WINDOWS,
    "attention_bias": FLAGS,
    "query_pre_attn_scalar": (8, 16, 37),
    "attn_logit_softcapping": (None, 1.5, 30.0),
    "final_logit_softcapping": (None, 2.0, 30.0),
    "hidden_activation": ("gelu_pytorch_tanh", "silu", "gelu"),
}
GEMMA_4: dict[str, Any] = {
    **SOME_WINDOWS,
    "attention_bias": FLAGS,
    "final_logit_softcapping": (None, 2.0, 30.0),
    "hidden_activation": ("gelu_pytorch_tanh", "silu"),
    "use_bidirectional_attention": (None, "vision"),
    "global_head_dim": (8, 16, 40),
    "num_global_key_value_heads": (None, 1),
    "attention_k_eq_v": FLAGS,
    "num_kv_shared_layers": (0, 1, 2, 3),
    "use_double_wide_mlp": FLAGS,
    "partial_rotary_factor": (0.25, 0.5, 1.0),
}
EXPERTS: dict[str, Any] = {"num_experts_per_tok": (1, 2, 3), "hidden_act": ("silu", "gelu_pytorch_tanh")}
DELTA_NETS: dict[str, Any] = {
    "layer_types": ("full_attention", "linear_attention", "linear_attention"),
    "hidden_act": ("silu", "gelu_pytorch_tanh"),
    "attention_bias": FLAGS,
    "partial_rotary_factor": (0.5, 1.0),
    "linear_num_key_heads": (1, 2),
    "linear_num_value_heads": (2, 4),
    "linear_key_head_dim": (8, 16, 32),
    "linear_value_head_dim": (8, 16, 32),
    "linear_conv_kernel_dim": (2, 4),
}
LATENTS: dict[str, Any] = {
    "num_experts_per_tok": (1, 2),
    "hidden_act": ("silu", "gelu_pytorch_tanh"),
    "n_routed_experts": (8, 16),
    "n_shared_experts": (1, 2),
    "moe_intermediate_size": (12, 20),
    "first_k_dense_replace": (0, 1),
    "routed_scaling_factor": (1.0, 2.5),
}
LFM2: dict[str, Any] = {
    "layer_types": ("full_attention", "conv", "conv"),
    "conv_bias": FLAGS,
    "conv_L_cache": (2, 3, 5),
}
MAMBA: dict[str, Any] = {
    "mamba_n_heads": (2, 4),
    "mamba_n_groups": (1, 2),
    "mamba_d_state": (8, 16, 48),
    "mamba_d_conv": (2, 4),
    "mamba_conv_bias": FLAGS,
    "mamba_proj_bias": FLAGS,
    "mamba_expand": (1, 2),
    "mamba_chunk_size": (8,),
}
OPTIONS: dict[str, Mapping[str, Any]] = {
    "LlamaForCausalLM": {"attention_bias": FLAGS, "mlp_bias": FLAGS, "hidden_act": ("silu", "gelu", "relu2")},
    "MistralForCausalLM": {"sliding_window": (None, *WINDOWS)},
    "MixtralForCausalLM": {**EXPERTS, "sliding_window": (None, *WINDOWS), "num_local_experts": (3, 5, 8)},
    "MiniMaxM2ForCausalLM": {**EXPERTS, "num_local_experts": (3, 6), "partial_rotary_factor": PARTIAL},
    "Qwen2ForCausalLM": {**SOME_WINDOWS, "use_sliding_window": FLAGS},
    "Qwen3ForCausalLM": {**SOME_WINDOWS, "use_sliding_window": FLAGS, "attention_bias": FLAGS},
    "Qwen3MoeForCausalLM": {
        **EXPERTS,
        "num_experts": (3, 6),
        "norm_topk_prob": FLAGS,
        "moe_intermediate_size": (12, 20),
        "decoder_sparse_step": (1, 2),
    },
    "Qwen3NextForCausalLM": {
        **EXPERTS,
        **DELTA_NETS,
        "num_experts": (3, 6),
        "norm_topk_prob": FLAGS,
        "decoder_sparse_step": (1, 2),
        "moe_intermediate_size": (12, 20),
        "shared_expert_intermediate_size": (16, 36),
    },
    "Qwen3_5ForCausalLM": DELTA_NETS,
    "Qwen3_5MoeForCausalLM": {
        **EXPERTS,
        **DELTA_NETS,
        "num_experts": (3, 6),
        "moe_intermediate_size": (12, 20),
        "shared_expert_intermediate_size": (16, 36),
    },
    "Phi3ForCausalLM": {"sliding_window": (None, *WINDOWS), "partial_rotary_factor": PARTIAL},
    "GraniteForCausalLM": {
        "attention_bias": FLAGS,
        "mlp_bias": FLAGS,
        "embedding_multiplier": (0.7, 3.0),
        "residual_multiplier": (0.3, 1.0),
        "attention_multiplier": (0.1, 0.3),
        "logits_scaling": (0.8, 2.0),
    },
    "Qwen2MoeForCausalLM": {
        **EXPERTS,
        "num_experts": (3, 6),
        "norm_topk_prob": FLAGS,
        "moe_intermediate_size": (12, 20),
        "shared_expert_intermediate_size": (16, 36),
        "mlp_only_layers": ([], [0]),
        "qkv_bias": FLAGS,
    },
    "GraniteMoeForCausalLM": {
        **EXPERTS,
        "num_local_experts": (3, 6),
        "attention_bias": FLAGS,
        "logits_scaling": (0.8,),
    },
    "Glm4MoeForCausalLM": {
        **EXPERTS,
        "n_routed_experts": (8, 12),
        "n_shared_experts": (1, 2),
        "moe_intermediate_size": (12, 20),
        "first_k_dense_replace": (0, 1),
        "n_group": (1, 2),
        "topk_group": (1,),
        "norm_topk_prob": FLAGS,
        "routed_scaling_factor": (1.0, 2.5),
        "use_qk_norm": FLAGS,
        "attention_bias": FLAGS,
        "partial_rotary_factor": PARTIAL,
    },
    "DeepseekV2ForCausalLM": {
        **LATENTS,
        "topk_method": ("greedy", "group_limited_greedy"),
        "n_group": (2, 4),
        "topk_group": (2,),
        "mlp_bias": FLAGS,
    },
    "DeepseekV3ForCausalLM": {
        **LATENTS,
        "n_group": (1, 2, 4),
        "topk_group": (1,),
        "norm_topk_prob": FLAGS,
        "rope_interleave": FLAGS,
    },
    "Glm4MoeLiteForCausalLM": {
        **LATENTS,
        "n_group": (1, 2),
        "topk_group": (1,),
        "norm_topk_prob": FLAGS,
        "rope_interleave": FLAGS,
        "mlp_layer_types": ("dense", "sparse"),
    },
    "KimiLinearForCausalLM": {
        **{
            key: choices for key, choices in LATENTS.items() if key not in ("n_routed_experts", "first_k_dense_replace")
        },
        "num_local_experts": (8, 16),
        "n_group": (1, 2),
        "topk_group": (1,),
        "norm_topk_prob": FLAGS,
        "layer_types": ("full_attention", "linear_attention", "linear_attention"),
        "mlp_layer_types": ("dense", "sparse"),
        "linear_num_heads": (2, 4),
        "linear_head_dim": (8, 16, 32),
        "linear_conv_kernel_dim": (2, 4),
    },
    "Ernie4_5_MoeForCausalLM": {
        "moe_k": (1, 2, 3),
        "moe_num_experts": (3, 6),
        "moe_intermediate_size": (12, 20),
        "moe_num_shared_experts": (0, 1, 2),
        "moe_layer_start_index": (0, 1),
        "use_bias": FLAGS,
    },
    "GraniteMoeHybridForCausalLM": {
        **MAMBA,
        "layer_types": ("full_attention", "linear_attention", "linear_attention"),
        "num_local_experts": (0, 3, 6),
        "num_experts_per_tok": (1, 2, 3),
        "shared_intermediate_size": (16, 36),
        "position_embedding_type": (None, "rope"),
        "attention_bias": FLAGS,
        "hidden_act": ("silu", "gelu_pytorch_tanh"),
        "embedding_multiplier": (0.7, 3.0),
        "residual_multiplier": (0.3, 1.0),
        "attention_multiplier": (0.1, 0.3),
        "logits_scaling": (0.8,),
    },
    "BambaForCausalLM": {
        **MAMBA,
        "attn_layer_indices": ([0], [0, 1], [0, 2]),
        "attention_bias": FLAGS,
        "mlp_bias": FLAGS,
    },
    "FalconH1ForCausalLM": {
        **{key: choices for key, choices in MAMBA.items() if key != "mamba_expand"},
        "mamba_d_ssm": (32, 64),
        "mamba_rms_norm": FLAGS,
        "mamba_norm_before_gate": FLAGS,
        "projectors_bias": FLAGS,
        "attention_bias": FLAGS,
        "mlp_bias": FLAGS,
        "hidden_act": ("silu", "gelu_pytorch_tanh"),
        "embedding_multiplier": (0.7, 3.0),
        "lm_head_multiplier": (0.8,),
        "key_multiplier": (0.4, 1.0),
        "attention_in_multiplier": (1.0, 1.3),
        "attention_out_multiplier": (0.6, 1.0),
        "ssm_in_multiplier": (1.0, 1.3),
        "ssm_out_multiplier": (0.6, 1.0),
        "ssm_multipliers": (None, [0.4, 0.7, 1.4, 0.8, 1.2]),
        "mlp_multipliers": (None, [0.7, 1.0], [1.0, 0.6]),
    },
    "NemotronHForCausalLM": {
        "layers_block_type": ("full_attention", "linear_attention", "mlp", "moe"),
        "num_experts_per_tok": (1, 2, 3),
        "n_routed_experts": (8, 12),
        "moe_intermediate_size": (12, 20),
        "moe_shared_expert_intermediate_size": (16, 36),
        "moe_latent_size": (None, 32),
        "n_group": (1, 2),
        "topk_group": (1,),
        "norm_topk_prob": FLAGS,
        "routed_scaling_factor": (1.0, 2.5),
        "mlp_hidden_act": ("relu2", "silu"),
        "mlp_bias": FLAGS,
        "use_bias": FLAGS,
        "use_conv_bias": FLAGS,
        "mamba_num_heads": (2, 4),
        "mamba_head_dim": (8, 16),
        "n_groups": (1, 2),
        "ssm_state_size": (8, 16, 48),
        "conv_kernel": (2, 4),
        "chunk_size": (8,),
        "time_step_min": (1e-9,),  # or transformers has other steps of time in prompts than in answers
    },
    "Lfm2ForCausalLM": {
        **LFM2,
        "block_auto_adjust_ff_dim": FLAGS,
        "block_multiple_of": (8, 12),
        "block_ffn_dim_multiplier": (0.7, 1.0),
    },
    "Lfm2MoeForCausalLM": {
        **LFM2,
        "num_experts": (3, 6),
        "num_experts_per_tok": (1, 2, 3),
        "moe_intermediate_size": (12, 20),
        "num_dense_layers": (0, 1),
        "use_expert_bias": FLAGS,
        "norm_topk_prob": FLAGS,
        "routed_scaling_factor": (1.0, 2.5),
    },
    "GptOssForCausalLM": {**SOME_WINDOWS, **EXPERTS, "num_local_experts": (3, 6), "attention_bias": FLAGS},
    "SmolLM3ForCausalLM": {**SOME_WINDOWS, "use_sliding_window": FLAGS, "no_rope_layers": (0, 1), "mlp_bias": FLAGS},
    "Olmo2ForCausalLM": {"attention_bias": FLAGS},
    "Olmo3ForCausalLM": {**SOME_WINDOWS, "attention_bias": FLAGS},
    "GlmForCausalLM": {"attention_bias": FLAGS, "partial_rotary_factor": PARTIAL},
    "Glm4ForCausalLM": {"attention_bias": FLAGS, "partial_rotary_factor": PARTIAL},
    "Ernie4_5ForCausalLM": {"use_bias": FLAGS},
    "SeedOssForCausalLM": {"attention_bias": FLAGS, "attention_out_bias": FLAGS, "mlp_bias": FLAGS},
    "Exaone4ForCausalLM": SOME_WINDOWS,
    "Gemma2ForCausalLM": GEMMA,
    "Gemma3ForCausalLM": GEMMA,
    "Gemma4ForCausalLM": {
        **GEMMA_4,
        "hidden_size_per_layer_input": (0, 8, 24),
        "vocab_size_per_layer_input": (260, 300),
        "enable_moe_block": FLAGS,
        "num_experts": (3, 6),
        "top_k_experts": (1, 2, 3),
        "moe_intermediate_size": (12, 20),
    },
    "Gemma4UnifiedForCausalLM": GEMMA_4,
    "CohereForCausalLM": {"attention_bias": FLAGS, "logit_scale": (0.1, 2.0)},
    "Cohere2ForCausalLM": {**SOME_WINDOWS, "attention_bias": FLAGS, "logit_scale": (0.1, 2.0)},
    "StableLmForCausalLM": {
        "use_qkv_bias": FLAGS,
        "use_parallel_residual": FLAGS,
        "partial_rotary_factor": PARTIAL,
        "hidden_act": ("silu", "gelu"),
    },
    "Starcoder2ForCausalLM": {"sliding_window": (None, *WINDOWS), "use_bias": FLAGS},
    "ArceeForCausalLM": {"attention_bias": FLAGS, "mlp_bias": FLAGS},
    "NemotronForCausalLM": {"attention_bias": FLAGS, "mlp_bias": FLAGS, "partial_rotary_factor": PARTIAL},
    "PhiForCausalLM": {"partial_rotary_factor": PARTIAL},
    "GPTNeoXForCausalLM": {
        "attention_bias": FLAGS,
        "use_parallel_residual": FLAGS,
        "partial_rotary_factor": PARTIAL,
        "hidden_act": ("gelu", "gelu_new", "relu"),
    },
    "GPT2LMHeadModel": {"activation_function": ("gelu_new", "gelu", "relu"), "n_inner": (None, 40)},
    "OPTForCausalLM": {"enable_bias": FLAGS, "activation_function": ("relu", "gelu"), "ffn_dim": (40, 100)},
}
"""Architecture -> what it has beside sizes: each key's possible values."""
NO_HEAD_DIM = {
    "Qwen2MoeForCausalLM", "GraniteMoeForCausalLM", "GraniteMoeHybridForCausalLM", "BambaForCausalLM",
    "GPTNeoXForCausalLM", "GPT2LMHeadModel", "OPTForCausalLM", "PhiForCausalLM", "StableLmForCausalLM",
    "CohereForCausalLM", "Olmo2ForCausalLM", "Phi3ForCausalLM", "Qwen2ForCausalLM", "GraniteForCausalLM",
    "Olmo3ForCausalLM", "Starcoder2ForCausalLM", "SmolLM3ForCausalLM", "Cohere2ForCausalLM",
    "FalconH1ForCausalLM",
}  # fmt: skip
"""Heads are as wide as makes them the hidden size together."""
ONE_KV_HEAD_EACH = {"GPTNeoXForCausalLM", "GPT2LMHeadModel", "OPTForCausalLM"}
OF_LATENTS = {"DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "Glm4MoeLiteForCausalLM", "KimiLinearForCausalLM"}
OF_STATES = {
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_head_dim": 32,
    "mamba_d_ssm": 64,
    "mamba_d_state": 16,
    "mamba_expand": 2,
    "mamba_head_dim": 16,
    "ssm_state_size": 16,
}
"""Of what layers in C++ take multiples."""
WIDE = {"global_head_dim": (32, 64, 96), "hidden_size_per_layer_input": (0, 32, 64)}
"""Choices in the place of others, for layers in C++."""
WITH_SCALED_GATES = {"FalconH1ForCausalLM"}
"""C++ multiplies gates and ups in multiples."""
OWN_ROTATION = {"Gemma3ForCausalLM", "Olmo3ForCausalLM"}
"""Rotary parameters differ between types of layers."""
PROPORTIONAL = {"Gemma4ForCausalLM", "Gemma4UnifiedForCausalLM"}
"""So do they, and of those without a window some pairs are not rotated."""
NOT_ROTATED = {"GPT2LMHeadModel", "OPTForCausalLM", "KimiLinearForCausalLM"}


def draw_config(architecture: str, seed: int, *, is_wide: bool = False) -> PreTrainedConfig:
    """The configuration of this seed. `is_wide`: of sizes that layers in C++ take."""
    assert OPTIONS.keys() == FAMILIES.keys(), "every native family has its options here"
    rng = Random(f"{architecture} {seed}")
    num_kv_heads, num_layers = rng.choice((1, 2, 3)), rng.randint(1, 4)
    num_heads = num_kv_heads * (1 if architecture in ONE_KV_HEAD_EACH else rng.choice((1, 2, 4)))
    head_dim = rng.choice((32, 64, 96) if is_wide else (8, 16, 24, 40))
    width = rng.choice((32, 64) if is_wide else (4, 8, 20))
    values: dict[str, Any] = {
        "vocab_size": rng.randint(203, 260),
        "hidden_size": num_heads * head_dim if architecture in NO_HEAD_DIM else num_heads * width,
        "intermediate_size": rng.choice(
            (32, 64, 96) if is_wide and architecture in WITH_SCALED_GATES else (16, 36, 92)
        ),
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": 128,
        "tie_word_embeddings": rng.random() < 0.3,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    if architecture in NO_HEAD_DIM:
        del values["head_dim"]
    if architecture in OF_LATENTS:
        del values["head_dim"]
        values |= _latent_sizes(rng, num_heads, is_wide=is_wide)
    for key, choices in OPTIONS[architecture].items():
        by_layer = key in ("layer_types", "layers_block_type", "no_rope_layers", "mlp_layer_types")
        if is_wide and key in WIDE:
            choices = WIDE[key]
        if is_wide and key in OF_STATES:
            choices = [size for size in choices if size % OF_STATES[key] == 0]
        values[key] = [rng.choice(choices) for _ in range(num_layers)] if by_layer else rng.choice(choices)
    kinds = values.get("layer_types") or values.get("layers_block_type")
    if kinds and not set(kinds) & {"full_attention", "sliding_attention"}:
        kinds[-1] = "full_attention"  # transformers' cache needs one
    if not values.get("use_sliding_window", True):
        values |= {"sliding_window": None, "layer_types": ["full_attention"] * num_layers}
    if architecture not in NOT_ROTATED:
        rope = {"rope_type": "default", "rope_theta": rng.choice((100.0, 10000.0))}
        if "partial_rotary_factor" in values:
            rope["partial_rotary_factor"] = values.pop("partial_rotary_factor")
        if architecture in OF_LATENTS and rng.random() < 0.5:
            rope |= {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
            rope |= rng.choice(({}, {"mscale": 1.0, "mscale_all_dim": 1.0}, {"mscale": 0.7, "mscale_all_dim": 1.3}))
        values["rope_parameters"] = rope
        if architecture in OWN_ROTATION:
            linear = {"rope_type": "linear", "rope_theta": 1000.0, "factor": 4.0}
            values["rope_parameters"] = {"sliding_attention": rope, "full_attention": linear}
        if architecture in PROPORTIONAL:
            partial = {"rope_type": "proportional", "rope_theta": 1000.0, "factor": rng.choice((1.0, 2.0))}
            partial["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
            values["rope_parameters"] = {"sliding_attention": rope, "full_attention": partial}
            _share_keys(values)
    if architecture == "OPTForCausalLM":
        values["word_embed_proj_dim"] = values["hidden_size"]
    return AutoConfig.for_model(MODEL_TYPES[architecture], **values)


def _share_keys(values: dict[str, Any]) -> None:
    """Of layers that earlier ones have keys for; the last layer has no window in these networks."""
    kinds = values["layer_types"]
    kinds[-1] = "full_attention"
    counts = range(min(values["num_kv_shared_layers"], len(kinds)) + 1)
    values["num_kv_shared_layers"] = max(
        count for count in counts if set(kinds[len(kinds) - count :]) <= set(kinds[: len(kinds) - count])
    )


def _latent_sizes(rng: Random, num_heads: int, *, is_wide: bool) -> dict[str, Any]:
    narrow = rng.choice((None, 32, 64) if is_wide else (None, 12, 28))
    return {
        "num_key_value_heads": num_heads,
        "q_lora_rank": narrow,
        # Without q_lora_rank transformers gives queries no bias, and computes them natively without any.
        "attention_bias": narrow is not None and rng.random() < 0.5,
        "kv_lora_rank": rng.choice((32, 64, 96) if is_wide else (8, 20, 36)),
        "qk_nope_head_dim": rng.choice((32, 64) if is_wide else (4, 12, 20)),
        "qk_rope_head_dim": rng.choice((32, 64) if is_wide else (4, 8, 12)),
        "v_head_dim": rng.choice((32, 64) if is_wide else (4, 12, 20)),
    }


MODEL_TYPES = {architecture: kind for kind, architecture in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()}
MODEL_TYPES |= {
    "Gemma3ForCausalLM": "gemma3_text",
    "Gemma4ForCausalLM": "gemma4_text",
    "Gemma4UnifiedForCausalLM": "gemma4_unified_text",
    "Qwen3_5ForCausalLM": "qwen3_5_text",
    "Qwen3_5MoeForCausalLM": "qwen3_5_moe_text",
}
