"""The recurrence of a state space: kernel against reference, reference against transformers' functions."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from sequence_steps import NUM_SLOTS, Run, assert_same_across_chunks, assert_same_in_all_steps, sequences_of
from torch import Tensor
from transformers.models.bamba.modeling_bamba import mamba2_chunk_scan, mamba2_selective_state_update

import inflight_kernels
from ci.kernels.kernel_cases import DTYPES, assert_near
from inflight_kernels.recurrent import gpu, reference
from inflight_kernels.recurrent.chunk import chunk_shape
from inflight_kernels.recurrent.gpu.state_space_scan import CANDIDATES

STEP = [(3, 16, 1), (0, 0, 1), (5, 32, 22), (1, 0, 20)]
"""Decodes at the beginning of a chunk, one of them of a new sequence, and prompts that complete chunks."""
BORDERS = {(5, 47): 2, (1, 15): 6}
"""Their tokens at which a chunk ends for the last time, and where the state behind them is kept."""
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""Sums of products in another order, rounded once."""


def _inputs(
    num_tokens: int, num_groups: int, num_heads: int, head_dim: int, state_dim: int, dtype: torch.dtype
) -> list[Tensor]:
    """x, b, c, dt, as columns of wider tensors, a_log, d and dt_bias."""
    widths = (num_heads * head_dim, num_groups * state_dim, num_groups * state_dim, num_heads)
    columns = [torch.randn(num_tokens, width + 1).to(dtype)[:, 1:] for width in widths]
    return [*columns, torch.linspace(-3.0, 2.0, num_heads), torch.randn(num_heads), torch.randn(num_heads) - 1]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("limits", [(0.0, float("inf")), (0.2, 0.6)])
@pytest.mark.parametrize("shape", [(1, 2, 16, 16), (2, 2, 20, 24), (2, 6, 8, 32)])
def test_kernel_equals_reference(
    shape: tuple[int, int, int, int], limits: tuple[float, float], dtype: torch.dtype, device: torch.device
) -> None:
    inputs = _inputs(44, *shape, dtype)
    state = torch.randn(7, *shape[1:])
    state[[0, 1, 2, 6]] = float("nan")
    wanted_state = state.clone()
    wanted = reference.state_space_scan(*inputs, wanted_state, sequences_of(STEP, BORDERS), limits)
    for kept in (None, BORDERS):
        for config in CANDIDATES[: 1 if kept else None]:
            own, moved = state.to(device, copy=True), [each.to(device) for each in inputs]
            chunk = _chunk(7, *shape[1:], dtype, device)
            got = gpu.state_space_scan(*moved, own, sequences_of(STEP, kept, device), limits, chunk, config=config)
            assert got.dtype == dtype
            assert_near(got, wanted, TOLERANCE[dtype])
            for (slot, _), kept_slot in BORDERS.items():
                assert_near(own[slot], wanted_state[kept_slot], 1e-5)
                assert kept is None or torch.equal(own[slot], own[kept_slot])
            assert torch.equal(own[[3, 4]].cpu(), state[[3, 4]])


