"""Mixture of experts at Qwen3-30B-A3B's shapes, and gpt-oss 20B's with biases (K15): decode batches, where bytes count,
prompts, where operations do; and routers.

Routing is drawn once for each number of tokens, uniformly, so that the experts that are touched can be counted
beforehand; sets of inputs differ in their values. Every contender is given the routing and aligns it within its time.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from ci.bench.kernels.case import Case, Goal, Inputs, Peer, float_dtype
from inflight_kernels import Activation, BlockScaledWeight
from inflight_kernels.matmul.weight_formats import BLOCK_INPUTS
from inflight_kernels.moe import gpu, reference
from inflight_kernels.moe.gpu.fused_moe import BLOCKS_CANDIDATES, CANDIDATES
from inflight_kernels.moe.routing import GroupScore, Routing, Scores

NUM_EXPERTS, HIDDEN_SIZE, INTERMEDIATE_SIZE, TOP_K = 128, 2048, 768, 8
GPT_OSS_20B = (32, 2880, 2880, 4)
TINY = (8, 64, 32, 2)
DEEPSEEK_V3 = Routing(
    num_chosen=8,
    scores=Scores.SIGMOID,
    scale=2.5,
    num_groups=8,
    num_chosen_groups=4,
    group_score=GroupScore.TOP2_SUM,
)
# Three roundings to bfloat16 on the way; inputs are such that results are about 0.1.
TOLERANCE = 2e-2
FP8_LARGEST = 448.0


@functools.cache
def _routing(tokens: int, num_experts: int, top_k: int) -> tuple[Tensor, Tensor]:
    """Weights and experts of each token, and by them the experts that are touched; on the CPU."""
    logits = torch.randn(tokens, num_experts, generator=torch.Generator().manual_seed(0))
    chosen, experts = logits.topk(top_k, dim=-1)
    return chosen.softmax(dim=-1), experts.int()


def _inputs(tokens: int, sizes: tuple[int, int, int, int], device: torch.device, i: int) -> Inputs:
    num_experts, hidden_size, intermediate_size, top_k = sizes
    generator = torch.Generator(device).manual_seed(i)
    draw = partial(torch.randn, generator=generator, device=device, dtype=float_dtype(device))
    weights, experts = _routing(tokens, num_experts, top_k)
    return (
        draw(tokens, hidden_size),
        weights.to(device),
        experts.to(device),
        draw(num_experts, 2 * intermediate_size, hidden_size).mul_(hidden_size**-0.5),
        draw(num_experts, hidden_size, intermediate_size).mul_(intermediate_size**-0.5),
    )


def _reference(inputs: Inputs) -> Tensor:
    x, weights, experts, w_gate_up, w_down = inputs
    return reference.fused_moe(x.float(), weights, experts, w_gate_up.float(), w_down.float())


def _silu_and_mul(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def _loop(inputs: Inputs) -> Callable[[], Tensor]:
    """cuBLAS, one expert after the other. Rows are sorted outside the measured time, because that waits for the GPU."""
    x, weights, experts, w_gate_up, w_down = inputs
    touched = experts.unique().tolist()
    rows = [torch.where(experts == expert) for expert in touched]

    def run() -> Tensor:
        out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for expert, (tokens, choices) in zip(touched, rows, strict=True):
            product = F.linear(_silu_and_mul(F.linear(x[tokens], w_gate_up[expert])), w_down[expert])
            out.index_add_(0, tokens, product.float() * weights[tokens, choices, None])
        return out.to(x.dtype)

    return run


def _grouped_mm(inputs: Inputs) -> Callable[[], Tensor]:
    """torch's grouped products, with its own sort, gather and scatter around them."""
    x, weights, experts, w_gate_up, w_down = inputs
    top_k = experts.shape[1]
    every = torch.arange(w_down.shape[0], device=x.device)

    def run() -> Tensor:
        flat = experts.flatten()
        order = flat.argsort(stable=True)
        ends = (flat[:, None] == every).sum(dim=0).cumsum(0).int()
        act = _silu_and_mul(F.grouped_mm(x[order // top_k], w_gate_up.mT, offs=ends))
        products = x.new_empty(len(order), x.shape[1])
        products[order] = F.grouped_mm(act, w_down.mT, offs=ends)
        return torch.einsum("tkh,tk->th", products.view(len(x), top_k, -1), weights.to(x.dtype))

    return run


def _vllm(inputs: Inputs) -> Callable[[], Tensor]:
    fused_experts = importlib.import_module("vllm.model_executor.layers.fused_moe").fused_experts
    x, weights, experts, w_gate_up, w_down = inputs
    return partial(fused_experts, x, w_gate_up, w_down, weights, experts)


def _liger(inputs: Inputs) -> Callable[[], Tensor]:
    apply = importlib.import_module("liger_kernel.ops.fused_moe").LigerFusedMoEFunction.apply
    x, weights, experts, w_gate_up, w_down = inputs
    return partial(apply, x, w_gate_up, w_down, experts, weights)


def _case(tokens: int, tiny: bool) -> Case:
    sizes = TINY if tiny else (NUM_EXPERTS, HIDDEN_SIZE, INTERMEDIATE_SIZE, TOP_K)
    num_experts, hidden_size, intermediate_size, top_k = sizes
    rows = min(tokens, 6) if tiny else tokens
    touched = len(_routing(rows, num_experts, top_k)[1].unique())
    peers_kept_up_with = {"vLLM": 1.0, "Liger": 1.0}
    goal = Goal(
        "70 % of the bandwidth on touched experts, no slower than vLLM and Liger", 0.7, ratios=peers_kept_up_with
    )
    stretch = Goal("80 %", fraction=0.8)
    if tokens >= 8192:
        goal = Goal("60 % of cuBLAS' rate, no slower than vLLM and Liger", fraction=0.6, ratios=peers_kept_up_with)
        stretch = Goal("68 %", fraction=0.68)
    return Case(
        kernel="K15",
        title=f"fused MoE bf16 128 experts top 8, {tokens} tokens",
        goal=goal,
        stretch=stretch,
        make_inputs=partial(_inputs, rows, sizes),
        run=lambda inputs: gpu.fused_moe(*inputs),
        run_deterministic=lambda inputs: gpu.fused_moe(*inputs, deterministic=True),
        reference=_reference,
        tolerance=TOLERANCE,
        bytes=2 * (3 * touched * hidden_size * intermediate_size + 2 * rows * hidden_size),
        formula="2 (3 E_touched H I + 2 T H) bytes, 6 k T H I operations",
        flops=6 * rows * top_k * hidden_size * intermediate_size,
        peers={
            "cuBLAS loop": Peer(_loop, on_cpu=True),
            "torch grouped_mm": Peer(_grouped_mm),
            "vLLM": Peer(_vllm, needs="vllm"),
            "Liger": Peer(_liger, needs="liger_kernel.ops.fused_moe"),
        },
        candidates={"fused_moe": CANDIDATES},
    )


def _by_blocks(tokens: int, sizes: tuple[int, int, int, int], device: torch.device, i: int) -> Inputs:
    """The same with weights of fp8; all blocks of one have one scale."""
    *routed, w_gate_up, w_down = _inputs(tokens, sizes, device, i)

    def blocks(weight: Tensor) -> BlockScaledWeight:
        scale = weight.abs().max().float() / FP8_LARGEST
        shape = (len(weight), *(-(-size // BLOCK_INPUTS) for size in weight.shape[1:]))
        values = torch.stack([(expert.float() / scale).to(torch.float8_e4m3fn) for expert in weight])
        return BlockScaledWeight(values, scale.expand(shape).contiguous(), BLOCK_INPUTS)

    return *routed, blocks(w_gate_up), blocks(w_down)


def _block_case(tokens: int, tiny: bool) -> Case:
    sizes = TINY if tiny else (NUM_EXPERTS, HIDDEN_SIZE, INTERMEDIATE_SIZE, TOP_K)
    num_experts, hidden_size, intermediate_size, top_k = sizes
    rows = min(tokens, 6) if tiny else tokens
    touched = len(_routing(rows, num_experts, top_k)[1].unique())
    goal, stretch = Goal("65 % of the bandwidth on touched experts", 0.65), Goal("75 %", fraction=0.75)
    if tokens >= 8192:
        # Each sum of 128 products is multiplied and added outside of the matrix unit.
        goal, stretch = Goal("40 % of the fp8 rate", fraction=0.4), Goal("55 %", fraction=0.55)
    return Case(
        kernel="K15",
        title=f"fused MoE fp8 by blocks 128 experts top 8, {tokens} tokens",
        goal=goal,
        stretch=stretch,
        make_inputs=partial(_by_blocks, rows, sizes),
        run=lambda inputs: gpu.fused_moe(*inputs),
        run_deterministic=lambda inputs: gpu.fused_moe(*inputs, deterministic=True),
        # In the type of the activations: what is rounded to fp8 was rounded to it before.
        reference=lambda inputs: reference.fused_moe(*inputs),
        tolerance=TOLERANCE,
        bytes=3 * touched * hidden_size * intermediate_size + 4 * rows * hidden_size,
        formula="3 E_touched H I + 4 T H bytes, 6 k T H I operations",
        flops=6 * rows * top_k * hidden_size * intermediate_size,
        rate="fp8",
        candidates={"fused_moe": BLOCKS_CANDIDATES},
    )


def _gpt_oss_inputs(tokens: int, sizes: tuple[int, int, int, int], device: torch.device, i: int) -> Inputs:
    """And the biases of both products."""
    inputs = _inputs(tokens, sizes, device, i)
    draw = partial(torch.randn, generator=torch.Generator(device).manual_seed(i), device=device, dtype=inputs[0].dtype)
    num_experts, hidden_size, intermediate_size, _ = sizes
    return *inputs, draw(num_experts, 2 * intermediate_size), draw(num_experts, hidden_size)


def _run_gpt_oss(inputs: Inputs, deterministic: bool = False) -> Tensor:
    *products, gate_up_bias, down_bias = inputs
    return gpu.fused_moe(
        *products,
        deterministic=deterministic,
        gate_up_bias=gate_up_bias,
        down_bias=down_bias,
        activation=Activation.CLAMPED_SWIGLU,
    )


def _gpt_oss_reference(inputs: Inputs) -> Tensor:
    x, weights, experts, w_gate_up, w_down, *biases = inputs
    return reference.fused_moe(
        x.float(),
        weights,
        experts,
        w_gate_up.float(),
        w_down.float(),
        gate_up_bias=biases[0].float(),
        down_bias=biases[1].float(),
        activation=Activation.CLAMPED_SWIGLU,
    )


def _gpt_oss_case(tokens: int, tiny: bool) -> Case:
    sizes = TINY if tiny else GPT_OSS_20B
    num_experts, hidden_size, intermediate_size, top_k = sizes
    rows = min(tokens, 6) if tiny else tokens
    touched = len(_routing(rows, num_experts, top_k)[1].unique())
    return Case(
        kernel="K15",
        title=f"fused MoE bf16 of gpt-oss 20B, {tokens} tokens",
        goal=Goal("60 % of cuBLAS' rate", 0.6) if tokens >= 8192 else Goal("70 % of the bandwidth", 0.7),
        make_inputs=partial(_gpt_oss_inputs, rows, sizes),
        run=_run_gpt_oss,
        run_deterministic=partial(_run_gpt_oss, deterministic=True),
        reference=_gpt_oss_reference,
        tolerance=TOLERANCE,
        bytes=2 * touched * (3 * hidden_size * intermediate_size + 2 * intermediate_size + hidden_size)
        + 4 * rows * hidden_size,
        formula="2 E_touched (3 H I + 2 I + H) + 4 T H bytes, 6 k T H I operations",
        flops=6 * rows * top_k * hidden_size * intermediate_size,
        candidates={"fused_moe": CANDIDATES},
    )


def _route_inputs(tokens: int, num_experts: int, device: torch.device, i: int) -> Inputs:
    """Logits of each token, and a bias of the choice."""
    draw = partial(torch.randn, generator=torch.Generator(device).manual_seed(i), device=device)
    return draw(tokens, num_experts), draw(num_experts)


def _route_case(title: str, routing: Routing, has_bias: bool, sizes: tuple[int, int]) -> Case:
    def run(route: Callable[..., tuple[Tensor, Tensor]], inputs: Inputs) -> tuple[Tensor, Tensor]:
        logits, bias = inputs
        return route(logits, routing, bias if has_bias else None)

    tokens, num_experts = sizes
    return Case(
        kernel="K15",
        title=title,
        goal=Goal("at most 4 us", microseconds=4.0),
        make_inputs=partial(_route_inputs, tokens, num_experts),
        run=partial(run, gpu.route_experts),
        # Of nearly equal experts either may come first.
        reference=lambda inputs: run(reference.route_experts, inputs)[0],
        compared=lambda result: result[0],
        tolerance=1e-4,
        bytes=tokens * (4 * num_experts + 8 * routing.num_chosen) + 4 * num_experts * has_bias,
        formula="(4 E + 8 k) T, and 4 E of a bias",
    )


def cases(tiny: bool) -> list[Case]:
    """K15."""
    return [
        *(_case(tokens, tiny) for tokens in (1, 16, 64, 8192, 32768)),
        *(_block_case(tokens, tiny) for tokens in (64, 8192)),
        *(_gpt_oss_case(tokens, tiny) for tokens in (1, 64, 8192)),
        _route_case("router 128 experts top 8 B=64", Routing(num_chosen=8), False, (6, 16) if tiny else (64, 128)),
        _route_case("router of DeepSeek-V3 B=64", DEEPSEEK_V3, True, (6, 16) if tiny else (64, 256)),
    ]
