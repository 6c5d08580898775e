"""Phi-3 and Phi-4: queries, keys and values are one tensor, gate and up another; a part of each head may be rotated."""

from __future__ import annotations

from inflight.models.config_file import ConfigValues
from inflight.models.family import AttentionTensors, Family, MLPTensors, NormStyle
from inflight.models.split_tensors import NotSplit, SplitByInputs, SplitByOutputs, SplitByVocabulary


def describe(config: ConfigValues) -> Family:
    """See Family."""
    return Family(
        embedding=SplitByVocabulary("model.embed_tokens"),
        layers="model.layers",
        norms=NormStyle(eps=config.eps("rms_norm_eps")),
        attention=AttentionTensors(
            norm=NotSplit("input_layernorm"),
            qkv=SplitByOutputs(("self_attn.qkv_proj",)),
            output=SplitByInputs("self_attn.o_proj"),
        ),
        mlp=MLPTensors(
            norm=NotSplit("post_attention_layernorm"),
            gate_up=SplitByOutputs(("mlp.gate_up_proj",)),
            down=SplitByInputs("mlp.down_proj"),
            activation=config.activation("hidden_act"),
        ),
        norm=NotSplit("model.norm"),
        head=SplitByVocabulary("lm_head"),
        windowed_layers="all",
        partial_rotary=True,
    )
