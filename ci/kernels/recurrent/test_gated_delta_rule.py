"""The gated delta rule: kernel against reference, reference against transformers' functions."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from sequence_steps import NUM_SLOTS, Run, assert_same_across_chunks, assert_same_in_all_steps, sequences_of
from torch import Tensor
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearForgetGate, recurrent_kimi_delta_attention
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_recurrent_gated_delta_rule

import inflight_kernels
from ci.kernels.kernel_cases import DTYPES, assert_near
from inflight_kernels.recurrent import gpu, reference
from inflight_kernels.recurrent.chunk import chunk_shape
from inflight_kernels.recurrent.gpu.gated_delta_rule import CANDIDATES

STEP = [(3, 16, 1), (0, 0, 1), (5, 32, 22), (1, 0, 20)]
"""Decodes at the beginning of a chunk, one of them of a new sequence, and prompts that complete chunks."""
BORDERS = {(5, 47): 2, (1, 15): 6}
"""Their tokens at which a chunk ends for the last time, and where the state behind them is kept."""
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""Sums of products in another order, rounded once."""


def _inputs(
    num_tokens: int, num_keys: int, num_heads: int, key_dim: int, value_dim: int, by_channel: bool, dtype: torch.dtype
) -> list[Tensor]:
    """qkv, a, b, as columns of wider tensors, a_log and dt_bias. Decays are from none to all."""
    widths = (2 * num_keys * key_dim + num_heads * value_dim, num_heads * (key_dim if by_channel else 1), num_heads)
    qkv, a, b = (torch.randn(num_tokens, width + 1).to(dtype)[:, 1:] for width in widths)
    a *= 4
    return [qkv, a, b, torch.linspace(-3.0, 2.0, num_heads), torch.randn(widths[1]) - 2]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("by_channel", [False, True])
@pytest.mark.parametrize("shape", [(1, 2, 16, 16), (2, 2, 24, 20), (2, 6, 32, 8)])
def test_kernel_equals_reference(
    shape: tuple[int, int, int, int], by_channel: bool, dtype: torch.dtype, device: torch.device
) -> None:
    _, num_heads, key_dim, value_dim = shape
    inputs = _inputs(44, *shape, by_channel, dtype)
    state = torch.randn(7, num_heads, key_dim, value_dim)
    state[[0, 1, 2, 6]] = float("nan")
    wanted_state = state.clone()
    wanted = reference.gated_delta_rule(*inputs, wanted_state, sequences_of(STEP, BORDERS), key_dim)
    for kept in (None, BORDERS):
        for config in CANDIDATES:
            own, moved = state.to(device, copy=True), [each.to(device) for each in inputs]
            chunk = _chunk(7, num_heads, key_dim, value_dim, by_channel, dtype, device)
            got = gpu.gated_delta_rule(*moved, own, sequences_of(STEP, kept, device), key_dim, chunk, config=config)
            assert got.dtype == dtype
            assert_near(got, wanted, TOLERANCE[dtype])
            for (slot, _), kept_slot in BORDERS.items():
                assert_near(own[slot], wanted_state[kept_slot], 1e-5)
                assert kept is None or torch.equal(own[slot], own[kept_slot])
            assert torch.equal(own[[3, 4]].cpu(), state[[3, 4]])


