"""The architectures of GGUF files, as llama.cpp calls them, and the classes of transformers that compute the same.

Each row says what llama.cpp's conversion of such a checkpoint writes, and what its loader takes for granted.
"""

from __future__ import annotations

from inflight.errors import ConfigurationError
from inflight.gguf.architecture import LAYER_NORM, Q_BIAS, Architecture, Windows
from inflight.gguf.experts import (
    CHOICE_BIAS,
    EXPERT_GROUPS,
    EXPERTS,
    LOCAL_EXPERTS,
    MIXTRAL_EXPERTS,
    QWEN_EXPERTS,
    ROUTED_EXPERTS,
    SHARED_EXPERT,
    SHARED_EXPERTS,
    SIGMOID,
    SOFTMAX,
)
from inflight.gguf.gemma4 import GEMMA_4
from inflight.gguf.hybrids import (
    DELTA_NET,
    DELTA_NET_MOE,
    FALCON_H1,
    GRANITE_4,
    GRANITE_SCALES,
    LFM2,
    LFM2_MOE,
    NEMOTRON_H,
    NEMOTRON_H_MOE,
    QWEN3_NEXT,
)
from inflight.gguf.latents import DEEPSEEK, KIMI_LINEAR
from inflight.gguf.metadata import Metadata
from inflight.gguf.orders import heads_with_all

ARCHITECTURE = "general.architecture"

O_BIAS, DOWN_BIAS = "self_attn.o_proj.bias", "mlp.down_proj.bias"
GELU_TANH = "gelu_pytorch_tanh"
NORMS_BEHIND = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
GEMMA_NORMS = {**NORMS_BEHIND, "ffn_norm": "pre_feedforward_layernorm"}
SOFT_CAPS = {"final_logit_softcapping": "final_logit_softcapping"}

