"""Lets C++ compute the RMSNorms of a network of transformers, where a trial shows that they compute what ours does.
Each is one call instead of six or seven operations of torch; ci/bench/NOTES.md has what that gains. Knows no
architecture.

Legend: N rows, D features that are normalised together.
"""

from __future__ import annotations

import inspect
import logging
from collections import Counter
from typing import Any

import torch
from torch import Tensor

import inflight_kernels
from inflight_kernels import cpu
from inflight_kernels.cpu import Program, Recording, Unsupported, WeightPacker, Workspace

logger = logging.getLogger(__name__)

TRIED_SCALES = (1e-3, 0.1, 1.0, 30.0)
"""Of the rows of a trial: with the least, the epsilon counts."""
MOST_OTHERS = 0.01
"""Share of a trial's numbers that may be others. A class may add up in another order than ours, which rounds few
numbers of 16 bits to others; one that rounds elsewhere changes every third."""


def compile_norms(network: Any, dtype: torch.dtype, order: cpu.Order | None) -> None:
    """Nothing happens without an `order` of sums in C++."""
    if order is None:
        return
    library, workspace, count = cpu.load_library(dtype, order=order), Workspace(), 0
    reasons: Counter[str] = Counter()
    for module in network.modules():
        if (found := _weight_of(module, dtype)) is None:
            continue
        try:
            recording = _record(*found, dtype)
        except Unsupported as reason:
            reasons[str(reason)] += 1
            continue
        program = Program(library, recording, WeightPacker(library, [recording]), workspace)
        module.forward = _CompiledNorm(module.forward, program, len(found[0]))
        count += 1
    if count:
        logger.info("%d norms run in C++", count)
    for text, number in reasons.items():
        logger.info("%d norms stay in torch: %s", number, text)


def _record(weight_D: Tensor, eps: float, dtype: torch.dtype) -> Recording:
    """Raises Unsupported."""
    return cpu.record(lambda x_ND, _: _rms_norm(x_ND, weight_D, eps), len(weight_D), dtype)


class _CompiledNorm:
    """In the place of a module's `forward`."""

    def __init__(self, own: Any, program: Program, size: int) -> None:
        """`own`: the class's own, for inputs of other types."""
        self._own, self._program, self._size = own, program, size

    def __call__(self, x: Tensor) -> Tensor:
        """(…, D)"""
        if x.dtype != self._program.dtype or not x.numel():
            result: Tensor = self._own(x)
            return result
        return self._program(x.reshape(-1, self._size).contiguous()).view(x.shape)


@torch.inference_mode()
def _weight_of(module: Any, dtype: torch.dtype) -> tuple[Tensor, float] | None:
    """The weight (D,) and the epsilon with which `rms_norm` gives what the module gives; None if there are none."""
    own_D = module._parameters.get("weight")
    is_simple = module._parameters.keys() == {"weight"} and not module._modules and not module._buffers
    if not is_simple or own_D is None or own_D.dim() != 1 or own_D.dtype != dtype:
        return None
    if len(inspect.signature(module.forward).parameters) != 1:
        return None
    weights = own_D.data.contiguous(), own_D.data.float(), 1.0 + own_D.data.float()
    epsilons = [value for value in vars(module).values() if type(value) is float]
    random = torch.Generator().manual_seed(0)
    rows_ND = torch.cat([scale * torch.randn(16, len(own_D), generator=random) for scale in TRIED_SCALES]).to(dtype)
    try:
        expected_ND = module(rows_ND)
    except Exception as error:  # whatever the class raises
        logger.info("%s is not tried: %s", type(module).__name__, error)
        return None
    for weight_D in weights:
        for eps in epsilons:
            if _equals(_rms_norm(rows_ND, weight_D, eps), expected_ND):
                return weight_D, eps
    return None


def _rms_norm(x_ND: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    normed = inflight_kernels.rms_norm(x_ND, weight_D, eps)
    assert isinstance(normed, Tensor)
    return normed


def _equals(found: Tensor, expected: Any) -> bool:
    if not isinstance(expected, Tensor) or (expected.dtype, expected.shape) != (found.dtype, found.shape):
        return False
    others = (found - expected).abs() > 1e-5 * expected.abs()
    return float(others.float().mean()) < MOST_OTHERS
