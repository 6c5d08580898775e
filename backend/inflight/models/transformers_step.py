"""The step that a network of transformers computes, for the functions that are called within it.

Not passed through the network as an argument, since some networks drop unknown arguments.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from torch import Tensor

from inflight.layers.attention import AttentionMetadata, KeyValueSpec
from inflight.layers.state import LayerState


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What attention and adapters need while a network runs."""

    specs: Sequence[KeyValueSpec]
    states: Sequence[LayerState]
    metadata: AttentionMetadata
    cos_sin: Tensor
    """float32 (1, 2R), a rotation by the angle 0: the layers rotate queries and keys themselves."""
    no_positions_T: Tensor
    """int64, zeros: each token's row of `cos_sin`."""


_STEP: ContextVar[Step | None] = ContextVar("step", default=None)


def current_step() -> Step | None:
    """That which this thread computes; None outside of one, as for logits."""
    return _STEP.get()


@contextmanager
def within(step: Step) -> Iterator[None]:
    token = _STEP.set(step)
    try:
        yield
    finally:
        _STEP.reset(token)
