"""The tokens of a step, as `advance_rows` returns them."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class StepTokens(NamedTuple):
    """Legend: T tokens of the step, B rows of its batch, G groups of layers with blocks of their own."""

    token_ids: Tensor
    """int64 (T,)"""
    rows: Tensor
    """int64 (T,), row of each token."""
    positions: Tensor
    """int64 (T,), position of each token in its row."""
    slots: tuple[Tensor, ...]
    """G times int64 (T,), cache slot of what a group keeps of each token; -1 = none."""
    ends: Tensor
    """int64 (T,), tokens of the row up to this one; 0 for padding."""
    seq_lens: Tensor
    """int32 (B,), tokens of each row after the step."""
