"""Chooses between a family's triton kernels and its torch reference, by a tensor's device.

Knows no operation. triton is imported at the first CUDA tensor, so that a CPU-only machine does not need it.
"""

from __future__ import annotations

import functools
import importlib
from types import ModuleType

from torch import Tensor

IMPLEMENTATIONS = {"cpu": "reference", "cuda": "gpu"}
"""Device type -> name of the module, in every family, whose functions run on such devices."""


def implementation(tensor: Tensor, family: str) -> ModuleType:
    """The module of the package `family` whose functions run on the tensor's device. Raises ValueError if none does."""
    kind = IMPLEMENTATIONS.get(tensor.device.type)
    if kind is None:
        raise ValueError(f"inflight_kernels runs on cpu and cuda tensors, got one on {tensor.device}")
    return _module(family, kind)


@functools.cache
def _module(family: str, kind: str) -> ModuleType:
    return importlib.import_module(f"{family}.{kind}")
