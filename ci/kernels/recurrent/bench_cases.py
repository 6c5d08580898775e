"""Layers with a state for each sequence, at the shapes of Qwen3-Next-80B-A3B and of Nemotron-H 8B: K17."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ci.bench.kernels.case import Case, Goal, Inputs, Peer, float_dtype, same_way
from inflight_kernels import Activation, StepSequences
from inflight_kernels.recurrent import gpu
from inflight_kernels.recurrent.chunk import CHUNK, chunk_shape
from inflight_kernels.recurrent.gpu.gated_delta_rule import CANDIDATES as DELTA_CANDIDATES
from inflight_kernels.recurrent.gpu.state_space_scan import CANDIDATES as SCAN_CANDIDATES

TAPS = 4
KEPT = CHUNK // 2
"""Tokens of a decode's chunk that came before it."""


def _sequences(count: int, tokens: int, device: torch.device) -> StepSequences:
    """So many, each with as many new tokens; prompts have none before, and decodes a chunk and a half."""
    first = CHUNK + KEPT if tokens == 1 else 0
    return StepSequences(
        slots_B=torch.arange(count, device=device),
        starts=torch.arange(0, count * tokens + 1, tokens, dtype=torch.int32, device=device),
        positions_T=torch.arange(first, first + tokens, device=device).repeat(count),
    )


def _conv_inputs(count: int, tokens: int, channels: int, device: torch.device, i: int) -> Inputs:
    """x, weight, state, sequences."""
    generator, dtype = torch.Generator(device).manual_seed(i), float_dtype(device)
    x = torch.randn(count * tokens, channels, generator=generator, device=device).to(dtype)
    weight = torch.randn(channels, TAPS, generator=generator, device=device).to(dtype)
    return x, weight, x.new_zeros(count, TAPS - 1, channels), _sequences(count, tokens, device)


def _conv(x: Tensor, weight: Tensor, state: Tensor, _: StepSequences) -> Tensor:
    by_sequence = x.unflatten(0, (len(state), -1)).transpose(1, 2)
    y = F.conv1d(by_sequence, weight[:, None], padding=TAPS - 1, groups=len(weight))[:, :, : by_sequence.shape[2]]
    return F.silu(y).transpose(1, 2).flatten(0, 1)


def _conv_case(title: str, count: int, tokens: int, channels: int, goal: Goal) -> Case:
    return Case(
        kernel="K17",
        title=title,
        goal=goal,
        make_inputs=partial(_conv_inputs, count, tokens, channels),
        run=lambda inputs: gpu.causal_conv(inputs[0], inputs[1], None, *inputs[2:], Activation.SILU),
        reference=lambda inputs: _conv(*(each.float() for each in inputs[:3]), inputs[3]),
        tolerance=2e-2,
        bytes=4 * count * (tokens + TAPS - 1) * channels,
        formula="4 (T + 3 B) C",
        peers={"torch eager": Peer(same_way(_conv), on_cpu=True, comparable=False)},  # it rounds before the activation
    )


def _delta_inputs(
    count: int, tokens: int, num_keys: int, num_heads: int, dim: int, device: torch.device, i: int
) -> Inputs:
    """qkv, a, b, a_log, dt_bias, state, sequences, dim, chunk."""
    generator, dtype = torch.Generator(device).manual_seed(i), float_dtype(device)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device)

    num_tokens = count * tokens
    qkv = random(num_tokens, (2 * num_keys + num_heads) * dim).to(dtype)
    return (
        qkv,
        random(num_tokens, num_heads).to(dtype),
        random(num_tokens, num_heads).to(dtype),
        random(num_heads),
        random(num_heads),
        torch.zeros(count, num_heads, dim, dim, device=device),
        _sequences(count, tokens, device),
        dim,
        qkv.new_zeros(count, *chunk_shape(qkv, num_heads, 2 * dim + 2)),
    )


