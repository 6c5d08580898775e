"""Block copies. They have no goal of their own; K8's applies, the other operation that writes to the cache."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from ci.bench.kernels.case import Case, Goal, Inputs, Peer, Result, float_dtype, same_way
from inflight_kernels.kv_cache import gpu
from inflight_kernels.kv_cache.gpu.copy_blocks import CANDIDATES


def _inputs(pairs: int, shape: tuple[int, ...], device: torch.device, i: int) -> Inputs:
    """k and v of all layers in one tensor, and pairs that copy the first half of the blocks to the second."""
    generator = torch.Generator(device).manual_seed(i)
    caches = torch.randn(2 * shape[0], *shape[1:], generator=generator, device=device).to(float_dtype(device))
    half = shape[1] // 2
    source = torch.randperm(half, generator=generator, device=device)[:pairs]
    target = half + torch.randperm(half, generator=generator, device=device)[:pairs]
    return caches, source, target


def _run(inputs: Inputs) -> Result:
    caches, source, target = inputs
    gpu.copy_blocks(caches.unbind(), source, target)
    return (caches,)


def _reference(inputs: Inputs) -> Result:
    caches, source, target = inputs
    return (caches.float().index_copy(1, target, caches.float()[:, source]),)


def _indexed(caches: Tensor, source: Tensor, target: Tensor) -> Result:
    caches.index_copy_(1, target, caches.index_select(1, source))
    return (caches,)


def cases(tiny: bool) -> list[Case]:
    """32 copies in the 32 layers of Llama-8B."""
    pairs, shape = (2, (2, 6, 4, 2, 16)) if tiny else (32, (32, 128, 64, 8, 128))
    block = shape[2] * shape[3] * shape[4]
    return [
        Case(
            kernel="K8",
            title="copy_blocks 32 blocks of 64 x 32 layers bf16",
            goal=Goal("at least 85 % of the bandwidth", fraction=0.85),
            stretch=Goal("90 %", fraction=0.9),
            make_inputs=partial(_inputs, pairs, shape),
            run=_run,
            reference=_reference,
            tolerance=1e-6,
            bytes=2 * 2 * 2 * pairs * shape[0] * block,
            formula="2 * 2 L pairs bytes of a block",
            peers={"torch eager": Peer(same_way(_indexed), on_cpu=True)},
            candidates={"copy_blocks": CANDIDATES},
        )
    ]
