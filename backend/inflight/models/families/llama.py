"""Llama 2 and 3, and the many networks that are published under their name."""

from __future__ import annotations

from dataclasses import replace

from inflight.models.config_file import ConfigValues
from inflight.models.family import AttentionTensors, Family, MLPTensors, NormStyle
from inflight.models.split_tensors import NotSplit, SplitByInputs, SplitByOutputs, SplitByVocabulary


def describe(config: ConfigValues) -> Family:
    """See Family."""
    return with_llamas_tensors(
        config,
        qkv_bias=config.flag("attention_bias"),
        output_bias=config.flag("attention_bias"),
        mlp_bias=config.flag("mlp_bias"),
    )


def with_llamas_tensors(
    config: ConfigValues,
    *,
    norms: NormStyle | None = None,
    qkv_bias: bool = False,
    output_bias: bool = False,
    mlp_bias: bool = False,
    head_norms: bool = False,
    activation: str = "hidden_act",
) -> Family:
    """The description of a network with the tensors of Llama. `norms`: None = RMSNorm; `head_norms`: a norm on each
    head of queries and keys; `activation`: the key that names the feed-forward's."""
    return Family(
        embedding=SplitByVocabulary("model.embed_tokens"),
        layers="model.layers",
        norms=norms or NormStyle(eps=config.eps("rms_norm_eps")),
        attention=AttentionTensors(
            norm=NotSplit("input_layernorm"),
            qkv=SplitByOutputs(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), bias=qkv_bias),
            q_norm=NotSplit("self_attn.q_norm") if head_norms else None,
            k_norm=NotSplit("self_attn.k_norm") if head_norms else None,
            output=SplitByInputs("self_attn.o_proj", bias=output_bias),
        ),
        mlp=MLPTensors(
            norm=NotSplit("post_attention_layernorm"),
            gate_up=SplitByOutputs(("mlp.gate_proj", "mlp.up_proj"), bias=mlp_bias),
            down=SplitByInputs("mlp.down_proj", bias=mlp_bias),
            activation=config.activation(activation),
        ),
        norm=NotSplit("model.norm"),
        head=SplitByVocabulary("lm_head"),
    )


def with_norms_behind(family: Family) -> Family:
    """The same with each branch's norm behind it instead of before it, under the names that OLMo 2 gave them."""
    return replace(
        family,
        attention=replace(family.attention, norm=None, norm_after=NotSplit("post_attention_layernorm")),
        mlp=replace(family.mlp, norm=None, norm_after=NotSplit("post_feedforward_layernorm")),
    )
