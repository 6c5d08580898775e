"""Layers with a state in torch: a sequence at a time.

What is computed at once has the same shape whatever the step holds. So has torch's order of sums, and its functions
such as exp, which have other bits at the end of a run of elements than within it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from inflight_kernels.activation.kinds import Activation
from inflight_kernels.activation.reference import FUNCTIONS
from inflight_kernels.recurrent.gate import Gate
from inflight_kernels.recurrent.step_sequences import StepSequences


@dataclass(frozen=True, slots=True)
class _Tokens:
    """Of one sequence."""

    slot: int
    tokens: slice
    is_first: bool
    """Whether its state begins with zeros."""
    kept: list[int]
    """For each of its tokens a slot, or -1."""

    def before(self, state: Tensor) -> Tensor:
        """A copy of its state."""
        return torch.zeros_like(state[self.slot]) if self.is_first else state[self.slot].clone()


def _each(sequences: StepSequences) -> Iterator[_Tokens]:
    starts = sequences.starts.tolist()
    for slot, start, end in zip(sequences.slots_B.tolist(), starts, starts[1:], strict=False):
        kept = [-1] * (end - start) if sequences.kept_T is None else sequences.kept_T[start:end].tolist()
        yield _Tokens(slot, slice(start, end), int(sequences.positions_T[start]) == 0, kept)


def chunk_shape(tensor: Tensor, num_heads: int, num_inputs: int) -> None:
    """None, for a token at a time has no chunk."""


def causal_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor,
    sequences: StepSequences,
    activation: Activation | None = None,
) -> Tensor:
    """From the oldest tap to the newest one, behind the bias."""
    out, num_taps = torch.empty_like(x), weight.shape[1]
    for each in _each(sequences):
        inputs = torch.cat([each.before(state), x[each.tokens]])
        total = torch.zeros_like(x[each.tokens], dtype=torch.float32)
        if bias is not None:
            total += bias
        for tap, inputs_of_tap in enumerate(inputs.unfold(0, num_taps, 1).unbind(2)):
            total += inputs_of_tap.float() * weight[:, tap].float()
        if activation is not None:
            total = torch.stack([FUNCTIONS[activation](row) for row in total])
        out[each.tokens] = total.to(x.dtype)
        for number, slot in enumerate(each.kept, 1):
            if slot >= 0:
                state[slot] = inputs[number : number + num_taps - 1]
        state[each.slot] = inputs[len(each.kept) :]
    return out


def gated_delta_rule(
    qkv: Tensor,
    a: Tensor,
    b: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    sequences: StepSequences,
    key_dim: int,
    chunk: Tensor | None = None,
) -> Tensor:
    """A token at a time. Of no matrix products, whose order of sums is not known."""
    _, num_heads, _, value_dim = state.shape
    num_keys = (qkv.shape[1] - num_heads * value_dim) // 2
    out = qkv.new_empty(len(qkv), num_heads * value_dim)
    for each in _each(sequences):
        own = each.before(state)
        for token, slot in zip(range(each.tokens.start, each.tokens.stop), each.kept, strict=True):
            query, key, value = qkv[token].float().split([num_keys, num_keys, num_heads * value_dim])
            query, key = (_normed_heads(heads.view(-1, key_dim), num_heads) for heads in (query, key))
            growth = F.softplus(a[token].float() + dt_bias).view(num_heads, -1, 1)
            own *= torch.exp(-torch.exp(a_log)[:, None, None] * growth)
            remembered = (own * key).sum(1)
            delta = (value.view(num_heads, value_dim) - remembered) * torch.sigmoid(b[token].float())[:, None]
            own += key * delta[:, None]
            out[token] = ((own * query).sum(1) * key_dim**-0.5).flatten()
            if slot >= 0:
                state[slot] = own
        state[each.slot] = own
    return out


def _normed_heads(heads: Tensor, num_heads: int) -> Tensor:
    """(K, Dk) to (V, Dk, 1): each one for all value heads that have it."""
    normed = heads / torch.sqrt((heads * heads).sum(1, keepdim=True) + 1e-6)
    return normed.repeat_interleave(num_heads // len(heads), 0).unsqueeze(2)


GATES = {Gate.SILU: F.silu, Gate.SIGMOID: torch.sigmoid}


def gated_rms_norm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    eps: float,
    activation: Gate = Gate.SILU,
    group_size: int | None = None,
    gate_first: bool = False,
) -> Tensor:
    """Of a view torch's functions may have other bits."""
    size = group_size or len(weight)
    wide, share = x.float(), GATES[activation](gate.float().contiguous())
    if gate_first:
        wide = wide * share
    normed = F.rms_norm(wide.unflatten(1, (-1, size)), (size,), None, eps)
    weight_of_groups = weight.view(-1, size)
    if weight.dtype == x.dtype:
        scaled = (normed.to(x.dtype) * weight_of_groups).float().flatten(1)
    else:
        scaled = (normed * weight_of_groups).flatten(1)
    return (scaled if gate_first else scaled * share).to(x.dtype)


def state_space_scan(
    x: Tensor,
    b: Tensor,
    c: Tensor,
    dt: Tensor,
    a_log: Tensor,
    d: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    sequences: StepSequences,
    dt_limits: tuple[float, float] = (0.0, float("inf")),
    chunk: Tensor | None = None,
) -> Tensor:
    """A token at a time, of no matrix products either."""
    _, num_heads, head_dim, state_dim = state.shape
    heads_of_group = num_heads * state_dim // b.shape[1]
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    for each in _each(sequences):
        own = each.before(state)
        for token, slot in zip(range(each.tokens.start, each.tokens.stop), each.kept, strict=True):
            rows = x[token].float().view(num_heads, head_dim)
            inward, outward = (
                groups[token].float().view(-1, 1, state_dim).repeat_interleave(heads_of_group, 0) for groups in (b, c)
            )
            time = F.softplus(dt[token].float() + dt_bias).clamp(*dt_limits)
            own *= torch.exp(-torch.exp(a_log) * time)[:, None, None]
            own += (time[:, None] * rows).unsqueeze(2) * inward
            out[token] = ((own * outward).sum(2) + d[:, None] * rows).flatten()
            if slot >= 0:
                state[slot] = own
        state[each.slot] = own
    return out
