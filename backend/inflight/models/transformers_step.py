"""The step that a network of transformers computes, for the functions that are called within it.

Not passed through the network as an argument, since some networks drop unknown arguments.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from inflight.layers.attention import AttentionMetadata


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    metadata: AttentionMetadata
    """Of the tokens that the network is called with."""


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
