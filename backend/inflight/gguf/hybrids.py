"""Rows of the table of architectures: networks with layers that keep a state for each sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from inflight.errors import ConfigurationError
from inflight.gguf.architecture import LAYER_NORM, Q_BIAS, Architecture
from inflight.gguf.experts import (
    EXPERT_GROUPS,
    EXPERTS,
    LOCAL_EXPERTS,
    MIXTRAL_EXPERTS,
    QWEN_EXPERTS,
    SHARED_EXPERT,
    SIGMOID,
    SOFTMAX,
)
from inflight.gguf.file import GgufFile
from inflight.gguf.orders import (
    numbers_of_value_heads,
    sections_by_key_heads,
    value_heads,
    value_heads_behind_keys,
)

GRANITE_SCALES = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}
DELTA_NET = Architecture(
    network="Qwen3_5ForCausalLM",
    model_type="qwen3_5_text",
    rotates_parts=True,
    adds_one=True,
    names={
        "post_attention_norm": "post_attention_layernorm",
        "attn_qkv": "linear_attn.in_proj_qkv",
        "attn_gate": "linear_attn.in_proj_z",
        "ssm_beta": "linear_attn.in_proj_b",
        "ssm_alpha": "linear_attn.in_proj_a",
        "ssm_conv1d": "linear_attn.conv1d",
        "ssm_norm": "linear_attn.norm",
        "ssm_out": "linear_attn.out_proj",
    },
    whole_names={"ssm_a": "linear_attn.A_log", "ssm_dt.bias": "linear_attn.dt_bias"},
    orders={
        "attn_qkv": value_heads_behind_keys,
        "attn_gate": value_heads,
        "ssm_beta": numbers_of_value_heads,
        "ssm_alpha": numbers_of_value_heads,
        "ssm_conv1d": value_heads_behind_keys,
        "ssm_a": numbers_of_value_heads,
        "ssm_dt": numbers_of_value_heads,
    },
    column_orders={"ssm_out": value_heads},
    keys={
        "ssm.conv_kernel": "linear_conv_kernel_dim",
        "ssm.state_size": "linear_key_head_dim",
        "ssm.group_count": "linear_num_key_heads",
        "ssm.time_step_rank": "linear_num_value_heads",
    },
    quotients={"linear_value_head_dim": ("ssm.inner_size", "ssm.time_step_rank")},
    flags={"attention_bias": Q_BIAS},
    kinds={"layer_types": {"ssm_conv1d": "linear_attention", "attn_q": "full_attention"}},
    # A text's positions are the same in each of the sections.
    told_by_tensors=frozenset({"full_attention_interval", "attention.recurrent_layers", "rope.dimension_sections"}),
)
DELTA_NET_MOE = replace(
    DELTA_NET,
    network="Qwen3_5MoeForCausalLM",
    model_type="qwen3_5_moe_text",
    names={**DELTA_NET.names, **SHARED_EXPERT},
    experts=EXPERTS,
    keys={
        **DELTA_NET.keys,
        **QWEN_EXPERTS,
        "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    },
    neutral={"expert_weights_norm": True, "expert_gating_func": SOFTMAX},
)
# Its published checkpoints have the inputs of a DeltaNet in two products, and its files in those of Qwen3.5.
QWEN3_NEXT = replace(
    DELTA_NET_MOE,
    shared_names={"ssm_ba": ("linear_attn.in_proj_b", "linear_attn.in_proj_a")},
    orders={"ssm_ba": sections_by_key_heads},
    column_orders={},
)
MAMBA = {"ssm_in": "mamba.in_proj", "ssm_conv1d": "mamba.conv1d", "ssm_out": "mamba.out_proj"}
MAMBA_WHOLE = {
    "ssm_a": "mamba.A_log",
    "ssm_d": "mamba.D",
    "ssm_dt.bias": "mamba.dt_bias",
    "ssm_norm.weight": "mamba.norm.weight",
}
MAMBA_KEYS = {
    "ssm.conv_kernel": "mamba_d_conv",
    "ssm.state_size": "mamba_d_state",
    "ssm.group_count": "mamba_n_groups",
    "ssm.time_step_rank": "mamba_n_heads",
}
MAMBA_HEADS = {"mamba_d_head": ("ssm.inner_size", "ssm.time_step_rank")}
MAMBA_BIASES = {"mamba_conv_bias": "mamba.conv1d.bias", "mamba_proj_bias": "mamba.in_proj.bias"}
GRANITE_HYBRID = Architecture(
    network="GraniteMoeHybridForCausalLM",
    model_type="granitemoehybrid",
    rotates_neighbours=True,
    names={**MAMBA, "ffn_down": "shared_mlp.output_linear"},
    whole_names=MAMBA_WHOLE,
    joined_names={"shared_mlp.input_linear": ("ffn_gate", "ffn_up")},
    keys={**GRANITE_SCALES, **MAMBA_KEYS, "expert_shared_feed_forward_length": "shared_intermediate_size"},
    quotients={**MAMBA_HEADS, "mamba_expand": ("ssm.inner_size", "embedding_length")},
    neutral={"rope.scaling.finetuned": False},
    flags={"attention_bias": Q_BIAS, **MAMBA_BIASES},
    kinds={"layer_types": {"ssm_in": "mamba", "attn_q": "attention"}},
    values={"num_local_experts": 0, "num_experts_per_tok": 0, "position_embedding_type": "nope"},
)


def _attending_layers(file: GgufFile, prefix: str, has_window: Sequence[bool]) -> dict[str, Any]:
    """Of Bamba, which always rotates half of each head."""
    rotated, num_heads = f"{prefix}.rope.dimension_count", file.metadata.whole_of_all(f"{prefix}.attention.head_count")
    head_dim = file.metadata.whole(f"{prefix}.embedding_length") // max(num_heads, 1)
    if 2 * file.metadata.whole(rotated) != head_dim:
        raise ConfigurationError(f"{file.path}: {rotated} must be half the size of a head ({head_dim})")
    attending = [layer for layer in range(len(has_window)) if f"blk.{layer}.attn_q.weight" in file.tensors]
    return {"attn_layer_indices": attending}


BAMBA = Architecture(
    network="BambaForCausalLM",
    model_type="bamba",
    rotates_neighbours=True,
    rotates_parts=True,
    top={"output_norm": "model.final_layernorm"},
    names={
        **MAMBA,
        "ffn_norm": "pre_ff_layernorm",
        "ffn_gate": "feed_forward.gate_proj",
        "ffn_up": "feed_forward.up_proj",
        "ffn_down": "feed_forward.down_proj",
    },
    whole_names=MAMBA_WHOLE,
    keys=MAMBA_KEYS,
    quotients={**MAMBA_HEADS, "mamba_expand": ("ssm.inner_size", "embedding_length")},
    neutral={"rope.scaling.finetuned": True},
    flags={"attention_bias": Q_BIAS, "mlp_bias": "feed_forward.down_proj.bias", **MAMBA_BIASES},
    own_values=_attending_layers,
)
GRANITE_4 = replace(
    GRANITE_HYBRID,
    variants={
        "rope.scaling.finetuned": BAMBA,
        "expert_count": replace(
            GRANITE_HYBRID,
            names={
                **MAMBA,
                "ffn_gate_inp": "block_sparse_moe.router.layer",
                "ffn_down_shexp": "shared_mlp.output_linear",
            },
            joined_names={"shared_mlp.input_linear": ("ffn_gate_shexp", "ffn_up_shexp")},
            experts=EXPERTS,
            keys={**GRANITE_HYBRID.keys, **LOCAL_EXPERTS},
            neutral={**GRANITE_HYBRID.neutral, "expert_weights_norm": True, "expert_gating_func": SOFTMAX},
            values={"position_embedding_type": "nope"},
        ),
    },
)
NEMOTRON_H = Architecture(
    network="NemotronHForCausalLM",
    model_type="nemotron_h",
    layers="backbone.layers",
    top={"token_embd": "backbone.embeddings", "output_norm": "backbone.norm_f"},
    names={
        "attn_norm": "norm",
        "attn_q": "mixer.q_proj",
        "attn_k": "mixer.k_proj",
        "attn_v": "mixer.v_proj",
        "attn_output": "mixer.o_proj",
        "ffn_up": "mixer.up_proj",
        "ffn_down": "mixer.down_proj",
        **{name: its.replace("mamba.", "mixer.") for name, its in MAMBA.items()},
    },
    whole_names={name: its.replace("mamba.", "mixer.") for name, its in MAMBA_WHOLE.items()},
    keys={
        "ssm.conv_kernel": "conv_kernel",
        "ssm.state_size": "ssm_state_size",
        "ssm.group_count": "n_groups",
        "ssm.time_step_rank": "mamba_num_heads",
    },
    norm_eps={LAYER_NORM: "layer_norm_epsilon"},
    optional_keys={"attention.layer_norm_rms_epsilon": "layer_norm_epsilon"},
    quotients={"mamba_head_dim": ("ssm.inner_size", "ssm.time_step_rank")},
    neutral={"rope.scaling.finetuned": False},
    flags={
        "use_bias": "mixer.in_proj.bias",
        "use_conv_bias": "mixer.conv1d.bias",
        "mlp_bias": "mixer.up_proj.bias",
        "attention_bias": "mixer.q_proj.bias",
    },
    kinds={"layers_block_type": {"ssm_in": "mamba", "attn_q": "attention", "ffn_gate_inp": "moe", "ffn_up": "mlp"}},
    values={"mlp_hidden_act": "relu2", "mamba_hidden_act": "silu"},
)
NEMOTRON_H_MOE = replace(
    NEMOTRON_H,
    names={
        **NEMOTRON_H.names,
        "ffn_gate_inp": "mixer.gate",
        "ffn_up_shexp": "mixer.shared_experts.up_proj",
        "ffn_down_shexp": "mixer.shared_experts.down_proj",
        "ffn_latent_down": "mixer.fc1_latent_proj",
        "ffn_latent_up": "mixer.fc2_latent_proj",
    },
    whole_names={**NEMOTRON_H.whole_names, "exp_probs_b.bias": "mixer.gate.e_score_correction_bias"},
    experts={
        "ffn_up_exps": ("mixer.experts.{expert}.up_proj",),
        "ffn_down_exps": ("mixer.experts.{expert}.down_proj",),
    },
    keys={
        **NEMOTRON_H.keys,
        "expert_count": "n_routed_experts",
        "expert_used_count": "num_experts_per_tok",
        "expert_feed_forward_length": "moe_intermediate_size",
        "expert_shared_feed_forward_length": "moe_shared_expert_intermediate_size",
        "expert_shared_count": "n_shared_experts",
        "expert_weights_norm": "norm_topk_prob",
        "expert_weights_scale": "routed_scaling_factor",
    },
    optional_keys={**NEMOTRON_H.optional_keys, **EXPERT_GROUPS, "moe_latent_size": "moe_latent_size"},
    neutral={**NEMOTRON_H.neutral, "expert_gating_func": SIGMOID},
    defaults={"n_group": 1, "topk_group": 1, "moe_latent_size": None},
    flags={**NEMOTRON_H.flags, "mlp_bias": "mixer.shared_experts.up_proj.bias"},
)
LFM2 = Architecture(
    network="Lfm2ForCausalLM",
    model_type="lfm2",
    top={"output_norm": "model.embedding_norm", "token_embd_norm": "model.embedding_norm"},
    names={
        "attn_norm": "operator_norm",
        "attn_q_norm": "self_attn.q_layernorm",
        "attn_k_norm": "self_attn.k_layernorm",
        "attn_output": "self_attn.out_proj",
        "ffn_norm": "ffn_norm",
        "ffn_gate": "feed_forward.w1",
        "ffn_up": "feed_forward.w3",
        "ffn_down": "feed_forward.w2",
        "shortconv.conv": "conv.conv",
        "shortconv.in_proj": "conv.in_proj",
        "shortconv.out_proj": "conv.out_proj",
    },
    keys={"shortconv.l_cache": "conv_L_cache"},
    norm_eps={"attention.layer_norm_rms_epsilon": "norm_eps"},
    flags={"conv_bias": "conv.conv.bias"},
    kinds={"layer_types": {"shortconv.conv": "conv", "attn_q": "full_attention"}},
    values={"block_auto_adjust_ff_dim": False},
)
LFM2_MOE = replace(
    LFM2,
    network="Lfm2MoeForCausalLM",
    model_type="lfm2_moe",
    names={**LFM2.names, "ffn_gate_inp": "feed_forward.gate"},
    whole_names={"exp_probs_b.bias": "feed_forward.expert_bias"},
    experts={
        stem: tuple(name.replace("block_sparse_moe", "feed_forward") for name in names)
        for stem, names in MIXTRAL_EXPERTS.items()
    },
    keys={**LFM2.keys, **QWEN_EXPERTS, "leading_dense_block_count": "num_dense_layers"},
    neutral={"expert_gating_func": SIGMOID, "expert_weights_norm": True},
    flags={**LFM2.flags, "use_expert_bias": "feed_forward.expert_bias"},
    values={"norm_topk_prob": True},
)
FALCON_H1 = Architecture(
    network="FalconH1ForCausalLM",
    model_type="falcon_h1",
    top={"output_norm": "model.final_layernorm"},
    names={
        **MAMBA,
        "ffn_gate": "feed_forward.gate_proj",
        "ffn_up": "feed_forward.up_proj",
        "ffn_down": "feed_forward.down_proj",
    },
    whole_names={**MAMBA_WHOLE, "ffn_norm": "pre_ff_layernorm.weight"},
    keys={**MAMBA_KEYS, "ssm.inner_size": "mamba_d_ssm"},
    quotients=MAMBA_HEADS,
    flags={
        "attention_bias": Q_BIAS,
        "mlp_bias": "feed_forward.down_proj.bias",
        "projectors_bias": "mamba.out_proj.bias",
        "mamba_rms_norm": "mamba.norm.weight",
        **MAMBA_BIASES,
    },
    # Weights are multiplied with all constants.
    values={
        "mamba_norm_before_gate": False,
        **dict.fromkeys(
            (
                "embedding_multiplier",
                "lm_head_multiplier",
                "key_multiplier",
                "attention_in_multiplier",
                "attention_out_multiplier",
                "ssm_in_multiplier",
                "ssm_out_multiplier",
            ),
            1.0,
        ),
        "mlp_multipliers": [1.0, 1.0],
        "ssm_multipliers": [1.0] * 5,
    },
)
