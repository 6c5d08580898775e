"""Rows of the table of architectures: attention to latents."""

from __future__ import annotations

from dataclasses import replace

from inflight.gguf.architecture import Architecture
from inflight.gguf.experts import CHOICE_BIAS, EXPERT_GROUPS, EXPERTS, ROUTED_EXPERTS, SHARED_EXPERTS, SIGMOID, SOFTMAX

DEEPSEEK_V2 = Architecture(
    network="DeepseekV2ForCausalLM",
    model_type="deepseek_v2",
    names={
        **SHARED_EXPERTS,
        "attn_q_a": "self_attn.q_a_proj",
        "attn_q_a_norm": "self_attn.q_a_layernorm",
        "attn_q_b": "self_attn.q_b_proj",
        "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
        "attn_kv_a_norm": "self_attn.kv_a_layernorm",
        "attn_kv_b": "self_attn.kv_b_proj",
    },
    joined_names={"self_attn.kv_b_proj": ("attn_k_b", "attn_v_b")},
    experts=EXPERTS,
    keys={**ROUTED_EXPERTS, "attention.kv_lora_rank": "kv_lora_rank"},
    optional_keys={
        **EXPERT_GROUPS,
        "attention.q_lora_rank": "q_lora_rank",
        "expert_weights_scale": "routed_scaling_factor",
    },
    neutral={"expert_weights_norm": False, "expert_gating_func": SOFTMAX},
    flags={},
    # The choice among one group is the choice among all.
    values={"topk_method": "group_limited_greedy"},
    defaults={"n_group": 1, "topk_group": 1, "q_lora_rank": None, "routed_scaling_factor": 1.0},
    attends_to_latents=True,
)
DEEPSEEK_V3 = replace(
    DEEPSEEK_V2,
    network="DeepseekV3ForCausalLM",
    model_type="deepseek_v3",
    whole_names=CHOICE_BIAS,
    optional_keys={**DEEPSEEK_V2.optional_keys, "expert_weights_norm": "norm_topk_prob"},
    neutral={"expert_gating_func": SIGMOID},
    values={"rope_interleave": True},
    defaults={**DEEPSEEK_V2.defaults, "norm_topk_prob": False},
)
DEEPSEEK = replace(DEEPSEEK_V2, variants={("expert_gating_func", SIGMOID): DEEPSEEK_V3})
