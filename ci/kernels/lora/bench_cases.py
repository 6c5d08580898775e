"""Adapters of rank 16, 32 of them on 64 rows, on Llama-8B's attention layers (K16).

The goal is a whole step's: at most 10 % more. A step of 64 rows reads 16.1 GB of weights, 3.7 ms at 4.3 TB/s; a tenth,
over 32 layers, is 11.7 us a layer. It is dealt to the two calls of an attention layer by their bytes, whose floor is
7.2 us: 10 % leaves 4.5 us for launches, and the stretch of 5 % is out of reach with 32 different adapters. (On all
linear layers they are 2.7 GB, which no kernel reads in a tenth of the step.)
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from ci.bench.kernels.case import Case, Goal, Inputs, Peer, float_dtype
from inflight_kernels.lora import gpu, reference
from inflight_kernels.lora.gpu.lora_add import CANDIDATES

TOKENS, NUM_ADAPTERS, RANK, IN_FEATURES = 64, 32, 16, 4096
# Widths of the slices, and what a step 10 % or 5 % slower leaves for the call, in microseconds.
LAYERS = {"qkv": ((4096, 1024, 1024), 8.0, 4.0), "o": ((4096,), 3.7, 1.85)}
TINY = (5, 3, 8, 32)
# Two roundings to bfloat16; inputs are such that results are about 1.
TOLERANCE = 3e-2


def _inputs(sizes: tuple[int, int, int, int], widths: tuple[int, ...], device: torch.device, i: int) -> Inputs:
    tokens, num_adapters, rank, in_features = sizes
    generator = torch.Generator(device).manual_seed(i)
    draw = partial(torch.randn, generator=generator, device=device, dtype=float_dtype(device))
    # Every adapter present, in no order.
    order = torch.randperm(tokens, generator=torch.Generator().manual_seed(i)) % num_adapters
    return (
        draw(tokens, sum(widths)),
        draw(tokens, in_features),
        draw(num_adapters, len(widths) * rank, in_features).mul_(in_features**-0.5),
        draw(num_adapters, sum(widths), rank).mul_(rank**-0.5),
        order.int().to(device),
        # vLLM multiplies its scale into B beforehand.
        torch.ones(num_adapters, device=device),
        widths,
    )


def _check(inputs: Inputs, result: Tensor) -> None:
    """Ours on a fresh y, for the timed calls add to theirs again and again; both modes."""
    y, *others = inputs
    expected = reference.lora_add(*(x.float() if x.is_floating_point() else x for x in (y, *others[:-1])), others[-1])
    for deterministic in (False, True):
        actual = gpu.lora_add(y.clone(), *others, deterministic=deterministic)
        torch.testing.assert_close(actual.float(), expected, atol=TOLERANCE, rtol=TOLERANCE)


def _gathered(inputs: Inputs) -> Callable[[], Tensor]:
    """Each row's adapter copied out, then batched products."""
    y, x, a, b, adapters, _, widths = inputs
    rank = b.shape[2]

    def run() -> Tensor:
        narrow = torch.bmm(a[adapters], x[:, :, None])[:, :, 0]
        rows = b[adapters]
        begin = 0
        for index, width in enumerate(widths):
            part = narrow[:, index * rank : (index + 1) * rank, None]
            y[:, begin : begin + width] += torch.bmm(rows[:, begin : begin + width], part)[:, :, 0]
            begin += width
        return y

    return run


def _vllm(inputs: Inputs) -> Callable[[], Tensor]:
    """Shrink and expand of vLLM's triton kernels. Rows are sorted by adapter once a step: outside the measured time."""
    triton_ops = importlib.import_module("vllm.lora.ops.triton_ops")
    y, x, a, b, adapters, _, widths = inputs
    tokens, num_adapters, rank = len(x), b.shape[0], b.shape[2]
    meta = triton_ops.LoRAKernelMeta.make(num_adapters, tokens, device=x.device)
    meta.prepare_tensors(adapters)
    # Newer versions have an option to size grids by the active adapters, which a captured graph cannot.
    more = (False,) if len(inspect.signature(meta.meta_args).parameters) > 1 else ()
    arguments = meta.meta_args(tokens, *more)
    a_slices = [part.contiguous() for part in a.split(rank, dim=1)]
    b_slices = [part.contiguous() for part in b.split(list(widths), dim=1)]
    narrow = torch.empty(len(widths), tokens, rank, dtype=torch.float32, device=x.device)

    def run() -> Tensor:
        triton_ops.lora_shrink(x, a_slices, narrow, *arguments, 1.0)
        triton_ops.lora_expand(narrow, b_slices, y, *arguments, offset_start=0, add_inputs=True)
        return y

    return run


def _case(layer: str, tiny: bool) -> Case:
    widths, limit, stretch_limit = LAYERS[layer]
    sizes = (TOKENS, NUM_ADAPTERS, RANK, IN_FEATURES)
    if tiny:
        sizes, widths = TINY, tuple(width // 128 for width in widths)
    tokens, num_adapters, rank, in_features = sizes
    out_features = sum(widths)
    weights = num_adapters * rank * (len(widths) * in_features + out_features)
    return Case(
        kernel="K16",
        title=f"multi-LoRA {layer} rank 16, 32 adapters, 64 rows",
        goal=Goal(
            f"its part of a step 10 % slower, {limit} us; 1.3 times vLLM's pair",
            microseconds=limit,
            ratios={"vLLM shrink + expand": 1.3},
        ),
        stretch=Goal("its part of a step 5 % slower", microseconds=stretch_limit),
        make_inputs=partial(_inputs, sizes, widths),
        run=lambda inputs: gpu.lora_add(*inputs),
        run_deterministic=lambda inputs: gpu.lora_add(*inputs, deterministic=True),
        reference=lambda inputs: inputs[0],
        tolerance=TOLERANCE,
        # Every call adds to y again, so `check` compares one call of ours on a fresh y instead.
        comparable=False,
        check=_check,
        bytes=2 * (weights + tokens * (in_features + 2 * out_features)),
        formula="2 (N r (S in + out) + T (in + 2 out)) bytes",
        flops=2 * tokens * rank * (len(widths) * in_features + out_features),
        peers={
            "torch gather + bmm": Peer(_gathered, on_cpu=True),
            "vLLM shrink + expand": Peer(_vllm, needs="vllm.lora.ops.triton_ops"),
        },
        candidates={"lora_add": CANDIDATES},
    )


def cases(tiny: bool) -> list[Case]:
    """K16."""
    return [_case(layer, tiny) for layer in LAYERS]
