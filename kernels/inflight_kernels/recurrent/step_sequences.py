"""Whose tokens a step computes, as operations see it that go through each sequence's tokens in their order."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSequences:
    """B sequences with T tokens together, one sequence's behind the other's; each has one token at least.

    The state of a layer is a tensor whose first dimension are slots. A sequence reads its own before its first token,
    unless that has position 0: then it begins with zeros, whatever the slot holds. It writes it after its last one.
    """

    slots_B: Tensor
    """int64, each sequence's slot. Several that only pad the step may have the same."""
    starts: Tensor
    """int32 (B + 1), index of each sequence's first token, and T."""
    positions_T: Tensor
    """int64, position of each token in its sequence."""
    kept_T: Tensor | None = None
    """int32, a slot into which the state behind this token is written too, and which is none of `slots_B`; -1 = none.
    None = of no token."""
