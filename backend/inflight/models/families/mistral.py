"""Mistral: Llama without biases; with a sliding window, it applies to all layers."""

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
            qkv=SplitByOutputs(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
            output=SplitByInputs("self_attn.o_proj"),
        ),
        mlp=MLPTensors(
            norm=NotSplit("post_attention_layernorm"),
            gate_up=SplitByOutputs(("mlp.gate_proj", "mlp.up_proj")),
            down=SplitByInputs("mlp.down_proj"),
        ),
        norm=NotSplit("model.norm"),
        head=SplitByVocabulary("lm_head"),
        windowed_layers="all",
    )
