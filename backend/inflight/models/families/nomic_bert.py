"""Nomic's BERT and jina-embeddings-v3: encoders that normalise sums, with rotated heads. Names are those of the
published checkpoints."""

from __future__ import annotations

from typing import Any

from inflight.models.config_file import ConfigValues
from inflight.models.family import AttentionTensors, EncoderTensors, Family, MLPTensors, NormStyle
from inflight.models.split_tensors import NotSplit, SplitByInputs, SplitByOutputs, SplitByVocabulary

OTHERWISE_NAMED = {
    "n_embd": "hidden_size",
    "n_head": "num_attention_heads",
    "n_layer": "num_hidden_layers",
    "n_inner": "intermediate_size",
    "layer_norm_epsilon": "layer_norm_eps",
}
"""Keys of Nomic's own config.json, which transformers does not read -> those that it reads."""
COMPUTED: dict[str, Any] = {
    "causal": False,
    "parallel_block": False,
    "prenorm": False,
    "rotary_emb_fraction": 1.0,
    "rotary_emb_interleaved": False,
    "rotary_emb_scale_base": None,
    "rotary_scaling_factor": None,
    "use_rms_norm": False,
}
"""Others of it, with the only value that is computed here."""


def describe(config: ConfigValues) -> Family:
    """See Family."""
    values = config.values
    theta = (values.get("rope_parameters") or {}).get("rope_theta")
    wanted = {**COMPUTED, **{own: values.get(key) for own, key in OTHERWISE_NAMED.items()}, "rotary_emb_base": theta}
    for key, value in wanted.items():
        if values.get(key, value) not in (value, None):
            raise config.not_native(key, str(value))
    mlp = MLPTensors(
        norm=NotSplit("norm2"),
        gate_up=SplitByOutputs(("mlp.fc12", "mlp.fc11")),
        down=SplitByInputs("mlp.fc2"),
        activation=config.activation("hidden_act"),
    )
    return _with_tensors(config, "nomic_bert", "attn", mlp, bias=False)


def describe_jina(config: ConfigValues) -> Family:
    """Of jina-embeddings-v3 as transformers reads it, without the adapters of its tasks."""
    mlp = MLPTensors(
        norm=NotSplit("norm2"),
        gate_up=SplitByOutputs(("mlp.fc1",), bias=True),
        down=SplitByInputs("mlp.fc2", bias=True),
        is_gated=False,
        activation=config.activation("hidden_act"),
    )
    return _with_tensors(config, "roberta", "mixer", mlp, bias=True)


def _with_tensors(config: ConfigValues, body: str, attention: str, mlp: MLPTensors, *, bias: bool) -> Family:
    """`body`: what names begin with in checkpoints that have a head, too; `bias`: of attention."""
    return Family(
        embedding=SplitByVocabulary(f"{body}.embeddings.word_embeddings"),
        layers=f"{body}.encoder.layers",
        norms=NormStyle(eps=config.eps("layer_norm_eps"), centers=True, bias=True),
        num_kv_heads=config.whole("num_attention_heads"),
        attention=AttentionTensors(
            norm=NotSplit("norm1"),
            qkv=SplitByOutputs((f"{attention}.Wqkv",), bias=bias),
            output=SplitByInputs(f"{attention}.out_proj", bias=bias),
        ),
        mlp=mlp,
        norm=None,
        head=SplitByVocabulary(f"{body}.embeddings.word_embeddings"),
        encoder=EncoderTensors(
            embedding_norm=NotSplit(f"{body}.emb_ln"),
            types=NotSplit(f"{body}.embeddings.token_type_embeddings"),
            num_types=config.count("type_vocab_size"),
        ),
        unread=(f"{body}.pooler.", "pooler.", "cls.", "lm_head."),
    )