def _delta(
    qkv: Tensor,
    a: Tensor,
    b: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    _: StepSequences,
    dim: int,
    *__: Any,
) -> Tensor:
    """Of all sequences together, each from a state of zeros."""
    count, num_heads = state.shape[:2]
    heads = qkv.float().view(count, -1, qkv.shape[1] // dim, dim)
    num_keys = (heads.shape[2] - num_heads) // 2
    queries, keys, values = heads.split([num_keys, num_keys, num_heads], 2)
    queries, keys = (
        F.normalize(each, dim=-1).repeat_interleave(num_heads // num_keys, 2).unsqueeze(-1) for each in (queries, keys)
    )
    decays = torch.exp(-a_log.exp() * F.softplus(a.float() + dt_bias)).view(count, -1, num_heads, 1, 1)
    betas = b.float().sigmoid().view(count, -1, num_heads, 1)
    own, outputs = torch.zeros_like(state), []
    for t in range(heads.shape[1]):
        own = own * decays[:, t]
        delta = (values[:, t] - (own * keys[:, t]).sum(2)) * betas[:, t]
        own = own + keys[:, t] * delta.unsqueeze(2)
        outputs.append((own * queries[:, t]).sum(2) * dim**-0.5)
    return torch.stack(outputs, 1).flatten(2).flatten(0, 1)


def _delta_case(title: str, count: int, tokens: int, num_keys: int, num_heads: int, dim: int, goal: Goal) -> Case:
    per_token = 4 * (num_keys + num_heads) * dim + 4 * num_heads
    # A prompt ends with a chunk, and reads no state; a decode completes none, and writes none.
    kept, of_kept = 2 * (KEPT + 1) * num_heads * (2 * dim + 2), f" + {2 * (KEPT + 1)} B V (2 D + 2)"
    if tokens > 1:
        kept, of_kept = 0, ""
    return Case(
        kernel="K17",
        title=title,
        goal=goal,
        make_inputs=partial(_delta_inputs, count, tokens, num_keys, num_heads, dim),
        run=lambda inputs: gpu.gated_delta_rule(*inputs),
        reference=lambda inputs: _delta(*inputs),
        tolerance=2e-2,
        bytes=count * (4 * num_heads * dim * dim + kept + tokens * per_token),
        formula="4 B V D^2 + T (4 (K + V) D + 4 V)" + of_kept,
        flops=count * tokens * num_heads * dim * (6 * dim + 8 * CHUNK),
        peers={"torch eager": Peer(same_way(_delta), on_cpu=True)},
        candidates={"gated_delta_rule": DELTA_CANDIDATES},
    )


def _scan_inputs(
    count: int,
    tokens: int,
    num_heads: int,
    num_groups: int,
    head_dim: int,
    state_dim: int,
    device: torch.device,
    i: int,
) -> Inputs:
    """x, b, c, dt, a_log, d, dt_bias, state, sequences, limits, chunk."""
    generator, dtype = torch.Generator(device).manual_seed(i), float_dtype(device)
    widths = (num_heads * head_dim, num_groups * state_dim, num_groups * state_dim, num_heads)
    columns = [torch.randn(count * tokens, width, generator=generator, device=device).to(dtype) for width in widths]
    of_heads = torch.randn(3, num_heads, generator=generator, device=device)
    state = torch.zeros(count, num_heads, head_dim, state_dim, device=device)
    chunk = columns[0].new_zeros(count, *chunk_shape(columns[0], num_heads, head_dim + state_dim + 1))
    return *columns, *of_heads, state, _sequences(count, tokens, device), (0.0, float("inf")), chunk


def _scan(
    x: Tensor,
    b: Tensor,
    c: Tensor,
    dt: Tensor,
    a_log: Tensor,
    d: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    *_: Any,
) -> Tensor:
    """Of all sequences together, each from a state of zeros."""
    count, num_heads, head_dim, state_dim = state.shape
    rows = x.float().view(count, -1, num_heads, head_dim)
    groups = [each.float().view(count, rows.shape[1], -1, state_dim) for each in (b, c)]
    inward, outward = (each.repeat_interleave(num_heads // each.shape[2], 2).unsqueeze(3) for each in groups)
    times = F.softplus(dt.float() + dt_bias).view(count, -1, num_heads, 1, 1)
    own, outputs = torch.zeros_like(state), []
    for t in range(rows.shape[1]):
        own = own * torch.exp(-a_log.exp()[:, None, None] * times[:, t])
        own = own + times[:, t] * rows[:, t].unsqueeze(3) * inward[:, t]
        outputs.append((own * outward[:, t]).sum(3) + d[:, None] * rows[:, t])
    return torch.stack(outputs, 1).flatten(2).flatten(0, 1)


def _scan_case(title: str, count: int, shape: tuple[int, int, int, int], goal: Goal) -> Case:
    num_heads, num_groups, head_dim, state_dim = shape
    per_token = 4 * num_heads * head_dim + 4 * num_groups * state_dim + 2 * num_heads
    kept = 2 * (KEPT + 1) * num_heads * (head_dim + state_dim + 1)
    return Case(
        kernel="K17",
        title=title,
        goal=goal,
        make_inputs=partial(_scan_inputs, count, 1, *shape),
        run=lambda inputs: gpu.state_space_scan(*inputs),
        reference=lambda inputs: _scan(*inputs),
        tolerance=2e-2,
        bytes=count * (4 * num_heads * head_dim * state_dim + kept + per_token),
        formula=f"4 B H P N + {2 * (KEPT + 1)} B H (P + N + 1) + T (4 H P + 4 G N + 2 H)",
        peers={"torch eager": Peer(same_way(_scan), on_cpu=True)},
        candidates={"state_space_scan": SCAN_CANDIDATES},
    )


def _norm_inputs(tokens: int, width: int, group_size: int, device: torch.device, i: int) -> Inputs:
    """x, gate, weight."""
    generator, dtype = torch.Generator(device).manual_seed(i), float_dtype(device)
    x, gate = torch.randn(2, tokens, width, generator=generator, device=device).to(dtype)
    return x, gate, torch.randn(group_size, generator=generator, device=device).to(dtype)


def _norm(x: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
    normed = F.rms_norm(x.unflatten(1, (-1, len(weight))), (len(weight),), weight, 1e-6).flatten(1)
    return (normed.float() * F.silu(gate.float())).to(x.dtype)


def _norm_case(title: str, tokens: int, width: int, group_size: int, goal: Goal) -> Case:
    return Case(
        kernel="K17",
        title=title,
        goal=goal,
        make_inputs=partial(_norm_inputs, tokens, width, group_size),
        run=lambda inputs: gpu.gated_rms_norm(*inputs, 1e-6),
        reference=lambda inputs: _norm(*(each.float() for each in inputs)),
        tolerance=2e-2,
        bytes=6 * tokens * width,
        formula="6 T C",
        peers={"torch eager": Peer(same_way(_norm), on_cpu=True)},
    )


def cases(tiny: bool) -> list[Case]:
    """Prompts of 8k tokens and 1k, and 64 decodes. All begin with states and earlier inputs of zeros, and a call reads
    nothing that one has written before."""
    channels, tokens, count = (24, 40, 3) if tiny else (8192, 8192, 64)
    of_heads = (1, 2, 16) if tiny else (16, 32, 128)
    return [
        _conv_case("short convolution of 8k x 8192 bf16", 1, tokens, channels, Goal("70 % of BW", fraction=0.7)),
        _conv_case("short convolution B=64 x 8192 bf16", count, 1, channels, Goal("6 us", microseconds=6.0)),
        _delta_case("gated delta rule B=64 32 x 128 bf16", count, 1, *of_heads, Goal("75 % of BW", fraction=0.75)),
        _scan_case(
            "state space B=64 128 x 64 x 128 bf16",
            count,
            (2, 1, 8, 16) if tiny else (128, 8, 64, 128),
            Goal("75 % of BW", fraction=0.75),
        ),
        _norm_case(
            "RMSNorm of heads and gate 8k x 4096 bf16",
            tokens,
            32 if tiny else 4096,
            of_heads[2],
            Goal("85 % of BW", fraction=0.85),
        ),
        # Four microseconds of a chunk: about ten products that need each other, and a load.
        _delta_case(
            "gated delta rule of 1k 32 x 128 bf16",
            1,
            2 * CHUNK if tiny else 1024,
            *of_heads,
            Goal("0.25 us a token", microseconds=256.0),
        ),
    ]