MISTRAL = Architecture(
    network="MistralForCausalLM", model_type="mistral", rotates_neighbours=True, windows=Windows(), flags={}
)
MIXTRAL = Architecture(
    network="MixtralForCausalLM",
    model_type="mixtral",
    rotates_neighbours=True,
    names={"ffn_gate_inp": "block_sparse_moe.gate"},
    experts=MIXTRAL_EXPERTS,
    keys=LOCAL_EXPERTS,
    neutral={"expert_weights_norm": True, "expert_gating_func": SOFTMAX},
    windows=Windows(),
    flags={},
)
OLMO3 = Architecture(
    network="Olmo3ForCausalLM",
    model_type="olmo3",
    names=NORMS_BEHIND,
    windows=Windows(period=4, own_rope=True),
)
ARCHITECTURES = {
    "llama": Architecture(
        network="LlamaForCausalLM",
        model_type="llama",
        rotates_neighbours=True,
        variants={"expert_count": MIXTRAL, "attention.sliding_window": MISTRAL},
    ),
    "qwen2": Architecture(network="Qwen2ForCausalLM", model_type="qwen2", flags={}),
    "qwen2moe": Architecture(
        network="Qwen2MoeForCausalLM",
        model_type="qwen2_moe",
        names=SHARED_EXPERT,
        experts=EXPERTS,
        keys={**QWEN_EXPERTS, "expert_shared_feed_forward_length": "shared_expert_intermediate_size"},
        neutral={"expert_weights_norm": False, "expert_gating_func": SOFTMAX},
        flags={"qkv_bias": Q_BIAS},
        values={"norm_topk_prob": False, "decoder_sparse_step": 1, "mlp_only_layers": []},
    ),
    "qwen35": DELTA_NET,
    "qwen35moe": DELTA_NET_MOE,
    "qwen3next": QWEN3_NEXT,
    "qwen3": Architecture(network="Qwen3ForCausalLM", model_type="qwen3"),
    "qwen3moe": Architecture(
        network="Qwen3MoeForCausalLM",
        model_type="qwen3_moe",
        names={"ffn_gate_inp": "mlp.gate"},
        experts=EXPERTS,
        keys=QWEN_EXPERTS,
        neutral={"expert_weights_norm": True, "expert_gating_func": SOFTMAX},
        values={"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []},
    ),
    "phi2": Architecture(
        network="PhiForCausalLM",
        model_type="phi",
        rotates_parts=True,
        top={"output_norm": "model.final_layernorm"},
        names={"attn_output": "self_attn.dense", "ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"},
        norm_eps={LAYER_NORM: "layer_norm_eps"},
        flags={},
        values={"hidden_act": "gelu_new"},
    ),
    "phi3": Architecture(
        network="Phi3ForCausalLM",
        model_type="phi3",
        rotates_parts=True,
        names={"ffn_up": "mlp.gate_up_proj"},
        windows=Windows(),
    ),
    "granite": Architecture(
        network="GraniteForCausalLM",
        model_type="granite",
        rotates_neighbours=True,
        keys=GRANITE_SCALES,
        # Without it llama.cpp rotates nothing.
        neutral={"rope.scaling.finetuned": True},
    ),
    "granitemoe": Architecture(
        network="GraniteMoeForCausalLM",
        model_type="granitemoe",
        rotates_neighbours=True,
        names={"ffn_gate_inp": "block_sparse_moe.router.layer"},
        experts=EXPERTS,
        keys={**GRANITE_SCALES, **LOCAL_EXPERTS},
        neutral={"rope.scaling.finetuned": True, "expert_weights_norm": True, "expert_gating_func": SOFTMAX},
        flags={"attention_bias": Q_BIAS},
    ),
    "granitehybrid": GRANITE_4,
    "gemma2": Architecture(
        network="Gemma2ForCausalLM",
        model_type="gemma2",
        adds_one=True,
        names=GEMMA_NORMS,
        optional_keys={**SOFT_CAPS, "attn_logit_softcapping": "attn_logit_softcapping"},
        flags={"attention_bias": Q_BIAS},
        values={"hidden_activation": GELU_TANH},
        windows=Windows(period=2, size=4096),
        has_query_scalar=True,
        scalar_of_hidden=46,
    ),
    "gemma3": Architecture(
        network="Gemma3ForCausalLM",
        model_type="gemma3_text",
        adds_one=True,
        names=GEMMA_NORMS,
        optional_keys=SOFT_CAPS,
        flags={"attention_bias": Q_BIAS},
        values={"hidden_activation": GELU_TANH},
        windows=Windows(period=6, own_rope=True, theta=10000.0),
        has_query_scalar=True,
        scalar_of_hidden=62,
    ),
    "gemma4": GEMMA_4,
    "gpt-oss": Architecture(
        network="GptOssForCausalLM",
        model_type="gpt_oss",
        names={"post_attention_norm": "post_attention_layernorm", "ffn_gate_inp": "mlp.router"},
        whole_names={"attn_sinks.weight": "self_attn.sinks"},
        experts=EXPERTS,
        keys={**LOCAL_EXPERTS, "expert_feed_forward_length": "intermediate_size"},
        flags={"attention_bias": Q_BIAS},
        # As published.
        rope_values={"truncate": False},
        windows=Windows(period=2),
    ),
    "smollm3": Architecture(
        network="SmolLM3ForCausalLM",
        model_type="smollm3",
        rotates_neighbours=True,
        values={"no_rope_layer_interval": 4},
    ),
    "olmo2": Architecture(
        network="Olmo2ForCausalLM",
        model_type="olmo2",
        names=NORMS_BEHIND,
        variants={"attention.sliding_window": OLMO3},
    ),
    "glm4": Architecture(
        network="Glm4ForCausalLM",
        model_type="glm4",
        rotates_parts=True,
        names={
            "post_attention_norm": "post_self_attn_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
            "ffn_up": "mlp.gate_up_proj",
        },
        flags={"attention_bias": Q_BIAS},
    ),
    "chatglm": Architecture(
        network="GlmForCausalLM",
        model_type="glm",
        rotates_parts=True,
        names={"ffn_up": "mlp.gate_up_proj"},
        # As its own code has them; transformers' checkpoints have three.
        names_by_heads={"attn_qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")},
        flags={"attention_bias": Q_BIAS},
    ),
    "glm4moe": Architecture(
        network="Glm4MoeForCausalLM",
        model_type="glm4_moe",
        rotates_parts=True,
        names={**SHARED_EXPERTS, "post_attention_norm": "post_attention_layernorm"},
        whole_names=CHOICE_BIAS,
        experts=EXPERTS,
        keys={
            **ROUTED_EXPERTS,
            "expert_weights_scale": "routed_scaling_factor",
            "expert_weights_norm": "norm_topk_prob",
        },
        optional_keys=EXPERT_GROUPS,
        neutral={"expert_gating_func": SIGMOID},
        flags={"attention_bias": Q_BIAS, "use_qk_norm": "self_attn.q_norm.weight"},
    ),
    "command-r": Architecture(
        network="CohereForCausalLM",
        model_type="cohere",
        norm_eps={LAYER_NORM: "layer_norm_eps"},
        keys={"logit_scale": "logit_scale"},
        flags={"attention_bias": Q_BIAS, "use_qk_norm": "self_attn.q_norm.weight"},
    ),
    "cohere2": Architecture(
        network="Cohere2ForCausalLM",
        model_type="cohere2",
        norm_eps={LAYER_NORM: "layer_norm_eps"},
        keys={"logit_scale": "logit_scale"},
        flags={"attention_bias": Q_BIAS},
        windows=Windows(period=4),
    ),
    "starcoder2": Architecture(
        network="Starcoder2ForCausalLM",
        model_type="starcoder2",
        names={"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
        norm_eps={LAYER_NORM: "norm_epsilon"},
        flags={"use_bias": Q_BIAS},
        values={"hidden_act": GELU_TANH},
    ),
    "seed_oss": Architecture(
        network="SeedOssForCausalLM",
        model_type="seed_oss",
        names={"post_attention_norm": "post_attention_layernorm"},
        flags={"attention_bias": Q_BIAS, "attention_out_bias": O_BIAS, "mlp_bias": DOWN_BIAS},
    ),
    "exaone4": Architecture(
        network="Exaone4ForCausalLM",
        model_type="exaone4",
        names=NORMS_BEHIND,
        flags={},
        windows=Windows(period=4),
    ),
    "ernie4_5": Architecture(
        network="Ernie4_5ForCausalLM",
        model_type="ernie4_5",
        flags={"use_bias": Q_BIAS},
    ),
    "ernie4_5-moe": Architecture(
        network="Ernie4_5_MoeForCausalLM",
        model_type="ernie4_5_moe",
        names=SHARED_EXPERTS,
        whole_names={"exp_probs_b.bias": "mlp.moe_statics.e_score_correction_bias"},
        rows=frozenset({"exp_probs_b"}),
        experts=EXPERTS,
        keys={
            "expert_count": "moe_num_experts",
            "expert_used_count": "moe_k",
            "expert_feed_forward_length": "moe_intermediate_size",
            "expert_shared_count": "moe_num_shared_experts",
            "interleave_moe_layer_step": "moe_layer_interval",
            "leading_dense_block_count": "moe_layer_start_index",
        },
        neutral={"expert_weights_norm": True, "expert_gating_func": SOFTMAX},
        # It follows from the number of shared experts.
        told_by_tensors=frozenset({"expert_shared_feed_forward_length"}),
        flags={"use_bias": Q_BIAS},
        values={"moe_layer_end_index": -1},
    ),
    "minimax-m2": Architecture(
        network="MiniMaxM2ForCausalLM",
        model_type="minimax_m2",
        rotates_parts=True,
        names={"ffn_gate_inp": "block_sparse_moe.gate"},
        whole_names={"exp_probs_b.bias": "block_sparse_moe.e_score_correction_bias"},
        experts=MIXTRAL_EXPERTS,
        keys={**LOCAL_EXPERTS, "expert_feed_forward_length": "intermediate_size"},
        optional_keys={"rope.dimension_count": "rotary_dim"},
        neutral={"expert_weights_norm": True, "expert_gating_func": SIGMOID},
        flags={},
    ),
    "stablelm": Architecture(
        network="StableLmForCausalLM",
        model_type="stablelm",
        rotates_parts=True,
        norm_eps={LAYER_NORM: "layer_norm_eps"},
        keys={"use_parallel_residual": "use_parallel_residual"},
        flags={"use_qkv_bias": Q_BIAS},
    ),
    "gptneox": Architecture(
        network="GPTNeoXForCausalLM",
        model_type="gpt_neox",
        rotates_parts=True,
        layers="gpt_neox.layers",
        top={
            "token_embd": "gpt_neox.embed_in",
            "output_norm": "gpt_neox.final_layer_norm",
            "output": "embed_out",
        },
        names={
            "attn_qkv": "attention.query_key_value",
            "attn_output": "attention.dense",
            "ffn_norm": "post_attention_layernorm",
            "ffn_up": "mlp.dense_h_to_4h",
            "ffn_down": "mlp.dense_4h_to_h",
        },
        orders={"attn_qkv": heads_with_all},
        norm_eps={LAYER_NORM: "layer_norm_eps"},
        keys={"use_parallel_residual": "use_parallel_residual"},
        flags={"attention_bias": "attention.query_key_value.bias"},
        values={"hidden_act": "gelu"},
    ),
    "gpt2": Architecture(
        network="GPT2LMHeadModel",
        model_type="gpt2",
        layers="transformer.h",
        top={
            "token_embd": "transformer.wte",
            "position_embd": "transformer.wpe",
            "output_norm": "transformer.ln_f",
        },
        names={
            "attn_norm": "ln_1",
            "attn_qkv": "attn.c_attn",
            "attn_output": "attn.c_proj",
            "ffn_norm": "ln_2",
            "ffn_up": "mlp.c_fc",
            "ffn_down": "mlp.c_proj",
        },
        has_turned_matrices=True,
        norm_eps={LAYER_NORM: "layer_norm_epsilon"},
        flags={},
        values={"activation_function": "gelu_new"},
    ),
    "arcee": Architecture(
        network="ArceeForCausalLM",
        model_type="arcee",
        rotates_neighbours=True,
        values={"hidden_act": "relu2"},
    ),
    "deepseek2": DEEPSEEK,
    "kimi-linear": KIMI_LINEAR,
    "lfm2": LFM2,
    "lfm2moe": LFM2_MOE,
    "falcon-h1": FALCON_H1,
    "nemotron_h": NEMOTRON_H,
    "nemotron_h_moe": NEMOTRON_H_MOE,
    "nemotron": Architecture(
        network="NemotronForCausalLM",
        model_type="nemotron",
        rotates_parts=True,
        adds_one=True,
        norm_eps={LAYER_NORM: "norm_eps"},
        values={"hidden_act": "relu2"},
    ),
}
"""By general.architecture."""


def find_architecture(metadata: Metadata) -> Architecture:
    """Raises ConfigurationError, which names those that are supported."""
    name = metadata.text(ARCHITECTURE)
    if name not in ARCHITECTURES:
        raise ConfigurationError(
            f"{metadata.path}: {ARCHITECTURE} {name!r} is not supported in GGUF files; these are: "
            f"{', '.join(ARCHITECTURES)}"
        )
    found = ARCHITECTURES[name]
    for said, variant in found.variants.items():
        key, wanted = (said, None) if isinstance(said, str) else said
        value = metadata.values.get(f"{name}.{key}", 0)
        number = int(value) if isinstance(value, bool) else metadata.whole_of_all(f"{name}.{key}", 0)
        if number and wanted in (None, number):
            return variant
    return found
