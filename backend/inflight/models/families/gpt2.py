"""GPT-2: LayerNorm, learned positions, weights that the checkpoint has transposed."""

from __future__ import annotations

from inflight.models.config_file import ConfigValues
from inflight.models.family import AttentionTensors, Family, LearnedPositions, MLPTensors, NormStyle
from inflight.models.split_tensors import NotSplit, SplitByInputs, SplitByOutputs, SplitByVocabulary


def describe(config: ConfigValues) -> Family:
    """See Family."""
    for key in ("scale_attn_by_inverse_layer_idx", "add_cross_attention"):
        if config.flag(key):
            raise config.not_native(key, "false")
    if not config.flag("scale_attn_weights"):
        raise config.not_native("scale_attn_weights", "true")
    return Family(
        embedding=SplitByVocabulary("transformer.wte"),
        positions=LearnedPositions("transformer.wpe"),
        layers="transformer.h",
        norms=NormStyle(eps=config.eps("layer_norm_epsilon"), centers=True, bias=True),
        num_kv_heads=config.whole("num_attention_heads"),
        attention=AttentionTensors(
            norm=NotSplit("ln_1"),
            qkv=SplitByOutputs(("attn.c_attn",), bias=True, transposed=True),
            output=SplitByInputs("attn.c_proj", bias=True, transposed=True),
        ),
        mlp=MLPTensors(
            norm=NotSplit("ln_2"),
            gate_up=SplitByOutputs(("mlp.c_fc",), bias=True, transposed=True),
            down=SplitByInputs("mlp.c_proj", bias=True, transposed=True),
            is_gated=False,
            intermediate_size=config.optional_whole("n_inner") or 4 * config.whole("hidden_size"),
            activation=config.activation("activation_function"),
        ),
        norm=NotSplit("transformer.ln_f"),
        head=SplitByVocabulary("lm_head"),
        rotated_layers=frozenset(),
    )
