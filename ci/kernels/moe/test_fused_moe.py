"""The mixture of experts: kernels against reference, reference against its formula, rows against their batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.nemotron_h import modeling_nemotron_h

import inflight_kernels
from ci.kernels.kernel_cases import DTYPES, HAS_FLOAT8, assert_near
from inflight_kernels import BlockScaledWeight
from inflight_kernels.activation.kinds import Activation
from inflight_kernels.moe import gpu, reference
from inflight_kernels.moe.gpu.fused_moe import BLOCKS_CANDIDATES
from inflight_kernels.moe.routing import Routing
from inflight_kernels.quantization.reference import quantize_per_token

TOLERANCE = {torch.float32: 5e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}
# Tiles small enough that the shapes below have several of each.
TINY = {
    "BLOCK_M": 16, "BLOCK_I": 16, "BLOCK_H": 16, "BLOCK_K": 16, "GROUP_M": 2, "SWAP_AB": 0, "num_warps": 4,
    "num_stages": 2,
}  # fmt: skip


def random_layer(
    tokens: int, num_experts: int, hidden: int, intermediate: int, top_k: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    x = torch.randn(tokens, hidden).to(dtype)
    w_gate_up = (torch.randn(num_experts, 2 * intermediate, hidden) / hidden**0.5).to(dtype)
    w_down = (torch.randn(num_experts, hidden, intermediate) / intermediate**0.5).to(dtype)
    weights, experts = reference.route_experts(torch.randn(tokens, num_experts), Routing(num_chosen=top_k))
    return x, weights, experts, w_gate_up, w_down


def block_scaled(weight: Tensor, block_outputs: int) -> BlockScaledWeight:
    """(E, N, K) as fp8, in blocks of magnitudes that differ up to ten times."""
    num_experts, num_outputs, num_inputs = weight.shape
    scales = 10 ** torch.rand(num_experts, -(-num_outputs // block_outputs), -(-num_inputs // 128)) / 2000
    values = (weight.float() * 400 / weight.abs().max()).to(torch.float8_e4m3fn)
    return BlockScaledWeight(values, scales, block_outputs)


def run(layer: tuple[Any, ...], device: torch.device, **options: object) -> Tensor:
    return gpu.fused_moe(*(on(device, each) for each in layer), **options)


def on(device: torch.device, weight: Tensor | BlockScaledWeight) -> Tensor | BlockScaledWeight:
    if isinstance(weight, BlockScaledWeight):
        return weight._replace(values=weight.values.to(device), scales=weight.scales.to(device))
    return weight.to(device)


@pytest.fixture(autouse=True)
def _poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a launcher allocates holds NaN or absurd indices before it is written."""
    empty = torch.empty

    def poisoned(*args: object, **kwargs: object) -> Tensor:
        tensor = empty(*args, **kwargs)
        return tensor.fill_(float("nan") if tensor.is_floating_point() else 2**30)

    monkeypatch.setattr(torch, "empty", poisoned)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("swap_ab", [0, 1])
