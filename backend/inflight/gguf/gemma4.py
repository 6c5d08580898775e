"""Rows of the table of architectures: Gemma 4, whose layers with a window have heads of another size and number than
the others, and whose last layers attend to keys of earlier ones, with MLPs twice as wide in the small models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from inflight.errors import ConfigurationError
from inflight.gguf.architecture import Q_BIAS, Architecture, Windows
from inflight.gguf.experts import SOFTMAX
from inflight.gguf.file import GgufFile
from inflight.gguf.rotary import FACTORS

LAYER_INPUTS = "per_layer_token_embd.weight"
SHARED_LAYERS = "attention.shared_kv_layers"


def values_of(file: GgufFile, prefix: str, has_window: Sequence[bool]) -> dict[str, Any]:
    """What config.json has beside; `has_window`: each layer. Raises ConfigurationError."""
    metadata, num_layers = file.metadata, len(has_window)
    if FACTORS not in file.tensors:
        raise ConfigurationError(
            f"{file.path}: there is no tensor {FACTORS}, which says how much of a head is rotated without a window"
        )
    num_shared = metadata.whole(f"{prefix}.{SHARED_LAYERS}", 0)
    if not 0 <= num_shared < num_layers:
        raise ConfigurationError(
            f"{file.path}: {prefix}.{SHARED_LAYERS} ({num_shared}) must be less than {prefix}.block_count "
            f"({num_layers})"
        )
    num_own = num_layers - num_shared
    widths = metadata.of_layers(f"{prefix}.feed_forward_length", num_layers)
    width = widths[0]
    doubles = any(each != width for each in widths)
    if widths != (width,) * num_own + (2 * width if doubles else width,) * num_shared:
        raise ConfigurationError(
            f"{file.path}: {prefix}.feed_forward_length must be {width} of all layers, or twice that of the last ones, "
            f"which {prefix}.{SHARED_LAYERS} counts"
        )
    heads = metadata.of_layers(f"{prefix}.attention.head_count_kv", num_layers)
    of_windows, of_others = (
        {count for count, has in zip(heads, has_window, strict=True) if has == kind} for kind in (True, False)
    )
    if len(of_windows) > 1 or len(of_others) > 1:
        raise ConfigurationError(
            f"{file.path}: {prefix}.attention.head_count_kv differs between layers of one kind, which is not supported"
        )
    head_dim = metadata.whole(f"{prefix}.attention.key_length_swa")
    for key in ("attention.value_length_swa", "rope.dimension_count_swa"):
        if (found := metadata.whole(f"{prefix}.{key}", head_dim)) != head_dim:
            raise ConfigurationError(f"{file.path}: {prefix}.{key} ({found}) must be the key_length_swa ({head_dim})")
    own_others = [layer for layer in range(num_own) if not has_window[layer]]
    without = [layer for layer in own_others if f"blk.{layer}.attn_v.weight" not in file.tensors]
    if without and without != own_others:
        raise ConfigurationError(
            f"{file.path}: there is no tensor blk.{without[0]}.attn_v.weight, and other layers without a window have "
            "one"
        )
    table = file.tensors.get(LAYER_INPUTS)
    return {
        "intermediate_size": width,
        "use_double_wide_mlp": doubles,
        "num_key_value_heads": max(of_windows or of_others),
        "num_global_key_value_heads": max(of_others or of_windows),
        "head_dim": head_dim,
        "global_head_dim": metadata.whole(f"{prefix}.attention.key_length"),
        "attention_k_eq_v": bool(without),
        **({} if table is None else {"vocab_size_per_layer_input": table.shape[0]}),
    }


DENSE = Architecture(
    network="Gemma4ForCausalLM",
    model_type="gemma4_text",
    top={
        "per_layer_token_embd": "model.embed_tokens_per_layer",
        "per_layer_model_proj": "model.per_layer_model_projection",
        "per_layer_proj_norm": "model.per_layer_projection_norm",
    },
    names={
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
        "inp_gate": "per_layer_input_gate",
        "proj": "per_layer_projection",
        "post_norm": "post_per_layer_input_norm",
    },
    whole_names={"layer_output_scale.weight": "layer_scalar"},
    optional_keys={
        "final_logit_softcapping": "final_logit_softcapping",
        "embedding_length_per_layer_input": "hidden_size_per_layer_input",
        SHARED_LAYERS: "num_kv_shared_layers",
    },
    told_by_tensors=frozenset({"attention.key_length_swa", "attention.value_length_swa", "rope.dimension_count_swa"}),
    flags={"attention_bias": Q_BIAS},
    values={"hidden_activation": "gelu_pytorch_tanh"},
    defaults={"hidden_size_per_layer_input": 0},
    windows=Windows(period=6, own_rope=True, theta=10000.0),
    own_values=values_of,
)
GEMMA_4 = replace(
    DENSE,
    variants={
        "expert_count": replace(
            DENSE,
            names={
                **DENSE.names,
                "ffn_gate_inp": "router.proj",
                "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
                "post_ffw_norm_1": "post_feedforward_layernorm_1",
                "post_ffw_norm_2": "post_feedforward_layernorm_2",
            },
            whole_names={
                **DENSE.whole_names,
                "ffn_gate_inp.scale": "router.scale",
                "ffn_down_exps.scale": "router.per_expert_scale",
            },
            experts={
                "ffn_gate_exps": ("experts.{expert}.gate_proj",),
                "ffn_up_exps": ("experts.{expert}.up_proj",),
                "ffn_gate_up_exps": ("experts.{expert}.gate_proj", "experts.{expert}.up_proj"),
                "ffn_down_exps": ("experts.{expert}.down_proj",),
            },
            keys={
                "expert_count": "num_experts",
                "expert_used_count": "top_k_experts",
                "expert_feed_forward_length": "moe_intermediate_size",
            },
            neutral={"expert_gating_func": SOFTMAX},
            values={**DENSE.values, "enable_moe_block": True},
        )
    },
)
