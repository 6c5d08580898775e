"""Llama 2 and 3, and the many networks that are published under their name."""

from __future__ import annotations

from inflight.models.config_file import ConfigValues
from inflight.models.family import (
    AttentionTensors,
    Family,
    MLPTensors,
    NotSplit,
    SplitByInputs,
    SplitByOutputs,
    SplitByVocabulary,
)


def describe(config: ConfigValues) -> Family:
    """See Family."""
    return with_llamas_tensors(
        qkv_bias=config.flag("attention_bias"),
        output_bias=config.flag("attention_bias"),
        mlp_bias=config.flag("mlp_bias"),
    )


def with_llamas_tensors(
    *, qkv_bias: bool = False, output_bias: bool = False, mlp_bias: bool = False, head_norms: bool = False
) -> Family:
    """The description of a network with the tensors of Llama. `head_norms`: a norm on each head of queries and keys."""
    return Family(
        embedding=SplitByVocabulary("model.embed_tokens"),
        layers="model.layers",
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
        ),
        norm=NotSplit("model.norm"),
        head=SplitByVocabulary("lm_head"),
    )
