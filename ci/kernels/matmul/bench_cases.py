"""Linear layers at Llama-8B's shapes: K11 of 16 bits, K12 of fp8, K13 of int8, K14 of 4 bits.

A decode step meets each layer's weights once, so that bytes count up to some hundred tokens; a prompt's product counts
in operations. The smallest (o) and the largest (gate_up) layer stand for the others where not all four are run.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from ci.bench.kernels.case import Case, Goal, Inputs, Peer, float_dtype
from ci.kernels.matmul.marlin_peer import marlin
from inflight_kernels import BlockScaledWeight, activate_and_mul, pack_int4, quantize_per_token, quantize_weight
from inflight_kernels.matmul import gpu, reference
from inflight_kernels.matmul.gpu.block_scaled_linear import CANDIDATES as BLOCK_CANDIDATES
from inflight_kernels.matmul.gpu.gated_linear import CANDIDATES as GATED_CANDIDATES
from inflight_kernels.matmul.gpu.int4_linear import CANDIDATES as INT4_CANDIDATES
from inflight_kernels.matmul.gpu.linear import CANDIDATES
from inflight_kernels.matmul.gpu.scaled_linear import CANDIDATES as SCALED_CANDIDATES

# Outputs and inputs of the linear layers of Llama-3.1-8B.
LAYERS = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
TINY = (40, 256)
GROUP_SIZE = 128
FP8_LARGEST = 448.0
# bfloat16 rounds the result once; inputs are such that it is about 1.
TOLERANCE = 2e-2


def _shape(layer: str, tokens: int, tiny: bool) -> tuple[int, int, int]:
    """Tokens, outputs and inputs; tiny ones for the dry run."""
    return (min(tokens, 20), *TINY) if tiny else (tokens, *LAYERS[layer])


def _operands(shape: tuple[int, int, int], device: torch.device, i: int) -> tuple[Tensor, Tensor]:
    """x (T, K) and a weight (N, K) whose product is about 1, in the bench's float dtype."""
    tokens, out_features, in_features = shape
    generator = torch.Generator(device).manual_seed(i)
    dtype = float_dtype(device)
    x = torch.randn(tokens, in_features, generator=generator, device=device, dtype=dtype)
    weight = torch.randn(out_features, in_features, generator=generator, device=device, dtype=dtype)
    return x, weight.mul_(in_features**-0.5)


def _quantized(shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device, i: int) -> tuple[Tensor, ...]:
    """x, x_scale, weight and weight_scale. A row of x is quantised as a row of a weight is."""
    x, weight = _operands(shape, device, i)
    return *quantize_weight(x, dtype), *quantize_weight(weight, dtype)


