"""Decoders that write no text: without a head, or with one that scores a text by its last hidden state."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from inflight.errors import ConfigurationError
from inflight.models.config_file import ConfigValues
from inflight.models.family import DescribeFamily, Family, ScoreTensors
from inflight.models.split_tensors import SplitByOutputs
from inflight.score_tokens import ScoreTokens


def giving_vectors(describe: DescribeFamily) -> DescribeFamily:
    """Of its hidden states."""

    def describe_body(config: ConfigValues) -> Family:
        return replace(describe(config), is_headless=True)

    return describe_body


def scoring(describe: DescribeFamily) -> DescribeFamily:
    """With transformers' linear layer for labels in the place of the head."""

    def describe_with_head(config: ConfigValues) -> Family:
        head = ScoreTensors(num_labels=config.num_labels(), pooling="last", output=SplitByOutputs(("score",)))
        return replace(describe(config), scores=head, is_headless=True)

    return describe_with_head


def with_score_tokens(path: Path, family: Family, tokens: ScoreTokens, vocab_size: int) -> Family:
    """With logits of `tokens` as its only score. `path`: of config.json. Raises ConfigurationError."""
    if family.encoder is not None:
        raise ConfigurationError(
            f"{path}: an encoder has no logits of tokens to score texts by: set score_tokens to none"
        )
    if family.head.bias or family.logits_soft_cap:
        raise ConfigurationError(
            f"{path}: scores by logits of tokens (score_tokens) are not computed where logits have a bias or a cap"
        )
    if not all(0 <= token < vocab_size for token in tokens.ids):
        raise ConfigurationError(f"{path}: a token of score_tokens is outside the vocabulary of {vocab_size} tokens")
    return replace(family, scores=ScoreTensors(num_labels=1, pooling="last", output=None, tokens=tokens))
