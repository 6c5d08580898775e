"""The router: kernel against reference, reference against torch's own softmax and topk, and the rule for ties."""

from __future__ import annotations

import pytest
import torch

from ci.kernels.kernel_cases import DTYPES, assert_near
from inflight_kernels.moe import gpu, reference


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize(("tokens", "num_experts", "top_k"), [(1, 8, 2), (5, 128, 8), (7, 60, 3), (3, 5, 5), (2, 1, 1)])
def test_kernel_equals_reference(
    tokens: int, num_experts: int, top_k: int, renormalize: bool, dtype: torch.dtype, device: torch.device
) -> None:
    # Rows of a wider tensor: the launcher must use the stride.
    logits = (3 * torch.randn(tokens, num_experts + 3)).to(dtype)[:, :num_experts]
    weights, experts = gpu.route_experts(logits.to(device), top_k, renormalize)
    expected_weights, expected_experts = reference.route_experts(logits, top_k, renormalize)
    assert experts.dtype == torch.int32
    assert torch.equal(experts.cpu(), expected_experts)
    assert_near(weights, expected_weights, 2e-6)


@pytest.mark.parametrize("renormalize", [True, False])
def test_reference_is_softmax_and_topk(renormalize: bool) -> None:
    logits = torch.randn(9, 33)
    expected, indices = logits.softmax(-1).topk(4)
    if renormalize:
        expected = expected / expected.sum(-1, keepdim=True)
    weights, experts = reference.route_experts(logits, 4, renormalize)
    assert torch.equal(experts.long(), indices)
    torch.testing.assert_close(weights, expected)


def test_of_equals_the_lower_expert_comes_first(device: torch.device) -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 0.0, 2.0, 1.0], [0.0] * 6])
    for route, where in ((gpu.route_experts, device), (reference.route_experts, "cpu")):
        _, experts = route(logits.to(where), 4)
        assert experts.tolist() == [[1, 2, 4, 0], [0, 1, 2, 3]]


def test_whatever_the_logits_every_expert_is_a_valid_one(device: torch.device) -> None:
    nan, inf = float("nan"), float("inf")
    logits = torch.tensor([[nan, 1.0, nan, 0.0, nan], [-inf] * 5, [nan] * 5, [-1e30, 3e38, 0.0, nan, -inf]])
    for renormalize in (True, False):
        weights, experts = gpu.route_experts(logits.to(device), 4, renormalize)
        expected_weights, expected_experts = reference.route_experts(logits, 4, renormalize)
        assert experts.tolist() == expected_experts.tolist()
        assert experts.tolist()[:3] == [[1, 3, 0, 2], [0, 1, 2, 3], [0, 1, 2, 3]]
        assert_near(weights, expected_weights, 1e-6)
        assert weights[1:3].abs().sum() == 0


def test_a_row_does_not_depend_on_its_batch(device: torch.device) -> None:
    logits = torch.randn(11, 128, device=device)
    weights, experts = gpu.route_experts(logits, 8)
    for row in (0, 3, 10):
        alone_weights, alone_experts = gpu.route_experts(logits[row : row + 1], 8)
        assert torch.equal(alone_weights[0], weights[row])
        assert torch.equal(alone_experts[0], experts[row])


def test_launcher_takes_no_rows_and_refuses_too_many_choices() -> None:
    weights, experts = gpu.route_experts(torch.empty(0, 8), 2)
    assert weights.shape == experts.shape == (0, 2)
    with pytest.raises(ValueError, match="top_k must be 1 to 8 of 8 experts, got 9"):
        gpu.route_experts(torch.randn(1, 8), 9)