def _int4(shape: tuple[int, int, int], device: torch.device, i: int) -> Inputs:
    """x and an Int4Weight in groups of 128."""
    x = _operands(shape, device, i)[0]
    _, out_features, in_features = shape
    generator = torch.Generator(device).manual_seed(i)
    groups = (in_features // GROUP_SIZE, out_features)
    q = torch.randint(0, 16, (out_features, in_features), generator=generator, device=device, dtype=torch.int32)
    zeros = torch.randint(4, 12, groups, generator=generator, device=device, dtype=torch.int32)
    scales = (torch.rand(groups, generator=generator, device=device) + 0.5) / (5 * in_features**0.5)
    return x, pack_int4(q, scales.to(x.dtype), zeros)


def _bf16_peer(dequantised: tuple[Tensor, Tensor]) -> partial[Tensor]:
    return partial(F.linear, *dequantised)


def _dequantised(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """8-bit operands as floats: what the same layer costs unquantised."""
    x, x_scale, weight, weight_scale = inputs
    dtype = float_dtype(x.device)
    return (x.float() * x_scale[:, None]).to(dtype), (weight.float() * weight_scale[:, None]).to(dtype)


def _scaled_mm(inputs: Inputs, fast: bool) -> partial[Tensor]:
    x, x_scale, weight, weight_scale = inputs
    scales = dict(scale_a=x_scale[:, None], scale_b=weight_scale[None, :])
    return partial(torch._scaled_mm, x, weight.T, **scales, out_dtype=torch.bfloat16, use_fast_accum=fast)


def _int4pack_mm(inputs: Inputs) -> partial[Tensor]:
    """torch's own 4-bit product: (q - 8) * scale + shift, q in pairs of bytes, tiles of K of 8."""
    x, weight = inputs
    scales, zeros = weight.scales_and_zeros()
    q = weight.whole_numbers().to(torch.uint8)
    packed = torch._convert_weight_to_int4pack(q[:, ::2] << 4 | q[:, 1::2], 8)
    shifts = ((8 - zeros) * scales.float()).to(x.dtype)
    return partial(torch._weight_int4pack_mm, x, packed, weight.group_size, torch.stack([scales, shifts], 2))


def _float_case(layer: str, tokens: int, tiny: bool) -> Case:
    shape = _shape(layer, tokens, tiny)
    t, n, k = shape
    return Case(
        kernel="K11",
        title=f"linear {layer} bf16, {tokens} tokens",
        goal=Goal("85 % of the bandwidth, no slower than cuBLAS (mean of all)", fraction=0.85, ratios={"cuBLAS": 1.0}),
        stretch=Goal("90 %, 1.08 times cuBLAS", fraction=0.9, ratios={"cuBLAS": 1.08}),
        group="K11 linear bf16, 1 to 64 tokens",
        make_inputs=partial(_operands, shape),
        run=lambda inputs: gpu.linear(*inputs),
        run_deterministic=lambda inputs: gpu.linear(*inputs, deterministic=True),
        reference=lambda inputs: F.linear(inputs[0].float(), inputs[1].float()),
        tolerance=TOLERANCE,
        bytes=2 * (n * k + t * k + t * n),
        formula="2 (N K + T K + T N) bytes",
        flops=2 * t * n * k,
        peers={"cuBLAS": Peer(_bf16_peer, on_cpu=True)},
        candidates={"linear": CANDIDATES},
    )


def _gated_case(tokens: int, tiny: bool) -> Case:
    shape = _shape("gate_up", tokens, tiny)
    t, n, k = shape
    return Case(
        kernel="K11",
        title=f"gated_linear gate_up bf16, {tokens} tokens",
        goal=Goal(
            "85 % of the bandwidth, no slower than cuBLAS and the activation", fraction=0.85, ratios={"apart": 1.0}
        ),
        stretch=Goal("90 %", fraction=0.9),
        group="K11 gated linear bf16, 1 to 64 tokens",
        make_inputs=partial(_operands, shape),
        run=lambda inputs: gpu.gated_linear(*inputs),
        run_deterministic=lambda inputs: gpu.gated_linear(*inputs, deterministic=True),
        reference=lambda inputs: reference.gated_linear(inputs[0].float(), inputs[1].float()),
        tolerance=TOLERANCE,
        bytes=2 * (n * k + t * k + t * n // 2),
        formula="2 (2 I K + T K + T I) bytes",
        flops=2 * t * n * k,
        peers={"apart": Peer(lambda inputs: partial(_activated, *inputs), on_cpu=True)},
        candidates={"gated_linear": GATED_CANDIDATES},
    )


def _activated(x: Tensor, weight: Tensor) -> Tensor:
    """cuBLAS, and our activation behind it."""
    return activate_and_mul(F.linear(x, weight))


def _scaled_case(kernel: str, dtype: torch.dtype, layer: str, tokens: int, tiny: bool) -> Case:
    name = "fp8" if kernel == "K12" else "int8"
    shape = _shape(layer, tokens, tiny)
    t, n, k = shape
    goal = Goal("75 % of the bandwidth", fraction=0.75)
    stretch = Goal("85 %", fraction=0.85)
    if tokens >= 2048:
        goal = Goal("0.9 times _int_mm", ratios={"_int_mm": 0.9})
        stretch = Goal("as fast as _int_mm", ratios={"_int_mm": 1.0})
        if kernel == "K12":
            goal = Goal("85 % of _scaled_mm's rate, 1.5 times cuBLAS bf16", fraction=0.85, ratios={"cuBLAS bf16": 1.5})
            stretch = Goal("92 %", fraction=0.92)
    peers = {"cuBLAS bf16": Peer(lambda inputs: _bf16_peer(_dequantised(inputs)), on_cpu=True)}
    if kernel == "K12":
        # The fast one adds in the matrix unit's reduced precision, which ours does not.
        peers["_scaled_mm"] = Peer(partial(_scaled_mm, fast=False))
        peers["_scaled_mm, fast"] = Peer(partial(_scaled_mm, fast=True), comparable=False)
    elif tokens > 16:
        # The bare int32 product, without scales; it takes 17 tokens or more.
        peers["_int_mm"] = Peer(lambda inputs: partial(torch._int_mm, inputs[0], inputs[2].T), comparable=False)
    return Case(
        kernel=kernel,
        title=f"linear {layer} {name} W8A8, {tokens} tokens",
        goal=goal,
        stretch=stretch,
        make_inputs=partial(_quantized, shape, dtype),
        run=lambda inputs: gpu.scaled_linear(*inputs, out_dtype=float_dtype(inputs[0].device)),
        run_deterministic=lambda inputs: gpu.scaled_linear(
            *inputs, out_dtype=float_dtype(inputs[0].device), deterministic=True
        ),
        reference=lambda inputs: reference.scaled_linear(*inputs, out_dtype=torch.float32),
        tolerance=TOLERANCE,
        bytes=n * k + t * k + 2 * t * n + 4 * (t + n),
        formula="N K + T K + 2 T N + 4 (T + N) bytes",
        flops=2 * t * n * k,
        rate=name,
        peers=peers,
        candidates={"scaled_linear": SCALED_CANDIDATES},
    )


def _blocks(shape: tuple[int, int, int], device: torch.device, i: int) -> Inputs:
    """x, x_scale and a weight in blocks of 128 by 128."""
    x, weight = _operands(shape, device, i)
    num_blocks, num_groups = (-(-size // GROUP_SIZE) for size in weight.shape)
    largest = weight.abs().max().float()
    scales = (largest / FP8_LARGEST).expand(num_blocks, num_groups).contiguous()
    values = (weight.float() / scales[0, 0]).to(torch.float8_e4m3fn)
    return *quantize_per_token(x, group_size=GROUP_SIZE), BlockScaledWeight(values, scales, GROUP_SIZE)


def _dequantised_blocks(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """The operands as floats."""
    x, x_scale, weight = inputs
    dtype = float_dtype(x.device)
    rows = x.float() * x_scale.repeat_interleave(GROUP_SIZE, 1)[:, : x.shape[1]]
    return rows.to(dtype), weight.dequantize().to(dtype)


def _block_case(layer: str, tokens: int, tiny: bool) -> Case:
    shape = _shape(layer, tokens, tiny)
    t, n, k = shape
    goal, stretch = Goal("75 % of the bandwidth", fraction=0.75), Goal("85 %", fraction=0.85)
    if tokens >= 2048:
        # Each sum of 128 products is multiplied and added outside of the matrix unit.
        goal = Goal("1.3 times cuBLAS bf16", ratios={"cuBLAS bf16": 1.3})
        stretch = Goal("1.5 times", ratios={"cuBLAS bf16": 1.5})
    return Case(
        kernel="K12",
        title=f"linear {layer} fp8 by blocks, {tokens} tokens",
        goal=goal,
        stretch=stretch,
        make_inputs=partial(_blocks, shape),
        run=lambda inputs: gpu.block_scaled_linear(*inputs, out_dtype=float_dtype(inputs[0].device)),
        run_deterministic=lambda inputs: gpu.block_scaled_linear(
            *inputs, out_dtype=float_dtype(inputs[0].device), deterministic=True
        ),
        reference=lambda inputs: reference.block_scaled_linear(*inputs, out_dtype=torch.float32),
        tolerance=TOLERANCE,
        bytes=n * k + t * k + 2 * t * n + 4 * t * k // GROUP_SIZE + 4 * n * k // GROUP_SIZE**2,
        formula="N K + T K + 2 T N + 4 T K / 128 + 4 N K / 128^2 bytes",
        flops=2 * t * n * k,
        rate="fp8",
        peers={"cuBLAS bf16": Peer(lambda inputs: _bf16_peer(_dequantised_blocks(inputs)), on_cpu=True)},
        candidates={"block_scaled_linear": BLOCK_CANDIDATES},
    )


# Tokens: least and wanted times cuBLAS bf16.
INT4_RATIOS = {16: (2.5, 3.2), 64: (1.6, 2.0), 512: (0.75, 0.75), 2048: (0.75, 0.75)}


def _int4_case(layer: str, tokens: int, tiny: bool) -> Case:
    shape = _shape(layer, tokens, tiny)
    t, n, k = shape
    if tokens == 1:
        goal, stretch = Goal("65 % of the packed bytes", fraction=0.65), Goal("75 %", fraction=0.75)
    else:
        goal, stretch = (
            Goal(f"{ratio} times cuBLAS bf16", ratios={"cuBLAS bf16": ratio}) for ratio in INT4_RATIOS[tokens]
        )
    return Case(
        kernel="K14",
        title=f"linear {layer} int4 W4A16 g128, {tokens} tokens",
        goal=goal,
        stretch=stretch,
        make_inputs=partial(_int4, shape),
        run=lambda inputs: gpu.int4_linear(*inputs),
        run_deterministic=lambda inputs: gpu.int4_linear(*inputs, deterministic=True),
        reference=lambda inputs: F.linear(inputs[0].float(), inputs[1].dequantize().float()),
        tolerance=TOLERANCE,
        bytes=n * k // 2 + 4 * n * k // GROUP_SIZE + 2 * (t * k + t * n),
        formula="N K / 2 + 4 N K / 128 + 2 (T K + T N) bytes",
        flops=2 * t * n * k,
        peers={
            "cuBLAS bf16": Peer(lambda inputs: _bf16_peer((inputs[0], inputs[1].dequantize())), on_cpu=True),
            # Its shift in place of a zero point is rounded to bfloat16.
            "_weight_int4pack_mm": Peer(_int4pack_mm, comparable=False),
            # Symmetric: the zero point of every group is 8.
            "Marlin": Peer(marlin, needs="vllm", comparable=False),
        },
        candidates={"int4_linear": INT4_CANDIDATES},
    )


def cases(tiny: bool) -> list[Case]:
    """K11 on all four layers; K12, K13 and K14 on the smallest and the largest, and on prompts."""
    fp8, int8 = ("K12", torch.float8_e4m3fn), ("K13", torch.int8)
    return [
        *(_float_case(layer, tokens, tiny) for layer in LAYERS for tokens in (1, 16, 64)),
        *(_gated_case(tokens, tiny) for tokens in (1, 16, 64)),
        *(_scaled_case(*which, layer, t, tiny) for which in (fp8, int8) for layer in ("o", "gate_up") for t in (1, 64)),
        *(_scaled_case(*which, "gate_up", 2048, tiny) for which in (fp8, int8)),
        _scaled_case(*fp8, "down", 8192, tiny),
        *(_block_case(layer, tokens, tiny) for layer in ("o", "gate_up") for tokens in (1, 64)),
        _block_case("gate_up", 2048, tiny),
        *(_int4_case(layer, tokens, tiny) for layer in ("o", "gate_up") for tokens in (1, 16, 64)),
        *(_int4_case("gate_up", tokens, tiny) for tokens in (512, 2048)),
    ]
