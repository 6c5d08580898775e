"""DeBERTa-v2 and v3: BERT's layers, whose attention reads where tokens are from a table that all layers share."""

from __future__ import annotations

from dataclasses import replace

from inflight.models.config_file import ConfigValues
from inflight.models.families.bert import with_scores
from inflight.models.family import (
    AttentionTensors,
    EncoderTensors,
    Family,
    LearnedPositions,
    MLPTensors,
    NormStyle,
    PlaceTensors,
    ScoreTensors,
)
from inflight.models.split_tensors import NotSplit, SplitByInputs, SplitByOutputs, SplitByVocabulary


def describe(config: ConfigValues) -> Family:
    """See Family."""
    values = config.values
    _check(config)
    size, embeddings = config.whole("hidden_size"), "deberta.embeddings"
    if values.get("embedding_size", size) != size:
        raise config.not_native("embedding_size", str(size))
    is_biased = values.get("position_biased_input") is not False
    num_types = config.count("type_vocab_size")
    return Family(
        embedding=SplitByVocabulary(f"{embeddings}.word_embeddings"),
        positions=LearnedPositions(f"{embeddings}.position_embeddings") if is_biased else None,
        layers="deberta.encoder.layer",
        norms=NormStyle(eps=config.eps("layer_norm_eps"), centers=True, bias=True),
        num_kv_heads=config.whole("num_attention_heads"),
        attention=AttentionTensors(
            norm=NotSplit("attention.output.LayerNorm"),
            qkv=SplitByOutputs(tuple(f"attention.self.{each}_proj" for each in ("query", "key", "value")), bias=True),
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
        head=SplitByVocabulary(f"{embeddings}.word_embeddings"),
        encoder=EncoderTensors(
            embedding_norm=NotSplit(f"{embeddings}.LayerNorm"),
            types=NotSplit(f"{embeddings}.token_type_embeddings") if num_types else None,
            num_types=num_types,
            places=_places(config),
        ),
        rotated_layers=frozenset(),
        unread=("pooler.", "classifier.", "cls.", "lm_predictions.", "mask_predictions.", *_positions(is_biased)),
    )


def describe_scores(config: ConfigValues) -> Family:
    """Of DebertaV2ForSequenceClassification."""
    if config.values.get("pooler_hidden_size", size := config.whole("hidden_size")) != size:
        raise config.not_native("pooler_hidden_size", str(size))
    head = ScoreTensors(
        num_labels=config.num_labels(),
        pooling="cls",
        dense=SplitByOutputs(("pooler.dense",), bias=True),
        activation=config.activation("pooler_hidden_act"),
        output=SplitByOutputs(("classifier",), bias=True),
    )
    family = with_scores(describe(config), head)
    return replace(family, unread=tuple(name for name in family.unread if name != "classifier."))


def _positions(is_biased: bool) -> tuple[str, ...]:
    """Published checkpoints hold some that are not read, by names with the network's and without."""
    name = "embeddings.position_embeddings."
    return () if is_biased else (name, f"deberta.{name}")


def _check(config: ConfigValues) -> None:
    """Raise NotNative for what earlier checkpoints have."""
    for key in ("relative_attention", "share_att_key"):
        if not config.flag(key):
            raise config.not_native(key, "true") if key in config.values else config.fault(f"{key} must be true")
    if config.count("conv_kernel_size"):
        raise config.not_native("conv_kernel_size", "0")


def _places(config: ConfigValues) -> PlaceTensors:
    values = config.values
    kinds = config.texts("pos_att_type")
    farthest = values.get("max_relative_positions")
    if type(farthest) is not int or farthest < 1:
        farthest = config.whole("max_position_embeddings")
    buckets = values.get("position_buckets")
    num_buckets = buckets if type(buckets) is int and buckets > 0 else 0
    norms = [each.strip() for each in str(values.get("norm_rel_ebd", "none")).lower().split("|")]
    return PlaceTensors(
        name="deberta.encoder.rel_embeddings",
        norm=NotSplit("deberta.encoder.LayerNorm") if "layer_norm" in norms else None,
        num_buckets=num_buckets,
        max_distance=farthest,
        reads_keys="c2p" in kinds,
        reads_queries="p2c" in kinds,
    )
