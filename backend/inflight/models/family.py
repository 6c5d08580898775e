"""What a family's file says about its network: the tensors of a checkpoint, how each is split over the ranks, options.

Only descriptions; `decoder.py` composes the network from them. Names of tensors are given without the ending `.weight`
or `.bias`; those within a layer are relative to it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from inflight.models.config_file import ConfigValues


@dataclass(frozen=True, slots=True)
class NotSplit:
    """A tensor that every rank holds whole."""

    name: str


@dataclass(frozen=True, slots=True)
class SplitByOutputs:
    """A product of which each rank computes some output features, in every section of them.

    The sections (queries, keys and values; gate and up) are stacked into one product. In the checkpoint they are either
    one tensor each, `names` in the order of the sections, or stacked already into the only one of `names`.
    """

    names: tuple[str, ...]
    bias: bool = False


@dataclass(frozen=True, slots=True)
class SplitByInputs:
    """A product of which each rank uses some input features; the outputs are summed over the ranks."""

    name: str
    bias: bool = False


@dataclass(frozen=True, slots=True)
class SplitByVocabulary:
    """A table with a row per token of the vocabulary, of which each rank holds some."""

    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionTensors:
    """The first half of a layer."""

    norm: NotSplit
    qkv: SplitByOutputs
    """Sections: queries, keys, values."""
    q_norm: NotSplit | None = None
    """RMSNorm over each head of the queries before their rotation."""
    k_norm: NotSplit | None = None
    output: SplitByInputs

    @property
    def module(self) -> str:
        """Name of the module that these are part of: scales of its KV cache are called by it."""
        return self.output.name.rpartition(".")[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class MLPTensors:
    """The second half of a layer."""

    norm: NotSplit
    gate_up: SplitByOutputs
    """Sections: gate, up."""
    down: SplitByInputs


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertTensors:
    """The second half of the layers with a mixture of experts, behind the same norm as the others'. Names are those of
    the published checkpoints; see expert_blocks.py for others."""

    layers: frozenset[int]
    """Numbers of the layers that have one."""
    num_experts: int
    num_chosen: int
    """Experts that compute each token."""
    renormalize: bool
    """Whether the weights of the chosen ones sum to 1; else they are their shares of all."""
    intermediate_size: int
    """Of each expert."""
    router: NotSplit
    experts: str
    """Name of the list of experts: the tensors of expert 3 begin with its name and `.3.`."""
    gate: str
    up: str
    down: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One architecture's network, for one checkpoint's config.json."""

    embedding: SplitByVocabulary
    layers: str
    """Name of the list of layers: the tensors of layer 3 begin with its name and `.3.`."""
    attention: AttentionTensors
    mlp: MLPTensors
    """Of the layers without experts; its norm of all."""
    norm: NotSplit
    head: SplitByVocabulary
    """Not read where the checkpoint ties it to the embedding."""

    experts: ExpertTensors | None = None
    windowed_layers: Literal["none", "all", "layer_types"] = "none"
    """Layers that attend to the last `sliding_window` tokens only: none, all, or those that `layer_types` names."""
    partial_rotary: bool = False
    """Whether `partial_rotary_factor` is honoured: the first part of each head is rotated, the rest is not."""
    attention_scale: float | None = None
    """Factor of the attention scores; None: the reciprocal of the square root of the head's size."""
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    """Of both halves' outputs before they are added to the residual."""
    logits_multiplier: float = 1.0


DescribeFamily = Callable[[ConfigValues], Family]
"""What a family's file defines: from the options in a checkpoint's config.json to the description of its network."""
