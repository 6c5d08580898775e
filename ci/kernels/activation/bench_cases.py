"""SwiGLU, plain and quantised; GELU without a gate, the soft cap of logits, and the gate of each token: K9."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from ci.bench.kernels.case import Case, Goal, Inputs, Peer, Result, float_dtype, same_way
from inflight_kernels import Activation
from inflight_kernels.activation import gpu
from inflight_kernels.activation.gpu.activate_and_mul import CANDIDATES, QUANTIZED_CANDIDATES

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


LOGITS_CAP = 30.0


def _rows(tokens: int, width: int, device: torch.device, i: int) -> tuple[Tensor]:
    generator = torch.Generator(device).manual_seed(i)
    return ((10 * torch.randn(tokens, width, generator=generator, device=device)).to(float_dtype(device)),)


def _gated_rows(tokens: int, width: int, device: torch.device, i: int) -> tuple[Tensor, Tensor]:
    """And a gate for each."""
    [x] = _rows(tokens, width, device, i)
    return x, torch.randn(tokens, 1, generator=torch.Generator(device).manual_seed(i), device=device).to(x.dtype)


def _gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _soft_cap(x: Tensor) -> Tensor:
    return (LOGITS_CAP * torch.tanh(x.float() / LOGITS_CAP)).to(x.dtype)


def _sigmoid_mul(x: Tensor, gate: Tensor) -> Tensor:
    return x * torch.sigmoid(gate)


def _one_input_case(
    title: str,
    tokens: int,
    width: int,
    goal: Goal,
    run: Callable[[Tensor], Tensor],
    formula: Callable[[Tensor], Tensor],
) -> Case:
    return Case(
        kernel="K9",
        title=title,
        goal=goal,
        make_inputs=partial(_rows, tokens, width),
        run=lambda inputs: run(*inputs),
        reference=lambda inputs: formula(inputs[0].float()),
        tolerance=2e-2,
        bytes=4 * tokens * width,
        formula="4 T I",
        peers={
            "torch eager": Peer(same_way(formula), on_cpu=True),
            "torch.compile": Peer(lambda inputs: partial(torch.compile(formula, dynamic=False), *inputs)),
        },
    )


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
            run=lambda inputs: gpu.activate_and_mul(*inputs),
            reference=lambda inputs: _formula(inputs[0].float()),
            tolerance=2e-2,
            bytes=6 * tokens * width,
            formula="6 T I",
            peers=PEERS,
            candidates={"activate_and_mul": CANDIDATES},
        ),
        Case(
            kernel="K9",
            title="SwiGLU+fp8 16k x 14336 bf16",
            goal=Goal("at least 93 % of the bandwidth", fraction=0.93),
            stretch=stretch,
            make_inputs=partial(_inputs, tokens, width),
            run=lambda inputs: gpu.activate_and_mul_quantized(*inputs),
            reference=_quantized_reference,
            # Half a step of e4m3 is a 16th of the value; what is rounded is itself rounded to bf16, twice.
            tolerance=8e-2,
            bytes=(5 * width + 4) * tokens,
            formula="(5 I + 4) T",
            peers=QUANTIZED_PEERS,
            candidates={"activate_and_mul_quantized": QUANTIZED_CANDIDATES},
        ),
        _one_input_case(
            "GELU without a gate 16k x 16384 bf16",
            tokens,
            48 if tiny else 16384,
            Goal("at least 93 % of the bandwidth", fraction=0.93),
            partial(gpu.activate, activation=Activation.GELU_TANH),
            _gelu,
        ),
        _one_input_case(
            "soft cap of logits B=64 V=256k bf16",
            3 if tiny else 64,
            100 if tiny else 256_000,
            Goal("at least 85 % of the bandwidth", fraction=0.85),
            partial(gpu.soft_cap, cap=LOGITS_CAP),
            _soft_cap,
        ),
        Case(
            kernel="K9",
            title="gate of each token 16k x 2048 bf16",
            goal=Goal("at least 85 % of the bandwidth", fraction=0.85),
            make_inputs=partial(_gated_rows, tokens, 48 if tiny else 2048),
            run=lambda inputs: gpu.sigmoid_mul(*inputs),
            reference=lambda inputs: _sigmoid_mul(*(tensor.float() for tensor in inputs)),
            tolerance=2e-2,
            bytes=tokens * (4 * (48 if tiny else 2048) + 2),
            formula="(4 I + 2) T",
            peers={"torch eager": Peer(same_way(_sigmoid_mul), on_cpu=True)},
        ),
    ]
