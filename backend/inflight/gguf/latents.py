"""Rows of the table of architectures: attention to latents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from inflight.gguf.architecture import Architecture
from inflight.gguf.experts import (
    CHOICE_BIAS,
    EXPERT_GROUPS,
    EXPERTS,
    LOCAL_EXPERTS,
    MIXTRAL_EXPERTS,
    ROUTED_EXPERTS,
    SHARED_EXPERTS,
    SIGMOID,
    SOFTMAX,
)
from inflight.gguf.file import GgufFile

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


def _delta_heads(file: GgufFile, prefix: str, has_window: Sequence[bool]) -> dict[str, Any]:
    """Of Kimi-Linear: its delta attention has as many heads as that to latents, as in llama.cpp."""
    return {"linear_num_heads": file.metadata.whole_of_all(f"{prefix}.attention.head_count")}


KIMI_LINEAR = replace(
    DEEPSEEK_V2,
    network="KimiLinearForCausalLM",
    model_type="kimi_linear",
    names={
        **DEEPSEEK_V2.names,
        "ssm_conv1d_q": "self_attn.q_conv1d",
        "ssm_conv1d_k": "self_attn.k_conv1d",
        "ssm_conv1d_v": "self_attn.v_conv1d",
        "ssm_f_a": "self_attn.f_a_proj",
        "ssm_f_b": "self_attn.f_b_proj",
        "ssm_g_a": "self_attn.g_a_proj",
        "ssm_g_b": "self_attn.g_b_proj",
        "ssm_beta": "self_attn.b_proj",
        "ssm_norm": "self_attn.o_norm",
        "ffn_gate_inp": "block_sparse_moe.gate",
        **{stem: name.replace("mlp.", "block_sparse_moe.") for stem, name in SHARED_EXPERTS.items()},
    },
    whole_names={
        "ssm_a": "self_attn.A_log",
        "ssm_dt.bias": "self_attn.dt_bias",
        "exp_probs_b.bias": "block_sparse_moe.gate.e_score_correction_bias",
    },
    ones={"ssm_a": (2, 1)},
    experts=MIXTRAL_EXPERTS,
    keys={
        **LOCAL_EXPERTS,
        "attention.kv_lora_rank": "kv_lora_rank",
        "expert_feed_forward_length": "moe_intermediate_size",
        "expert_shared_count": "n_shared_experts",
        "expert_weights_scale": "routed_scaling_factor",
        "ssm.conv_kernel": "linear_conv_kernel_dim",
        "kda.head_dim": "linear_head_dim",
    },
    optional_keys={**EXPERT_GROUPS, "attention.q_lora_rank": "q_lora_rank"},
    neutral={"expert_weights_norm": True, "expert_gating_func": SIGMOID},
    kinds={
        "layer_types": {"ssm_conv1d_q": "linear_attention", "attn_kv_a_mqa": "full_attention"},
        "mlp_layer_types": {"ffn_gate_inp": "sparse", "ffn_up": "dense"},
    },
    told_by_tensors=frozenset({"leading_dense_block_count"}),
    values={"norm_topk_prob": True},
    defaults={"n_group": 1, "topk_group": 1, "q_lora_rank": None},
    own_values=_delta_heads,
)
DEEPSEEK = replace(DEEPSEEK_V2, variants={("expert_gating_func", SIGMOID): DEEPSEEK_V3})
