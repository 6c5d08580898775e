"""The one place that chooses between the triton kernels and the torch reference: by a tensor's device.

Knows no operation. triton is imported when the first CUDA tensor arrives, so that a CPU-only machine need not have it.
"""

from __future__ import annotations

import functools
from types import ModuleType

from torch import Tensor

from inflight_kernels import reference


@functools.cache
def _kernels() -> ModuleType:
    from inflight_kernels import ops

    return ops


def implementation(tensor: Tensor) -> ModuleType:
    """The module whose functions run where `tensor` lies; ValueError for a device that has none."""
    kind = tensor.device.type
    if kind == "cpu":
        return reference
    if kind == "cuda":
        return _kernels()
    raise ValueError(f"inflight_kernels runs on cpu and cuda tensors, got one on {tensor.device}")
