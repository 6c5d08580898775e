"""Chooses between a family's triton kernels and its torch reference, by a tensor's device.

Knows no operation. triton is imported at the first CUDA tensor, so that a CPU-only machine does not need it.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import Tensor

IMPLEMENTATIONS = {"cpu": "reference", "cuda": "gpu"}
"""Device type -> name of the module, in every family, whose functions run on such devices."""

_RECORDER: ContextVar[Any] = ContextVar("recorder", default=None)


def implementation(tensor: Tensor, family: str) -> Any:
    """The module of the package `family` whose functions run on the tensor's device. Raises ValueError if none does."""
    kind = IMPLEMENTATIONS.get(tensor.device.type)
    return recorder_of(tensor) if kind is None else _module(family, kind)


def recorder_of(tensor: Tensor) -> Any:
    """What notes the operations that this thread computes with such a tensor. Raises ValueError if nothing does."""
    recorder = _RECORDER.get()
    if recorder is None or tensor.device.type != "meta":
        raise ValueError(f"inflight_kernels runs on cpu and cuda tensors, got one on {tensor.device}")
    return recorder


@contextmanager
def recording(recorder: Any) -> Iterator[None]:
    """Meanwhile functions called by this thread with meta tensors, which have no memory, are those of `recorder`."""
    token = _RECORDER.set(recorder)
    try:
        yield
    finally:
        _RECORDER.reset(token)


@functools.cache
def _module(family: str, kind: str) -> Any:
    return importlib.import_module(f"{family}.{kind}")
