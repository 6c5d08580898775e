"""Loads what makes scores of a text's hidden states: a head of the checkpoint's own, or rows of its vocabulary's.

Every rank has it whole. Legend: D hidden size, V vocabulary.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

import inflight_kernels
from inflight.layers.norm import LayerNorm
from inflight.layers.score_head import Dense, ScoreHead
from inflight.layers.weight import DenseWeight
from inflight.models.config import ModelConfig
from inflight.models.family import ScoreTensors
from inflight.models.split_tensors import SplitByOutputs
from inflight.models.weights import Section, WeightLoader
from inflight.score_tokens import ScoreTokens


def load_score_head(config: ModelConfig, tensors: ScoreTensors, loader: WeightLoader) -> ScoreHead:
    """Raises ConfigurationError if the checkpoint has not what `tensors` names."""
    size = config.hidden_size

    def dense(of: SplitByOutputs, num_outputs: int) -> Dense:
        whole = Section(num_outputs, 0, num_outputs)
        made = loader.by_outputs(of, "", (whole,), size)
        return Dense(weight=made.weight, bias_O=made.bias_O, deterministic=loader.deterministic)

    if tensors.tokens is not None:
        return ScoreHead(steps=(_of_tokens(config, tensors.tokens, loader),))
    steps: list[Any] = []
    if tensors.dense is not None:
        steps.append(dense(tensors.dense, size))
        if tensors.activation is None:
            steps.append(partial(inflight_kernels.soft_cap, cap=1.0))  # a cap of 1 is tanh
        else:
            steps.append(partial(inflight_kernels.activate, activation=tensors.activation))
    if tensors.norm is not None:
        norm = loader.norm(tensors.norm, "", size, config.family.norms)
        assert isinstance(norm, LayerNorm), "heads have no other"
        steps.append(norm.alone)
    assert tensors.output is not None, "a head without an output"
    return ScoreHead(steps=(*steps, dense(tensors.output, tensors.num_labels)))


def _of_tokens(config: ModelConfig, tokens: ScoreTokens, loader: WeightLoader) -> Dense:
    """One row, the difference of two of the vocabulary's head: it is rounded once, and not each of two logits."""
    family, size = config.family, config.hidden_size
    head = family.embedding if config.tie_word_embeddings else family.head

    def row(token: int) -> Tensor:
        row_1D = torch.zeros(1, size, dtype=torch.float32, device=loader.device)
        loader.checkpoint.copy_into(row_1D, f"{head.name}.weight", (config.vocab_size, size), (token,))
        return row_1D

    weight_1D = loader.empty(1, size)
    score_1D = row(tokens.yes) if tokens.no is None else row(tokens.yes) - row(tokens.no)
    if loader.checkpoint.is_read and not weight_1D.is_meta:
        weight_1D.copy_(score_1D * family.logits_multiplier)
    return Dense(weight=DenseWeight(weight_1D), bias_O=None, deterministic=loader.deterministic)
