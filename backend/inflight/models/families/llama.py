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
    return Family(
        embedding=SplitByVocabulary("model.embed_tokens"),
        layers="model.layers",
        attention=AttentionTensors(
            norm=NotSplit("input_layernorm"),
            qkv=SplitByOutputs(
                ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
                bias=config.flag("attention_bias"),
            ),
            output=SplitByInputs("self_attn.o_proj", bias=config.flag("attention_bias")),
        ),
        mlp=MLPTensors(
            norm=NotSplit("post_attention_layernorm"),
            gate_up=SplitByOutputs(("mlp.gate_proj", "mlp.up_proj"), bias=config.flag("mlp_bias")),
            down=SplitByInputs("mlp.down_proj", bias=config.flag("mlp_bias")),
        ),
        norm=NotSplit("model.norm"),
        head=SplitByVocabulary("lm_head"),
    )
