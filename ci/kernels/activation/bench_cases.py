"""SwiGLU, plain and quantised: K9."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from ci.bench.kernels.case import Case, Goal, Inputs, Peer, Result, float_dtype, same_way
from inflight_kernels.activation import gpu
from inflight_kernels.activation.gpu.silu_and_mul import CANDIDATES, QUANTIZED_CANDIDATES

FP8_LARGEST = 448.0


def _inputs(tokens: int, width: int, device: torch.device, i: int) -> tuple[Tensor]:
    generator = torch.Generator(device).manual_seed(i)
    return (torch.randn(tokens, 2 * width, generator=generator, device=device).to(float_dtype(device)),)


def _formula(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


def _quantized_formula(gate_up: Tensor) -> tuple[Tensor, Tensor]:
    y = _formula(gate_up).float()
    scale = y.abs().amax(-1) / FP8_LARGEST
    return (y / scale[:, None]).to(torch.float8_e4m3fn), scale


def _quantized_reference(inputs: Inputs) -> Result:
    y = _formula(inputs[0].float())
    scale = y.abs().amax(-1) / FP8_LARGEST
    return y / scale[:, None], scale


def _liger(inputs: Inputs) -> Callable[[], Result]:
    from liger_kernel.ops.swiglu import swiglu_forward

    # It takes the two halves as separate contiguous tensors.
    gate, up = (half.contiguous() for half in inputs[0].chunk(2, -1))
    return lambda: swiglu_forward(gate, up)[-1]


def _flashinfer(inputs: Inputs) -> Callable[[], Result]:
    from flashinfer.activation import silu_and_mul

    return lambda: silu_and_mul(inputs[0])


def _vllm(inputs: Inputs) -> Callable[[], Result]:
    import vllm._custom_ops  # noqa: F401

    gate_up = inputs[0]
    y = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)

    def call() -> Result:
        torch.ops._C.silu_and_mul(y, gate_up)
        return y

    return call


PEERS = {
    "torch eager": Peer(same_way(_formula), on_cpu=True),
    "torch.compile": Peer(lambda inputs: partial(torch.compile(_formula, dynamic=False), *inputs)),
    "Liger": Peer(_liger, needs="liger_kernel"),
    "FlashInfer": Peer(_flashinfer, needs="flashinfer"),
    "vLLM": Peer(_vllm, needs="vllm"),
}
# It quantises a y that was rounded differently, so some values are one step of e4m3 apart: not compared.
QUANTIZED_PEERS = {
    "torch eager": Peer(same_way(_quantized_formula), on_cpu=True, comparable=False),
    "torch.compile": Peer(
        lambda inputs: partial(torch.compile(_quantized_formula, dynamic=False), *inputs), comparable=False
    ),
}


def cases(tiny: bool) -> list[Case]:
    """16k rows of Llama-8B's intermediate size."""
    tokens, width = (5, 48) if tiny else (16384, 14336)
    stretch = Goal("96 %", fraction=0.96)
    return [
        Case(
            kernel="K9",
            title="SwiGLU 16k x 14336 bf16",
            goal=Goal(
                "at least 93 % of the bandwidth, no slower than Liger and FlashInfer",
                fraction=0.93,
                ratios={"Liger": 1.0, "FlashInfer": 1.0},
            ),
            stretch=stretch,
            make_inputs=partial(_inputs, tokens, width),
            run=lambda inputs: gpu.silu_and_mul(*inputs),
            reference=lambda inputs: _formula(inputs[0].float()),
            tolerance=2e-2,
            bytes=6 * tokens * width,
            formula="6 T I",
            peers=PEERS,
            candidates={"silu_and_mul": CANDIDATES},
        ),
        Case(
            kernel="K9",
            title="SwiGLU+fp8 16k x 14336 bf16",
            goal=Goal("at least 93 % of the bandwidth", fraction=0.93),
            stretch=stretch,
            make_inputs=partial(_inputs, tokens, width),
            run=lambda inputs: gpu.silu_and_mul_quantized(*inputs),
            reference=_quantized_reference,
            # Half a step of e4m3 is a 16th of the value; what is rounded is itself rounded to bf16, twice.
            tolerance=8e-2,
            bytes=(5 * width + 4) * tokens,
            formula="(5 I + 4) T",
            peers=QUANTIZED_PEERS,
            candidates={"silu_and_mul_quantized": QUANTIZED_CANDIDATES},
        ),
    ]
