"""BERT and what has its layers: RoBERTa, XLM-RoBERTa, CamemBERT, MPNet, ELECTRA, ERNIE. Encoders that normalise sums,
with learned positions."""

from __future__ import annotations

from dataclasses import replace

from inflight.models.config_file import ConfigValues
from inflight.models.family import (
    AttentionTensors,
    DescribeFamily,
    DistanceBias,
    EncoderTensors,
    Family,
    LearnedPositions,
    MLPTensors,
    NormStyle,
    ScoreTensors,
)
from inflight.models.split_tensors import NotSplit, SplitByInputs, SplitByOutputs, SplitByVocabulary
from inflight_kernels import Activation

MPNETS_FARTHEST = 128
"""config.json does not say it."""


def describe(config: ConfigValues) -> Family:
    """See Family."""
    return _with_berts_tensors(config, "bert")


def describe_ernie(config: ConfigValues) -> Family:
    """BERT's, under its own name."""
    if config.flag("use_task_id"):
        raise config.not_native("use_task_id", "false")
    return _with_berts_tensors(config, "ernie")


def describe_electra(config: ConfigValues) -> Family:
    """The same, where embeddings have as many features as layers."""
    if config.whole("embedding_size", "hidden_size") != (size := config.whole("hidden_size")):
        raise config.not_native("embedding_size", str(size))
    return _with_berts_tensors(config, "electra")


def scoring_pooled(describe_body: DescribeFamily, body: str) -> DescribeFamily:
    """The same with a head behind the pooler, which checkpoints without one have, too."""

    def describe_with_head(config: ConfigValues) -> Family:
        head = ScoreTensors(
            num_labels=config.num_labels(),
            pooling="cls",
            dense=SplitByOutputs((f"{body}.pooler.dense",), bias=True),
            output=SplitByOutputs(("classifier",), bias=True),
        )
        return with_scores(describe_body(config), head)

    return describe_with_head


def describe_roberta(config: ConfigValues) -> Family:
    """Positions begin behind the number of the padding token."""
    return replace(_with_berts_tensors(config, "roberta"), positions=_behind_padding(config, "roberta"))


def describe_mpnet(config: ConfigValues) -> Family:
    """Names of its own, no types of tokens, and a bias of scores by distance that all layers share."""
    family = _with_berts_tensors(config, "mpnet")
    assert family.encoder is not None
    bias = DistanceBias(
        name="mpnet.encoder.relative_attention_bias",
        num_buckets=config.whole("relative_attention_num_buckets"),
        max_distance=MPNETS_FARTHEST,
    )
    return replace(
        family,
        positions=_behind_padding(config, "mpnet", padding=1),
        attention=AttentionTensors(
            norm=NotSplit("attention.LayerNorm"),
            qkv=SplitByOutputs(tuple(f"attention.attn.{name}" for name in "qkv"), bias=True),
            output=SplitByInputs("attention.attn.o", bias=True),
        ),
        encoder=replace(family.encoder, types=None, num_types=0, distance_bias=bias),
    )


def scoring(describe_body: DescribeFamily, activation: Activation | None = None) -> DescribeFamily:
    """The same with the head that RoBERTa, MPNet and ELECTRA have for scores. `activation`: see ScoreTensors."""

    def describe_with_head(config: ConfigValues) -> Family:
        head = ScoreTensors(
            num_labels=config.num_labels(),
            pooling="cls",
            dense=SplitByOutputs(("classifier.dense",), bias=True),
            activation=activation,
            output=SplitByOutputs(("classifier.out_proj",), bias=True),
        )
        return with_scores(describe_body(config), head)

    return describe_with_head


def with_scores(family: Family, head: ScoreTensors) -> Family:
    """A pooler is read where it is part of the head."""
    assert head.dense is not None
    unread = tuple(name for name in family.unread if not head.dense.names[0].startswith(name))
    return replace(family, scores=head, unread=unread)


def _behind_padding(config: ConfigValues, body: str, padding: int | None = None) -> LearnedPositions:
    """`padding`: number of the padding token; None = as config.json says."""
    first = (config.count("pad_token_id") if padding is None else padding) + 1
    return LearnedPositions(f"{body}.embeddings.position_embeddings", first=first, counts_all=True)


def _with_berts_tensors(config: ConfigValues, body: str) -> Family:
    """`body`: what names begin with in checkpoints that have a head, too."""
    for key in ("is_decoder", "add_cross_attention"):
        if config.flag(key):
            raise config.not_native(key, "false")
    if config.text("position_embedding_type", "absolute", "relative_key", "relative_key_query") != "absolute":
        raise config.not_native("position_embedding_type", "absolute")
    names = ("attention.self.query", "attention.self.key", "attention.self.value")
    return Family(
        embedding=SplitByVocabulary(f"{body}.embeddings.word_embeddings"),
        positions=LearnedPositions(f"{body}.embeddings.position_embeddings"),
        layers=f"{body}.encoder.layer",
        norms=NormStyle(eps=config.eps("layer_norm_eps"), centers=True, bias=True),
        num_kv_heads=config.whole("num_attention_heads"),
        attention=AttentionTensors(
            norm=NotSplit("attention.output.LayerNorm"),
            qkv=SplitByOutputs(names, bias=True),
            output=SplitByInputs("attention.output.dense", bias=True),
        ),
        mlp=MLPTensors(
            norm=NotSplit("output.LayerNorm"),
            gate_up=SplitByOutputs(("intermediate.dense",), bias=True),
            down=SplitByInputs("output.dense", bias=True),
            is_gated=False,
            activation=config.activation("hidden_act"),
        ),
        norm=None,
        head=SplitByVocabulary(f"{body}.embeddings.word_embeddings"),
        encoder=EncoderTensors(
            embedding_norm=NotSplit(f"{body}.embeddings.LayerNorm"),
            types=NotSplit(f"{body}.embeddings.token_type_embeddings"),
            num_types=config.count("type_vocab_size"),
        ),
        rotated_layers=frozenset(),
        unread=(f"{body}.pooler.", "pooler.", "cls.", "lm_head.", "generator_"),
    )