def _chunk(
    slots: int,
    num_heads: int,
    key_dim: int,
    value_dim: int,
    by_channel: bool,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Inputs of incomplete chunks, which nobody has written."""
    num_inputs = key_dim + value_dim + (key_dim if by_channel else 1) + 1
    shape = chunk_shape(torch.empty(0), num_heads, num_inputs)
    return torch.full((slots, *shape), float("nan"), dtype=dtype, device=device)


@pytest.mark.parametrize("by_channel", [False, True])
def test_a_token_has_the_same_bits_in_all_steps(by_channel: bool, device: torch.device) -> None:
    qkv, a, b, a_log, dt_bias = (each.to(device) for each in _inputs(58, 1, 2, 12, 10, by_channel, DTYPES[-1]))

    def make(states: Sequence[Tensor]) -> Run:
        def run(x: Tensor, sequences: inflight_kernels.StepSequences) -> Tensor:
            parts = x.split([qkv.shape[1], a.shape[1], b.shape[1]], 1)
            return gpu.gated_delta_rule(*parts, a_log, dt_bias, states[0], sequences, 12, states[1])

        return run

    inputs = list(torch.cat([qkv, a, b], 1).split([37, 16, 5]))
    chunk = _chunk(NUM_SLOTS, 2, 12, 10, by_channel, qkv.dtype, device)
    assert_same_across_chunks(make, inputs, [torch.zeros(NUM_SLOTS, 2, 12, 10, device=device), chunk])


@pytest.mark.parametrize("by_channel", [False, True])
def test_so_it_has_by_the_reference(by_channel: bool) -> None:
    qkv, a, b, a_log, dt_bias = _inputs(14, 1, 2, 12, 10, by_channel, torch.float16)

    def make(state: Tensor) -> Run:
        def run(x: Tensor, sequences: inflight_kernels.StepSequences) -> Tensor:
            parts = x.split([qkv.shape[1], a.shape[1], b.shape[1]], 1)
            return reference.gated_delta_rule(*parts, a_log, dt_bias, state, sequences, 12)

        return run

    inputs = list(torch.cat([qkv, a, b], 1).split([9, 4, 1]))
    assert_same_in_all_steps(make, inputs, torch.zeros(NUM_SLOTS, 2, 12, 10))


def test_reference_equals_transformers() -> None:
    qkv, a, b, a_log, dt_bias = _inputs(20, 2, 4, 16, 8, False, torch.float32)
    query, key, value = qkv.split([32, 32, 32], 1)
    before = torch.randn(4, 16, 8)
    expected, expected_state = torch_recurrent_gated_delta_rule(
        query.view(1, 20, 2, 16).repeat_interleave(2, 2),
        key.reshape(1, 20, 2, 16).repeat_interleave(2, 2),
        value.reshape(1, 20, 4, 8),
        g=-a_log.exp() * F.softplus(a + dt_bias)[None],
        beta=b.sigmoid()[None],
        initial_state=before[None],
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    state = torch.stack([torch.full_like(before, float("nan")), before])
    found = reference.gated_delta_rule(qkv, a, b, a_log, dt_bias, state, sequences_of([(1, 3, 20)]), 16)
    torch.testing.assert_close(found, expected[0].flatten(1), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(state[1], expected_state[0], rtol=1e-5, atol=1e-5)


def test_reference_with_a_decay_of_each_channel_equals_transformers() -> None:
    qkv, a, b, a_log, dt_bias = _inputs(20, 4, 4, 16, 16, True, torch.float32)
    query, key, value = (each.reshape(1, 20, 4, 16) for each in qkv.split(64, 1))
    gate = KimiLinearForgetGate.__new__(KimiLinearForgetGate)
    torch.nn.Module.__init__(gate)
    gate.head_dim, gate.dt_bias, gate.A_log = 16, dt_bias, a_log.view(1, 1, 4, 1)
    gate.f_a_proj, gate.f_b_proj = torch.nn.Identity(), torch.nn.Identity()
    expected, expected_state = recurrent_kimi_delta_attention(
        query, key, value, gate(a[None]), b.sigmoid()[None], None, True, use_qk_l2norm_in_kernel=True
    )
    state = torch.full((1, 4, 16, 16), float("nan"))
    found = reference.gated_delta_rule(qkv, a, b, a_log, dt_bias, state, sequences_of([(0, 0, 20)]), 16)
    torch.testing.assert_close(found, expected[0].flatten(1), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(state, expected_state, rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
@pytest.mark.parametrize("by_channel", [False, True])
def test_a_state_hardly_decays_or_at_once(by_channel: bool, device: torch.device) -> None:
    """Where softplus is as small as exp, or as large as its argument; infinite decays give no NaN."""
    qkv, _, b, _, _ = (each.to(device) for each in _inputs(16, 1, 2, 16, 16, by_channel, torch.float32))
    a = torch.tensor([-30.0, 300.0], device=device).repeat_interleave(16 if by_channel else 1).repeat(16, 1)
    a_log, state = torch.tensor([0.0, 88.0], device=device), torch.ones(2, 2, 16, 16, device=device)
    chunk = _chunk(2, 2, 16, 16, by_channel, torch.float32, device)
    bias = torch.zeros(a.shape[1], device=device)
    found = gpu.gated_delta_rule(
        qkv, a, b - 1000, a_log, bias, state, sequences_of([(0, 16, 16)], device=device), 16, chunk
    )
    assert torch.equal(state[0].cpu(), torch.stack([torch.ones(16, 16), torch.zeros(16, 16)]))
    assert bool(found.isfinite().all())


def test_equal_keys_in_a_row_are_exact(device: torch.device) -> None:
    """The inverse of a chunk's matrix is exact to rounding also where powers of that matrix are large."""
    qkv, a, b, _, _ = _inputs(32, 1, 1, 16, 16, False, torch.float32)
    qkv[:, 16:32] = qkv[:1, 16:32]
    inputs = [qkv, a - 100, b + 100, torch.zeros(1), torch.zeros(1)]
    wanted = reference.gated_delta_rule(*inputs, torch.zeros(1, 1, 16, 16), sequences_of([(0, 0, 32)]), 16)
    state, chunk = torch.zeros(1, 1, 16, 16, device=device), _chunk(1, 1, 16, 16, False, torch.float32, device)
    moved = [each.to(device) for each in inputs]
    found = gpu.gated_delta_rule(*moved, state, sequences_of([(0, 0, 32)], device=device), 16, chunk)
    assert_near(found, wanted, TOLERANCE[torch.float32])


def test_launcher_refuses_with_words() -> None:
    qkv, a, b, a_log, dt_bias = _inputs(3, 1, 2, 16, 8, False, torch.float32)
    state, sequences = torch.zeros(2, 2, 16, 8), sequences_of([(0, 0, 3)])
    with pytest.raises(ValueError, match=r"the kernels keep the inputs of incomplete chunks: chunk must have \(2, 15"):
        gpu.gated_delta_rule(qkv, a, b, a_log, dt_bias, state, sequences, 16)
    with pytest.raises(ValueError, match=r"chunk must have shape \(2, 2, 15, 32\), got \(1, 2, 15, 32\)"):
        gpu.gated_delta_rule(qkv, a, b, a_log, dt_bias, state, sequences, 16, _chunk(1, 2, 16, 8, False, torch.float32))
    with pytest.raises(ValueError, match="qkv has 47 columns, which are not queries and keys of heads of 16 and"):
        gpu.gated_delta_rule(qkv[:, 1:], a, b, a_log, dt_bias, state, sequences, 16)
    with pytest.raises(ValueError, match=r"a must have shape \(3, 32\), got \(3, 1\)"):
        gpu.gated_delta_rule(qkv, a[:, 1:], b, a_log, dt_bias, state, sequences, 16)
    with pytest.raises(ValueError, match=r"dt_bias must have shape \(2,\)"):
        gpu.gated_delta_rule(qkv, a, b, a_log, dt_bias[1:], state, sequences, 16)
    with pytest.raises(ValueError, match=r"b must be torch\.float32"):
        gpu.gated_delta_rule(qkv, a, b.half(), a_log, dt_bias, state, sequences, 16)
    with pytest.raises(ValueError, match=r"state must be torch\.float32"):
        gpu.gated_delta_rule(qkv, a, b, a_log, dt_bias, state.half(), sequences, 16)
