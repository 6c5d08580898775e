"""GPT-NeoX and Pythia: LayerNorm, branches in parallel by an option, a head's queries, keys and values side by side."""

from __future__ import annotations

from inflight.models.config_file import ConfigValues
from inflight.models.family import AttentionTensors, Family, MLPTensors, NormStyle
from inflight.models.split_tensors import NotSplit, SplitByInputs, SplitByOutputs, SplitByVocabulary


def describe(config: ConfigValues) -> Family:
    """See Family."""
    bias = config.flag("attention_bias")
    head_dim = config.whole("hidden_size") // config.whole("num_attention_heads")
    return Family(
        embedding=SplitByVocabulary("gpt_neox.embed_in"),
        layers="gpt_neox.layers",
        norms=NormStyle(eps=config.eps("layer_norm_eps"), centers=True, bias=True),
        num_kv_heads=config.whole("num_attention_heads"),
        attention=AttentionTensors(
            norm=NotSplit("input_layernorm"),
            qkv=SplitByOutputs(("attention.query_key_value",), bias=bias, alternating=(head_dim,) * 3),
            output=SplitByInputs("attention.dense", bias=bias),
        ),
        mlp=MLPTensors(
            norm=NotSplit("post_attention_layernorm"),
            gate_up=SplitByOutputs(("mlp.dense_h_to_4h",), bias=True),
            down=SplitByInputs("mlp.dense_4h_to_h", bias=True),
            is_gated=False,
            activation=config.activation("hidden_act"),
        ),
        is_parallel=config.flag("use_parallel_residual"),
        norm=NotSplit("gpt_neox.final_layer_norm"),
        head=SplitByVocabulary("embed_out"),
        partial_rotary=True,
    )