def _chunk(
    slots: int, num_heads: int, head_dim: int, state_dim: int, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> Tensor:
    """Inputs of incomplete chunks, which nobody has written."""
    shape = chunk_shape(torch.empty(0), num_heads, head_dim + state_dim + 1)
    return torch.full((slots, *shape), float("nan"), dtype=dtype, device=device)


def test_a_token_has_the_same_bits_in_all_steps(device: torch.device) -> None:
    x, b, c, dt, *of_heads = (each.to(device) for each in _inputs(58, 1, 2, 10, 12, DTYPES[-1]))

    def make(states: Sequence[Tensor]) -> Run:
        def run(columns: Tensor, sequences: inflight_kernels.StepSequences) -> Tensor:
            parts = columns.split([20, 12, 12, 2], 1)
            return gpu.state_space_scan(*parts, *of_heads, states[0], sequences, chunk=states[1])

        return run

    inputs = list(torch.cat([x, b, c, dt], 1).split([37, 16, 5]))
    states = [torch.zeros(NUM_SLOTS, 2, 10, 12, device=device), _chunk(NUM_SLOTS, 2, 10, 12, x.dtype, device)]
    assert_same_across_chunks(make, inputs, states)


def test_so_it_has_by_the_reference() -> None:
    x, b, c, dt, *of_heads = _inputs(14, 1, 2, 10, 12, torch.float16)

    def make(state: Tensor) -> Run:
        def run(columns: Tensor, sequences: inflight_kernels.StepSequences) -> Tensor:
            return reference.state_space_scan(*columns.split([20, 12, 12, 2], 1), *of_heads, state, sequences)

        return run

    inputs = list(torch.cat([x, b, c, dt], 1).split([9, 4, 1]))
    assert_same_in_all_steps(make, inputs, torch.zeros(NUM_SLOTS, 2, 10, 12))


@pytest.mark.parametrize("limits", [(0.0, float("inf")), (0.2, 0.6)])
def test_reference_equals_a_prompt_of_transformers(limits: tuple[float, float]) -> None:
    x, b, c, dt, a_log, d, dt_bias = _inputs(20, 2, 4, 8, 16, torch.float32)
    expected, expected_state = mamba2_chunk_scan(
        x.reshape(1, 20, 4, 8), dt[None], -a_log.exp(), b.reshape(1, 20, 2, 16), c.reshape(1, 20, 2, 16), 8, D=d,
        dt_bias=dt_bias, dt_softplus=True, dt_limit=limits, return_final_states=True,
    )  # fmt: skip
    state = torch.full((1, 4, 8, 16), float("nan"))
    found = reference.state_space_scan(x, b, c, dt, a_log, d, dt_bias, state, sequences_of([(0, 0, 20)]), limits)
    torch.testing.assert_close(found, expected[0].flatten(1), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(state, expected_state, rtol=1e-4, atol=1e-5)


def test_reference_equals_a_decode_of_transformers() -> None:
    x, b, c, dt, a_log, d, dt_bias = _inputs(2, 2, 4, 8, 16, torch.float32)
    state = torch.randn(2, 4, 8, 16)
    expected_state = state.clone()
    by_row = (each[:, None].expand(-1, 8) for each in (d, dt_bias))
    expected = mamba2_selective_state_update(
        expected_state, x.reshape(2, 4, 8), dt[..., None].expand(-1, -1, 8), -a_log.exp()[:, None, None],
        b.reshape(2, 2, 16), c.reshape(2, 2, 16), *by_row, dt_softplus=True,
    )  # fmt: skip
    found = reference.state_space_scan(x, b, c, dt, a_log, d, dt_bias, state, sequences_of([(0, 4, 1), (1, 9, 1)]))
    torch.testing.assert_close(found, expected.flatten(1), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(state, expected_state, rtol=1e-5, atol=1e-5)


def test_launcher_refuses_with_words() -> None:
    x, b, c, dt, a_log, d, dt_bias = _inputs(3, 1, 2, 8, 16, torch.float32)
    state, sequences = torch.zeros(2, 2, 8, 16), sequences_of([(0, 0, 3)])
    with pytest.raises(ValueError, match=r"the kernels keep the inputs of incomplete chunks: chunk must have \(2, 15"):
        gpu.state_space_scan(x, b, c, dt, a_log, d, dt_bias, state, sequences)
    with pytest.raises(ValueError, match="b has 15 columns, which are not groups of 16 for 2 heads"):
        gpu.state_space_scan(x, b[:, 1:], c, dt, a_log, d, dt_bias, state, sequences)
    with pytest.raises(ValueError, match=r"c must have shape \(3, 16\), got \(3, 15\)"):
        gpu.state_space_scan(x, b, c[:, 1:], dt, a_log, d, dt_bias, state, sequences)
    with pytest.raises(ValueError, match=r"dt must be torch\.float32"):
        gpu.state_space_scan(x, b, c, dt.half(), a_log, d, dt_bias, state, sequences)
    with pytest.raises(ValueError, match=r"d must have shape \(2,\)"):
        gpu.state_space_scan(x, b, c, dt, a_log, d[1:], dt_bias, state, sequences)
    with pytest.raises(ValueError, match=r"state must be torch\.float32"):
        gpu.state_space_scan(x, b, c, dt, a_log, d, dt_bias, state.half(), sequences)
