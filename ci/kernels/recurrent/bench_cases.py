"""Layers with a state for each sequence, at the shapes of Qwen3-Next-80B-A3B: K17."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from ci.bench.kernels.case import Case, Goal, Inputs, Peer, float_dtype, same_way
from inflight_kernels import Activation, StepSequences
from inflight_kernels.recurrent import gpu

TAPS = 4


def _sequences(count: int, tokens: int, device: torch.device) -> StepSequences:
    """So many, each with as many new tokens and none before."""
    return StepSequences(
        slots_B=torch.arange(count, device=device),
        starts=torch.arange(0, count * tokens + 1, tokens, dtype=torch.int32, device=device),
        positions_T=torch.arange(tokens, device=device).repeat(count),
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


def cases(tiny: bool) -> list[Case]:
    """A prompt of 8k tokens, and 64 decodes."""
    channels, tokens, count = (24, 40, 3) if tiny else (8192, 8192, 64)
    return [
        _conv_case("short convolution of 8k x 8192 bf16", 1, tokens, channels, Goal("70 % of BW", fraction=0.7)),
        _conv_case("short convolution B=64 x 8192 bf16", count, 1, channels, Goal("6 us", microseconds=6.0)),
    ]
