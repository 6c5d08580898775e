"""DistilBERT: BERT's layers under other names, without types of tokens."""

from __future__ import annotations

from inflight.models.config_file import ConfigValues
from inflight.models.families.bert import with_scores
from inflight.models.family import (
    AttentionTensors,
    EncoderTensors,
    Family,
    LearnedPositions,
    MLPTensors,
    NormStyle,
    ScoreTensors,
)
from inflight.models.split_tensors import NotSplit, SplitByInputs, SplitByOutputs, SplitByVocabulary
from inflight_kernels import Activation

EPS = 1e-12
"""config.json does not say it."""


def describe(config: ConfigValues) -> Family:
    """See Family."""
    embeddings = "distilbert.embeddings"
    return Family(
        embedding=SplitByVocabulary(f"{embeddings}.word_embeddings"),
        positions=LearnedPositions(f"{embeddings}.position_embeddings"),
        layers="distilbert.transformer.layer",
        norms=NormStyle(eps=EPS, centers=True, bias=True),
        num_kv_heads=config.whole("num_attention_heads"),
        attention=AttentionTensors(
            norm=NotSplit("sa_layer_norm"),
            qkv=SplitByOutputs(tuple(f"attention.{name}_lin" for name in "qkv"), bias=True),
            output=SplitByInputs("attention.out_lin", bias=True),
        ),
        mlp=MLPTensors(
            norm=NotSplit("output_layer_norm"),
            gate_up=SplitByOutputs(("ffn.lin1",), bias=True),
            down=SplitByInputs("ffn.lin2", bias=True),
            is_gated=False,
            intermediate_size=config.whole("hidden_dim"),
            activation=config.activation("activation"),
        ),
        norm=None,
        head=SplitByVocabulary(f"{embeddings}.word_embeddings"),
        encoder=EncoderTensors(embedding_norm=NotSplit(f"{embeddings}.LayerNorm")),
        rotated_layers=frozenset(),
        unread=("vocab_",),
    )


def describe_scores(config: ConfigValues) -> Family:
    """Of DistilBertForSequenceClassification."""
    head = ScoreTensors(
        num_labels=config.num_labels(),
        pooling="cls",
        dense=SplitByOutputs(("pre_classifier",), bias=True),
        activation=Activation.RELU,
        output=SplitByOutputs(("classifier",), bias=True),
    )
    return with_scores(describe(config), head)
