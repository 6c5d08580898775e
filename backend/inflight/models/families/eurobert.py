"""EuroBERT: Llama's layers whose tokens see those behind them, too."""

from __future__ import annotations

from dataclasses import replace

from inflight.models.config_file import ConfigValues
from inflight.models.families import llama
from inflight.models.family import EncoderTensors, Family, ScoreTensors
from inflight.models.split_tensors import SplitByOutputs
from inflight_kernels import Activation


def describe(config: ConfigValues) -> Family:
    """See Family."""
    encoder = EncoderTensors(embedding_norm=None, normalizes_sums=False)
    return replace(llama.describe(config), encoder=encoder, unread=("lm_head.",))


def describe_scores(config: ConfigValues) -> Family:
    """Of EuroBertForSequenceClassification, where the head reads one state of a text, and not each."""
    pooling = config.text("classifier_pooling", "late", "bos", "mean")
    if pooling == "late":
        raise config.not_native("classifier_pooling", "bos", "mean")
    head = ScoreTensors(
        num_labels=config.num_labels(),
        pooling="mean" if pooling == "mean" else "cls",
        dense=SplitByOutputs(("dense",), bias=True),
        activation=Activation.GELU,
        output=SplitByOutputs(("classifier",), bias=True),
    )
    return replace(describe(config), scores=head)
