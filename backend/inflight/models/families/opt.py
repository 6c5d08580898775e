"""OPT: LayerNorm, learned positions of which the first is row 2."""

from __future__ import annotations

from inflight.models.config_file import ConfigValues
from inflight.models.family import AttentionTensors, Family, LearnedPositions, MLPTensors, NormStyle
from inflight.models.split_tensors import NotSplit, SplitByInputs, SplitByOutputs, SplitByVocabulary

EPS = 1e-5
"""config.json does not say it."""


def describe(config: ConfigValues) -> Family:
    """See Family."""
    for key in ("do_layer_norm_before", "layer_norm_elementwise_affine"):
        if not config.flag(key):
            raise config.not_native(key, "true")
    if config.flag("_remove_final_layer_norm"):
        raise config.not_native("_remove_final_layer_norm", "false")
    if config.optional_whole("word_embed_proj_dim") not in (None, config.whole("hidden_size")):
        raise config.not_native("word_embed_proj_dim", "hidden_size")
    bias = config.flag("enable_bias")
    return Family(
        embedding=SplitByVocabulary("model.decoder.embed_tokens"),
        positions=LearnedPositions("model.decoder.embed_positions", first=2),
        layers="model.decoder.layers",
        norms=NormStyle(eps=EPS, centers=True, bias=True),
        num_kv_heads=config.whole("num_attention_heads"),
        attention=AttentionTensors(
            norm=NotSplit("self_attn_layer_norm"),
            qkv=SplitByOutputs(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), bias=bias),
            output=SplitByInputs("self_attn.out_proj", bias=bias),
        ),
        mlp=MLPTensors(
            norm=NotSplit("final_layer_norm"),
            gate_up=SplitByOutputs(("fc1",), bias=bias),
            down=SplitByInputs("fc2", bias=bias),
            is_gated=False,
            intermediate_size=config.whole("ffn_dim"),
            activation=config.activation("activation_function"),
        ),
        norm=NotSplit("model.decoder.final_layer_norm"),
        head=SplitByVocabulary("lm_head"),
        rotated_layers=frozenset(),
    )
