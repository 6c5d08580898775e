"""Residual addition and RMSNorm, plain, with a float32 weight and quantised, or LayerNorm: K7."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from ci.bench.kernels.case import Case, Goal, Inputs, Peer, Result, float_dtype, same_way
from inflight_kernels.norm import gpu
from inflight_kernels.norm.gpu.rms_norm import CANDIDATES

EPS = 1e-5
FP8_LARGEST = 448.0


def _inputs(tokens: int, hidden_size: int, device: torch.device, i: int) -> tuple[Tensor, Tensor, Tensor]:
    """x, residual, weight."""
    generator = torch.Generator(device).manual_seed(i)
    rows = torch.randn(2, tokens, hidden_size, generator=generator, device=device).to(float_dtype(device))
    weight = torch.randn(hidden_size, generator=generator, device=device).to(rows.dtype)
    return rows[0], rows[1], weight


def _float_weight_inputs(tokens: int, hidden_size: int, device: torch.device, i: int) -> Inputs:
    x, residual, weight = _inputs(tokens, hidden_size, device, i)
    return x, residual, weight.float()


def _run(inputs: Inputs) -> Result:
    x, residual, weight = inputs
    return gpu.rms_norm(x, weight, EPS, residual)


def _run_quantized(inputs: Inputs) -> Result:
    x, residual, weight = inputs
    return gpu.rms_norm_quantized(x, weight, EPS, residual)


def _formula(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    total = x + residual
    return F.rms_norm(total, (total.shape[-1],), weight, EPS), total


def _quantized_formula(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    y, total = _formula(x, residual, weight)
    scale = y.float().abs().amax(-1) / FP8_LARGEST
    return (y.float() / scale[:, None]).to(torch.float8_e4m3fn), scale, total


def _reference(inputs: Inputs) -> Result:
    return _formula(*(tensor.float() for tensor in inputs))


def _quantized_reference(inputs: Inputs) -> Result:
    y, total = _formula(*(tensor.float() for tensor in inputs))
    scale = y.abs().amax(-1) / FP8_LARGEST
    return y / scale[:, None], scale, total


def _run_layer_norm(inputs: Inputs) -> Result:
    x, residual, weight = inputs
    return gpu.layer_norm(x, weight, weight, EPS, residual)


def _layer_norm_formula(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    total = x + residual
    return F.layer_norm(total, (total.shape[-1],), weight, weight, EPS), total


def _layer_norm_reference(inputs: Inputs) -> Result:
    return _layer_norm_formula(*(tensor.float() for tensor in inputs))


def _liger(inputs: Inputs) -> Callable[[], Result]:
    from liger_kernel.ops.fused_add_rms_norm import fused_add_rms_norm_forward

    x, residual, weight = inputs
    return lambda: tuple(fused_add_rms_norm_forward(x, residual, weight, EPS, 0.0, "llama")[:2])


def _flashinfer(inputs: Inputs) -> Callable[[], Result]:
    from flashinfer.norm import fused_add_rmsnorm

    x, residual, weight = inputs[0].clone(), inputs[1].clone(), inputs[2]

    def call() -> Result:
        fused_add_rmsnorm(x, residual, weight, EPS)
        return x, residual

    return call


def _vllm(inputs: Inputs) -> Callable[[], Result]:
    from vllm import _custom_ops

    x, residual, weight = inputs[0].clone(), inputs[1].clone(), inputs[2]

    def call() -> Result:
        _custom_ops.fused_add_rms_norm(x, residual, weight, EPS)
        return x, residual

    return call


def _vllm_quantized(inputs: Inputs) -> Callable[[], Result]:
    from vllm import _custom_ops

    x, residual, weight = inputs[0], inputs[1].clone(), inputs[2]

    def call() -> Result:
        q, scale = _custom_ops.rms_norm_dynamic_per_token_quant(x, weight, EPS, torch.float8_e4m3fn, residual=residual)
        return q, scale, residual

    return call


# FlashInfer and vLLM add into the residual in place: a second call normalises another sum, so they are not compared.
PEERS = {
    "torch eager": Peer(same_way(_formula), on_cpu=True),
    "torch.compile": Peer(lambda inputs: partial(torch.compile(_formula, dynamic=False), *inputs)),
    "Liger": Peer(_liger, needs="liger_kernel"),
    "FlashInfer": Peer(_flashinfer, needs="flashinfer", comparable=False),
    "vLLM": Peer(_vllm, needs="vllm", comparable=False),
}
LAYER_NORM_PEERS = {
    "torch eager": Peer(same_way(_layer_norm_formula), on_cpu=True),
    "torch.compile": Peer(lambda inputs: partial(torch.compile(_layer_norm_formula, dynamic=False), *inputs)),
}
QUANTIZED_PEERS = {
    # They quantise a y that was rounded differently, so some values are one step of e4m3 apart.
    "torch eager": Peer(same_way(_quantized_formula), on_cpu=True, comparable=False),
    "torch.compile": Peer(
        lambda inputs: partial(torch.compile(_quantized_formula, dynamic=False), *inputs), comparable=False
    ),
    "vLLM": Peer(_vllm_quantized, needs="vllm", comparable=False),
}


def _case(title: str, tokens: int, hidden_size: int, goal: Goal, stretch: Goal | None) -> Case:
    return Case(
        kernel="K7",
        title=f"add+RMSNorm {title}",
        goal=goal,
        stretch=stretch,
        make_inputs=partial(_inputs, tokens, hidden_size),
        run=_run,
        reference=_reference,
        tolerance=2e-2,
        bytes=8 * tokens * hidden_size + 2 * hidden_size,
        formula="8 T H + 2 H",
        peers=PEERS,
        candidates={"rms_norm": CANDIDATES},
    )


def _quantized_case(title: str, tokens: int, hidden_size: int, goal: Goal, stretch: Goal | None) -> Case:
    return Case(
        kernel="K7",
        title=f"add+RMSNorm+fp8 {title}",
        goal=goal,
        stretch=stretch,
        make_inputs=partial(_inputs, tokens, hidden_size),
        run=_run_quantized,
        reference=_quantized_reference,
        # Half a step of e4m3 is a 16th of the value; what is rounded is itself rounded to bf16.
        tolerance=7e-2,
        bytes=(7 * hidden_size + 4) * tokens + 2 * hidden_size,
        formula="(7 H + 4) T + 2 H",
        peers=QUANTIZED_PEERS,
        candidates={"rms_norm_quantized": CANDIDATES},
    )


def _float_weight_case(tokens: int, hidden_size: int) -> Case:
    return Case(
        kernel="K7",
        title="add+RMSNorm with a float32 weight 16k x 4096 bf16",
        goal=Goal("at least 88 % of the bandwidth", fraction=0.88),
        make_inputs=partial(_float_weight_inputs, tokens, hidden_size),
        run=_run,
        reference=_reference,
        tolerance=2e-2,
        bytes=8 * tokens * hidden_size + 4 * hidden_size,
        formula="8 T H + 4 H",
        candidates={"rms_norm": CANDIDATES},
    )


def _layer_norm_case(tokens: int, hidden_size: int) -> Case:
    return Case(
        kernel="K7",
        title="add+LayerNorm 16k x 4096 bf16",
        goal=Goal("at least 92 % of the bandwidth", fraction=0.92),
        make_inputs=partial(_inputs, tokens, hidden_size),
        run=_run_layer_norm,
        reference=_layer_norm_reference,
        tolerance=2e-2,
        bytes=8 * tokens * hidden_size + 4 * hidden_size,
        formula="8 T H + 4 H",
        peers=LAYER_NORM_PEERS,
        candidates={"layer_norm": CANDIDATES},
    )


def cases(tiny: bool) -> list[Case]:
    """16k and 64 rows of Llama-8B's hidden size."""
    hidden_size = 96 if tiny else 4096
    many, few = (6, 3) if tiny else (16384, 64)
    wide = Goal("at least 92 % of the bandwidth, 1.1x Liger", fraction=0.92, ratios={"Liger": 1.1})
    wide_quantized = Goal("at least 92 % of the bandwidth", fraction=0.92)
    quick = Goal("at most 3 us", microseconds=3.0)
    stretch = Goal("96 %", fraction=0.96)
    return [
        _case("16k x 4096 bf16", many, hidden_size, wide, stretch),
        _quantized_case("16k x 4096 bf16", many, hidden_size, wide_quantized, stretch),
        _case("64 x 4096 bf16", few, hidden_size, quick, None),
        _quantized_case("64 x 4096 bf16", few, hidden_size, quick, None),
        _float_weight_case(many, hidden_size),
        _layer_norm_case(many, hidden_size),
    ]
