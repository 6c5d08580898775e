"""What files call experts and their options, and what transformers calls them."""

from __future__ import annotations

SOFTMAX, SIGMOID = 1, 2
"""Values of expert_gating_func."""
MIXTRAL_EXPERTS = {
    "ffn_gate_exps": ("block_sparse_moe.experts.{expert}.w1",),
    "ffn_up_exps": ("block_sparse_moe.experts.{expert}.w3",),
    "ffn_gate_up_exps": ("block_sparse_moe.experts.{expert}.w1", "block_sparse_moe.experts.{expert}.w3"),
    "ffn_down_exps": ("block_sparse_moe.experts.{expert}.w2",),
}
EXPERTS = {
    "ffn_gate_exps": ("mlp.experts.{expert}.gate_proj",),
    "ffn_up_exps": ("mlp.experts.{expert}.up_proj",),
    "ffn_gate_up_exps": ("mlp.experts.{expert}.gate_proj", "mlp.experts.{expert}.up_proj"),
    "ffn_down_exps": ("mlp.experts.{expert}.down_proj",),
}
LOCAL_EXPERTS = {"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"}
QWEN_EXPERTS = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}
SHARED_EXPERT = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
SHARED_EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}
CHOICE_BIAS = {"exp_probs_b.bias": "mlp.gate.e_score_correction_bias"}
ROUTED_EXPERTS = {
    "expert_count": "n_routed_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_count": "n_shared_experts",
    "leading_dense_block_count": "first_k_dense_replace",
}
EXPERT_GROUPS = {"expert_group_count": "n_group", "expert_group_used_count": "topk_group"}