@pytest.mark.parametrize(
    ("tokens", "num_experts", "hidden", "intermediate", "top_k"),
    [(9, 4, 40, 24, 2), (21, 3, 32, 16, 3), (1, 9, 24, 40, 2), (5, 6, 16, 8, 1)],
)
def test_kernels_equal_reference(
    tokens: int,
    num_experts: int,
    hidden: int,
    intermediate: int,
    top_k: int,
    swap_ab: int,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    layer = random_layer(tokens, num_experts, hidden, intermediate, top_k, dtype)
    out = torch.full((tokens, hidden + 5), float("nan"), dtype=dtype, device=device)[:, :hidden]
    actual = run(layer, device, out=out, config=TINY | {"SWAP_AB": swap_ab})
    assert actual is out
    assert_near(actual, reference.fused_moe(*layer), TOLERANCE[dtype])


def check_activated(
    layer: tuple[Any, ...], biases: dict[str, Tensor], activation: Activation, swap_ab: int, device: torch.device
) -> None:
    """The kernel computes what the reference does."""
    expected = reference.fused_moe(*layer, **biases, activation=activation)
    of_device = {name: bias.to(device) for name, bias in biases.items()}
    actual = run(layer, device, **of_device, activation=activation, config=TINY | {"SWAP_AB": swap_ab})
    scale = expected.abs().max().float().item()
    assert_near(actual / scale, expected / scale, TOLERANCE[layer[0].dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("swap_ab", [0, 1])
@pytest.mark.parametrize(
    ("has_biases", "activation"),
    [
        (True, Activation.SILU),
        (False, Activation.CLAMPED_SWIGLU),
        (True, Activation.CLAMPED_SWIGLU),
        (False, Activation.GELU_TANH),
    ],
)
def test_kernels_add_biases_and_activate(
    has_biases: bool, activation: Activation, swap_ab: int, dtype: torch.dtype, device: torch.device
) -> None:
    layer, options = random_layer(9, 4, 40, 24, 2, dtype), {}
    # Of which many are beyond the limits of the clamped SwiGLU.
    layer[3].mul_(6)
    if has_biases:
        options = {"gate_up_bias": torch.randn(4, 48).to(dtype), "down_bias": torch.randn(4, 40).to(dtype)}
    check_activated(layer, options, activation, swap_ab, device)


def without_gates(layer: tuple[Any, ...]) -> tuple[Any, ...]:
    """The same, of the second half of the first product alone."""
    x, weights, experts, w_gate_up, w_down = layer
    if isinstance(w_gate_up, Tensor):
        return x, weights, experts, w_gate_up.chunk(2, 1)[1].contiguous(), w_down
    values, scales, block_outputs = w_gate_up
    halves = values.chunk(2, 1)[1].contiguous(), scales.chunk(2, 1)[1].contiguous()
    return x, weights, experts, BlockScaledWeight(*halves, block_outputs), w_down


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("swap_ab", [0, 1])
@pytest.mark.parametrize("activation", [Activation.RELU_SQUARED, Activation.SILU])
@pytest.mark.parametrize("has_biases", [False, True])
def test_kernels_compute_experts_without_gates(
    has_biases: bool, activation: Activation, swap_ab: int, dtype: torch.dtype, device: torch.device
) -> None:
    layer, options = without_gates(random_layer(9, 4, 40, 24, 2, dtype)), {}
    if has_biases:
        options = {"gate_up_bias": torch.randn(4, 24).to(dtype), "down_bias": torch.randn(4, 40).to(dtype)}
    check_activated(layer, options, activation, swap_ab, device)


@torch.inference_mode()
def test_reference_is_transformers_experts_of_nemotron_h() -> None:
    config = modeling_nemotron_h.NemotronHConfig(hidden_size=12, moe_intermediate_size=7, n_routed_experts=5)
    experts = modeling_nemotron_h.NemotronHExperts(config)
    for parameter in experts.parameters():
        parameter.copy_(torch.randn(parameter.shape))
    x, weights, chosen, _, _ = random_layer(6, 5, 12, 7, 3, torch.float32)
    actual = reference.fused_moe(
        x, weights, chosen, experts.up_proj, experts.down_proj, activation=Activation.RELU_SQUARED
    )
    torch.testing.assert_close(actual, experts(x, chosen.long(), weights), atol=1e-4, rtol=1e-4)


@torch.inference_mode()
def test_reference_is_transformers_experts_of_gpt_oss() -> None:
    config = modeling_gpt_oss.GptOssConfig(hidden_size=12, intermediate_size=7, num_local_experts=5)
    experts = modeling_gpt_oss.GptOssExperts(config)
    for parameter in experts.parameters():
        parameter.copy_(torch.randn(parameter.shape))
    x, weights, chosen, _, _ = random_layer(6, 5, 12, 7, 3, torch.float32)
    gate_up, bias = experts.gate_up_proj.mT, experts.gate_up_proj_bias
    actual = reference.fused_moe(
        x,
        weights,
        chosen,
        torch.cat([gate_up[:, ::2], gate_up[:, 1::2]], 1),
        experts.down_proj.mT,
        gate_up_bias=torch.cat([bias[:, ::2], bias[:, 1::2]], 1),
        down_bias=experts.down_proj_bias,
        activation=Activation.CLAMPED_SWIGLU,
    )
    torch.testing.assert_close(actual, experts(x, chosen.long(), weights), atol=1e-4, rtol=1e-4)


@pytest.mark.skipif(not HAS_FLOAT8, reason="this GPU cannot multiply float8_e4m3fn")
def test_experts_without_gates_in_fp8_by_blocks(device: torch.device) -> None:
    x, weights, experts, w_gate_up, w_down = random_layer(9, 4, 200, 72, 2, torch.float32)
    layer = without_gates((x, weights, experts, block_scaled(w_gate_up, 8), block_scaled(w_down, 128)))
    # Without an activation that curves: one row in fp8 is that of the other.
    expected = reference.fused_moe(*layer, activation=Activation.RELU)
    actual = run(layer, device, activation=Activation.RELU, config=TINY | {"BLOCK_K": 128})
    scale = expected.abs().max()
    assert_near(actual / scale, expected / scale, ROUNDED_OTHERWISE[torch.float32])


def test_launcher_checks_biases_and_activations() -> None:
    layer = random_layer(2, 4, 16, 8, 2, torch.float32)
    for options, sentence in (
        ({"gate_up_bias": torch.zeros(4, 8)}, r"gate_up_bias must have shape \(4, 16\)"),
        ({"down_bias": torch.zeros(4, 16).half()}, "down_bias must be torch.float32"),
        ({"down_bias": torch.zeros(16, 4).T}, "down_bias must be contiguous"),
    ):
        with pytest.raises(ValueError, match=sentence):
            gpu.fused_moe(*layer, **options, config=TINY)
    with pytest.raises(ValueError, match="clamped_swiglu is for experts with gates only"):
        inflight_kernels.fused_moe(*without_gates(layer), activation=Activation.CLAMPED_SWIGLU)


BLOCK_SHAPES = [(9, 4, 200, 72, 2), (21, 3, 128, 256, 3), (1, 9, 300, 40, 2), (5, 6, 96, 144, 1)]
"""Tokens, experts, hidden size, intermediate size and choices: groups and blocks that end within, and not."""


ROUNDED_OTHERWISE = {torch.float32: 1e-3, torch.float16: 5e-3, torch.bfloat16: 4e-2}
"""Of the largest result: what other roundings of sums make, as long as the activated row is the same in fp8."""


def quantized(values: Tensor) -> tuple[Tensor, Tensor]:
    """What fp8 makes of a row in groups of 128, in float64, and how far from it the next number of fp8 is."""
    q, scale = quantize_per_token(values.float(), group_size=128)
    scales = scale.double()[torch.arange(len(values)) // 128]
    # Of 4 bits of mantissa, down to the smallest exponent.
    steps = torch.exp2(torch.frexp(q.double()).exponent.clamp(min=-5).double() - 4)
    return q.double() * scales, steps * scales


def dequantized(weight: BlockScaledWeight, expert: int) -> Tensor:
    """float64 (N, K)."""
    rows, columns = (torch.arange(size) for size in weight.shape[1:])
    return (
        weight.values[expert].double() * weight.scales[expert].double()[rows // weight.block_outputs][:, columns // 128]
    )


def activated(x: Tensor, gate_up: BlockScaledWeight, expert: int) -> Tensor:
    gate, up = (dequantized(gate_up, expert) @ quantized(x)[0]).chunk(2)
    return gate / (1 + torch.exp(-gate)) * up


def of_one_step(
    x: Tensor, weights: Tensor, experts: Tensor, gate_up: BlockScaledWeight, down: BlockScaledWeight
) -> Tensor:
    """How much each result changes at most if one element of an activated row is the next number of fp8."""
    changes = torch.zeros(x.shape, dtype=torch.float64)
    for token, (row, chosen) in enumerate(zip(x, experts.tolist(), strict=True)):
        for weight, expert in zip(weights[token].double(), chosen, strict=True):
            _, steps = quantized(activated(row, gate_up, expert).to(x.dtype))
            changes[token] = changes[token].maximum(weight * (steps * dequantized(down, expert).abs()).amax(1))
    return changes


@pytest.mark.skipif(not HAS_FLOAT8, reason="this GPU cannot multiply float8_e4m3fn")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("config", [TINY | {"BLOCK_K": 128}, *BLOCKS_CANDIDATES])
@pytest.mark.parametrize("shape", BLOCK_SHAPES)
def test_fp8_by_blocks_equals_reference(
    shape: tuple[int, int, int, int, int], config: dict[str, int], dtype: torch.dtype, device: torch.device
) -> None:
    """But for activated rows of which one element is rounded to the next number of fp8."""
    x, weights, experts, w_gate_up, w_down = random_layer(*shape, dtype)
    layer = (x, weights, experts, block_scaled(w_gate_up, 8), block_scaled(w_down, 128))
    expected = reference.fused_moe(*layer).double()
    actual = run(layer, device, config=config).cpu().double()
    most = of_one_step(*layer) + ROUNDED_OTHERWISE[dtype] * expected.abs().max()
    assert ((actual - expected).abs() <= most).all(), ((actual - expected).abs() / most).max()


def test_reference_of_fp8_by_blocks_is_its_formula() -> None:
    """In float64 but for what is quantised."""
    x, weights, experts, w_gate_up, w_down = random_layer(6, 5, 200, 72, 3, torch.float32)
    blocks = block_scaled(w_gate_up, 8), block_scaled(w_down, 128)
    expected = torch.zeros_like(x, dtype=torch.float64)
    for token in range(6):
        for weight, expert in zip(weights[token].double(), experts[token].tolist(), strict=True):
            row = quantized(activated(x[token], blocks[0], expert))[0]
            expected[token] += weight * (dequantized(blocks[1], expert) @ row)
    largest = expected.abs().max()
    assert_near(reference.fused_moe(x, weights, experts, *blocks) / largest, expected / largest, 2e-2)


@pytest.mark.skipif(not HAS_FLOAT8, reason="this GPU cannot multiply float8_e4m3fn")
def test_a_row_of_fp8_by_blocks_has_the_same_bits_in_every_batch(device: torch.device) -> None:
    x, weights, experts, w_gate_up, w_down = random_layer(33, 8, 200, 144, 2, torch.float32)
    blocks = block_scaled(w_gate_up, 16), block_scaled(w_down, 128)

    def rows(begin: int, end: int) -> Tensor:
        return run((x[begin:end], weights[begin:end], experts[begin:end], *blocks), device, deterministic=True)

    together = rows(0, 33)
    for begin, end in ((0, 1), (7, 8), (3, 5), (10, 33)):
        assert torch.equal(rows(begin, end), together[begin:end])


def test_reference_is_its_formula() -> None:
    x, weights, experts, w_gate_up, w_down = (
        tensor.double() if tensor.is_floating_point() else tensor
        for tensor in random_layer(6, 5, 12, 7, 3, torch.float32)
    )
    expected = torch.zeros_like(x)
    for token in range(6):
        for weight, expert in zip(weights[token], experts[token].tolist(), strict=True):
            gate, up = (w_gate_up[expert] @ x[token]).chunk(2)
            expected[token] += weight * (w_down[expert] @ (gate / (1 + torch.exp(-gate)) * up))
    actual = reference.fused_moe(x, weights.float(), experts, w_gate_up, w_down)
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("case", ["all to one", "the same expert twice", "none"])
def test_any_routing_is_right(case: str, device: torch.device) -> None:
    x, weights, experts, w_gate_up, w_down = random_layer(19, 4, 24, 16, 2, torch.float32)
    experts = {
        "all to one": torch.stack([torch.full((19,), 2), torch.full((19,), -1)], 1),
        "the same expert twice": torch.full((19, 2), 3),
        "none": torch.full((19, 2), -1),
    }[case].int()
    layer = (x, weights, experts, w_gate_up, w_down)
    assert_near(run(layer, device, config=TINY), reference.fused_moe(*layer), TOLERANCE[torch.float32])


@pytest.mark.parametrize("tokens", [1, 12])
def test_a_choice_of_no_expert_adds_nothing(tokens: int, device: torch.device) -> None:
    x, weights, experts, w_gate_up, w_down = random_layer(tokens, 8, 16, 16, 2, torch.float32)
    experts[0, 1], experts[-1, 0] = -1, 8
    weights[0, 1] = float("nan")
    layer = (x, weights, experts, w_gate_up, w_down)
    assert_near(run(layer, device, config=TINY), reference.fused_moe(*layer), TOLERANCE[torch.float32])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_in_every_batch(dtype: torch.dtype, device: torch.device) -> None:
    x, weights, experts, w_gate_up, w_down = random_layer(33, 8, 48, 32, 2, dtype)

    def rows(begin: int, end: int) -> Tensor:
        layer = (x[begin:end], weights[begin:end], experts[begin:end], w_gate_up, w_down)
        return run(layer, device, deterministic=True)

    together = rows(0, 33)
    # 1 token takes the path without alignment, 2 to 33 the one with it, in tiles filled otherwise.
    for begin, end in ((0, 1), (7, 8), (3, 5), (10, 33)):
        assert torch.equal(rows(begin, end), together[begin:end])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_so_it_has_in_torch_if_it_is_deterministic(dtype: torch.dtype) -> None:
    x, weights, experts, w_gate_up, w_down = random_layer(40, 4, 96, 64, 3, dtype)
    together = reference.fused_moe(x, weights, experts, w_gate_up, w_down, deterministic=True)
    for begin, end in ((0, 1), (7, 9), (3, 40)):
        rows = slice(begin, end)
        part = reference.fused_moe(x[rows], weights[rows], experts[rows], w_gate_up, w_down, deterministic=True)
        assert torch.equal(part, together[rows])


def test_launcher_checks_its_tensors() -> None:
    layer = random_layer(2, 4, 16, 8, 2, torch.float32)
    assert gpu.fused_moe(layer[0][:0], layer[1][:0], layer[2][:0], *layer[3:]).shape == (0, 16)
    with pytest.raises(ValueError, match="w_down must have shape"):
        gpu.fused_moe(*layer[:4], layer[4][:, :, :4])
    with pytest.raises(ValueError, match="out must not be x"):
        gpu.fused_moe(*layer, out=layer[0])
    with pytest.raises(ValueError, match=r"experts must be torch\.int32"):
        gpu.fused_moe(*layer[:2], layer[2].long(), *layer[3:])
    blocks = block_scaled(layer[3], 8), block_scaled(layer[4], 8)
    with pytest.raises(ValueError, match="must both be floats or both fp8 by blocks"):
        gpu.fused_moe(*layer[:4], blocks[1])
    with pytest.raises(ValueError, match="BLOCK_K must be 128"):
        gpu.fused_moe(*layer[:3], *blocks, config=TINY)
    with pytest.raises(ValueError, match=r"the scales of w_down must have shape \(4, 2, 1\)"):
        gpu.fused_moe(*layer[:3], blocks[0], blocks[1]._replace(scales=blocks[1].scales[:, :1]))
