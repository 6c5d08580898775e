"""Tensors of a checkpoint, and how each is split over the ranks.

Names are given without the ending `.weight` or `.bias`; those within a layer are relative to it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class NotSplit:
    """A tensor that every rank holds whole."""

    name: str


@dataclass(frozen=True, slots=True)
class SplitByOutputs:
    """A product of which each rank computes some output features, in every section of them.

    The sections (queries, keys and values; gate and up) are stacked into one product. In the checkpoint some or all of
    them may be in one tensor already.
    """

    names: tuple[str, ...]
    """Of the tensor of each section, or the only one of all. Sections of one tensor follow each other."""
    bias: bool = False
    alternating: tuple[int, ...] = ()
    """Of each section, as many features as stand together where a tensor has some of each of its sections in turn; 0
    where it is whole. () = all sections are."""
    transposed: bool = False
    """Whether weights in the checkpoint are (inputs, outputs)."""


@dataclass(frozen=True, slots=True)
class SplitByInputs:
    """A product of which each rank uses some input features; the outputs are summed over the ranks."""

    name: str
    bias: bool = False
    transposed: bool = False
    """As of SplitByOutputs."""


@dataclass(frozen=True, slots=True)
class SplitByVocabulary:
    """A table with a row per token of the vocabulary, of which each rank holds some."""

    name: str
    bias: bool = False
