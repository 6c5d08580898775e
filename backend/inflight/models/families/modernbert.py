"""ModernBERT: an encoder with rotated heads, gated feed-forwards, and layers that see a window around each token."""

from __future__ import annotations

from dataclasses import replace

from inflight.models.config_file import ConfigValues
from inflight.models.family import AttentionTensors, EncoderTensors, Family, MLPTensors, NormStyle, ScoreTensors
from inflight.models.split_tensors import NotSplit, SplitByInputs, SplitByOutputs, SplitByVocabulary


def describe(config: ConfigValues) -> Family:
    """See Family."""
    attention_bias, mlp_bias = config.flag("attention_bias"), config.flag("mlp_bias")
    return Family(
        embedding=SplitByVocabulary("model.embeddings.tok_embeddings"),
        layers="model.layers",
        norms=NormStyle(eps=config.eps("norm_eps"), centers=True, bias=config.flag("norm_bias")),
        num_kv_heads=config.whole("num_attention_heads"),
        attention=AttentionTensors(
            norm=NotSplit("attn_norm"),
            qkv=SplitByOutputs(("attn.Wqkv",), bias=attention_bias),
            output=SplitByInputs("attn.Wo", bias=attention_bias),
        ),
        mlp=MLPTensors(
            norm=NotSplit("mlp_norm"),
            gate_up=SplitByOutputs(("mlp.Wi",), bias=mlp_bias),
            down=SplitByInputs("mlp.Wo", bias=mlp_bias),
            activation=config.activation("hidden_activation"),
        ),
        norm=NotSplit("model.final_norm"),
        head=SplitByVocabulary("model.embeddings.tok_embeddings"),
        encoder=EncoderTensors(embedding_norm=NotSplit("model.embeddings.norm"), normalizes_sums=False),
        windowed_layers="layer_types",
        window=config.whole("local_attention") // 2,
        unread=("head.", "decoder."),
    )


def describe_scores(config: ConfigValues) -> Family:
    """Of ModernBertForSequenceClassification."""
    head = ScoreTensors(
        num_labels=config.num_labels(),
        pooling="mean" if config.text("classifier_pooling", "cls", "mean") == "mean" else "cls",
        dense=SplitByOutputs(("head.dense",), bias=config.flag("classifier_bias")),
        activation=config.activation("classifier_activation"),
        norm=NotSplit("head.norm"),
        output=SplitByOutputs(("classifier",), bias=True),
    )
    return replace(describe(config), scores=head, unread=())
