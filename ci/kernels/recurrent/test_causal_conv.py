"""The short convolution over each sequence's tokens: kernel against reference, reference against torch's conv1d."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from sequence_steps import NUM_SLOTS, Run, assert_same_in_all_steps, sequences_of
from torch import Tensor

import inflight_kernels
from ci.kernels.kernel_cases import DTYPES, ELEMENTWISE_TOLERANCE, assert_near
from inflight_kernels import Activation, StepSequences, dispatch
from inflight_kernels.recurrent import gpu, reference

CHUNKS = [(3, 5, 1), (0, 0, 1), (5, 1, 40), (1, 0, 2)]
"""Decodes, one of them of a new sequence, and chunks."""


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weight_dtype", ["as x", torch.float32], ids=str)
@pytest.mark.parametrize(
    ("num_channels", "num_taps", "activation"),
    [(48, 4, Activation.SILU), (130, 3, None), (7, 2, Activation.GELU), (64, 1, Activation.RELU)],
)
def test_kernel_equals_reference(
    num_channels: int,
    num_taps: int,
    activation: Activation | None,
    weight_dtype: torch.dtype | str,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    # Columns of a wider tensor: the launcher must use the strides.
    x = torch.randn(44, num_channels + 3).to(dtype)[:, 3:]
    of_weight = weight_dtype if isinstance(weight_dtype, torch.dtype) else dtype
    weight, bias = torch.randn(num_channels, num_taps).to(of_weight), torch.randn(num_channels).to(of_weight)
    state = torch.randn(7, num_taps - 1, num_channels).to(dtype)
    state[[0, 1, 6]] = float("nan")
    for kept in (None, {(5, 1): 4, (5, 40): 2}):
        for some_bias in (bias, None):
            wanted_state, own = state.clone(), state.to(device, copy=True)
            wanted = reference.causal_conv(x, weight, some_bias, wanted_state, sequences_of(CHUNKS, kept), activation)
            got = gpu.causal_conv(
                x.to(device),
                weight.to(device),
                None if some_bias is None else some_bias.to(device),
                own,
                sequences_of(CHUNKS, kept, device),
                activation,
            )
            assert got.dtype == dtype
            assert_near(got, wanted, 4 * ELEMENTWISE_TOLERANCE[dtype])
            torch.testing.assert_close(own.cpu(), wanted_state, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("implementation", ["reference", "gpu"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_token_has_the_same_bits_in_all_steps(
    dtype: torch.dtype, implementation: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(dispatch.IMPLEMENTATIONS, device.type, implementation)
    weight, bias = torch.randn(37, 4).to(device, dtype), torch.randn(37).to(device, dtype)

    def make(state: Tensor) -> Run:
        return lambda x, sequences: inflight_kernels.causal_conv(x, weight, bias, state, sequences, Activation.SILU)

    inputs = [torch.randn(count, 37).to(device, dtype) for count in (9, 4, 1)]
    assert_same_in_all_steps(make, inputs, torch.zeros(NUM_SLOTS, 3, 37, dtype=dtype, device=device))


@pytest.mark.parametrize("activation", [None, Activation.SILU])
def test_reference_equals_torch(activation: Activation | None) -> None:
    x, weight, bias = torch.randn(20, 10), torch.randn(10, 4), torch.randn(10)
    expected = F.conv1d(x.t(), weight[:, None], bias, padding=3, groups=10)[:, :20].t()
    state = torch.full((1, 3, 10), float("nan"))
    found = reference.causal_conv(x, weight, bias, state, sequences_of([(0, 0, 20)]), activation)
    torch.testing.assert_close(found, expected if activation is None else F.silu(expected))
    assert torch.equal(state[0], x[-3:])


def test_launcher_refuses_with_words() -> None:
    x, weight, state, sequences = torch.randn(3, 8), torch.randn(8, 4), torch.zeros(2, 3, 8), sequences_of([(0, 0, 3)])
    with pytest.raises(ValueError, match=r"weight must have shape \(8, 4\), got \(7, 4\)"):
        gpu.causal_conv(x, weight[:7], None, state, sequences)
    with pytest.raises(ValueError, match=r"weight must be contiguous, torch\.float32 or float32, got"):
        gpu.causal_conv(x, weight.half(), None, state, sequences)
    with pytest.raises(ValueError, match=r"state must have shape \(2, 3, 8\), got \(2, 2, 8\)"):
        gpu.causal_conv(x, weight, None, state[:, 1:], sequences)
    with pytest.raises(ValueError, match="state must be contiguous"):
        gpu.causal_conv(x, weight, None, torch.zeros(2, 8, 3).transpose(1, 2), sequences)
    with pytest.raises(ValueError, match=r"positions_T must have shape \(3,\), got \(4,\)"):
        gpu.causal_conv(x, weight, None, state, sequences_of([(0, 0, 4)]))
    with pytest.raises(ValueError, match=r"slots_B must be torch\.int64"):
        of_int32 = StepSequences(slots_B=sequences.slots_B.int(), starts=sequences.starts, positions_T=torch.arange(3))
        gpu.causal_conv(x, weight, None, state, of_int32)
    with pytest.raises(ValueError, match="clamped_swiglu is for gated layers only"):
        inflight_kernels.causal_conv(x, weight, None, state, sequences, Activation.CLAMPED_SWIGLU)
