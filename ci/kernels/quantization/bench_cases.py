"""Quantisation of activations alone. It has no goal of its own; K7's applies."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from ci.bench.kernels.case import Case, Goal, Inputs, Peer, Result, float_dtype, same_way
from inflight_kernels.quantization import gpu
from inflight_kernels.quantization.gpu.quantize_per_token import CANDIDATES

FP8_LARGEST = 448.0


def _inputs(tokens: int, width: int, device: torch.device, i: int) -> tuple[Tensor]:
    generator = torch.Generator(device).manual_seed(i)
    return (torch.randn(tokens, width, generator=generator, device=device).to(float_dtype(device)),)


def _formula(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = x.float().abs().amax(-1) / FP8_LARGEST
    return (x.float() / scale[:, None]).to(torch.float8_e4m3fn), scale


def _reference(inputs: Inputs) -> Result:
    x = inputs[0].float()
    scale = x.abs().amax(-1) / FP8_LARGEST
    return x / scale[:, None], scale


def _vllm(inputs: Inputs) -> Callable[[], Result]:
    from vllm import _custom_ops

    return lambda: _custom_ops.scaled_fp8_quant(inputs[0], use_per_token_if_dynamic=True)


def cases(tiny: bool) -> list[Case]:
    """16k rows of Llama-8B's hidden size."""
    tokens, width = (5, 48) if tiny else (16384, 4096)
    # Quotients that differ in the last bit may round to different steps of e4m3, so peers are not compared.
    return [
        Case(
            kernel="K7",
            title="quantize_per_token fp8 16k x 4096 bf16",
            goal=Goal("at least 92 % of the bandwidth", fraction=0.92),
            stretch=Goal("96 %", fraction=0.96),
            make_inputs=partial(_inputs, tokens, width),
            run=lambda inputs: gpu.quantize_per_token(*inputs),
            reference=_reference,
            # Half a step of e4m3 is a 16th of the value.
            tolerance=6.5e-2,
            bytes=(3 * width + 4) * tokens,
            formula="(3 K + 4) T",
            peers={
                "torch eager": Peer(same_way(_formula), on_cpu=True, comparable=False),
                "torch.compile": Peer(
                    lambda inputs: partial(torch.compile(_formula, dynamic=False), *inputs), comparable=False
                ),
                "vLLM": Peer(_vllm, needs="vllm", comparable=False),
            },
            candidates={"quantize_per_token": CANDIDATES},
        )
    ]
