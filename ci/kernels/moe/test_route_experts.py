"""The router: kernel against reference, reference against transformers' routers, and the rule for ties."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.deepseek_v2 import modeling_deepseek_v2
from transformers.models.deepseek_v3 import modeling_deepseek_v3
from transformers.models.ernie4_5_moe import modeling_ernie4_5_moe
from transformers.models.glm4_moe import modeling_glm4_moe
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.granitemoe import modeling_granitemoe
from transformers.models.qwen2_moe import modeling_qwen2_moe

from ci.kernels.kernel_cases import DTYPES, assert_near
from inflight_kernels.moe import gpu, reference
from inflight_kernels.moe.routing import GroupScore, Routing, Scores

GROUPS = {"num_groups": 4, "num_chosen_groups": 2}
ROUTINGS = {
    "renormalised shares": (Routing(num_chosen=3), False),
    "shares": (Routing(num_chosen=3, renormalize=False), False),
    "shares of groups": (Routing(num_chosen=3, renormalize=False, scale=16.0, **GROUPS), False),
    "shares with a bias": (Routing(num_chosen=3), True),
    "sigmoids": (Routing(num_chosen=3, scores=Scores.SIGMOID, renormalize=False), False),
    "sigmoids over a sum and more": (Routing(num_chosen=3, scores=Scores.SIGMOID, epsilon=0.3), False),
    "sigmoids with a bias": (Routing(num_chosen=3, scores=Scores.SIGMOID, scale=2.5), True),
    "sigmoids of groups": (
        Routing(num_chosen=3, scores=Scores.SIGMOID, group_score=GroupScore.TOP2_SUM, **GROUPS),
        False,
    ),
    "sigmoids of groups with a bias": (
        Routing(num_chosen=5, scores=Scores.SIGMOID, scale=2.5, group_score=GroupScore.TOP2_SUM, **GROUPS),
        True,
    ),
}
"""How experts are chosen and weighed, and whether with a bias."""


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize(("tokens", "num_experts", "top_k"), [(1, 8, 2), (5, 128, 8), (7, 60, 3), (3, 5, 5), (2, 1, 1)])
def test_kernel_equals_reference(
    tokens: int, num_experts: int, top_k: int, renormalize: bool, dtype: torch.dtype, device: torch.device
) -> None:
    # Rows of a wider tensor: the launcher must use the stride.
    logits = (3 * torch.randn(tokens, num_experts + 3)).to(dtype)[:, :num_experts]
    assert_equal_choice(logits, Routing(num_chosen=top_k, renormalize=renormalize), None, device)


@pytest.mark.parametrize(("routing", "has_bias"), ROUTINGS.values(), ids=ROUTINGS)
@pytest.mark.parametrize(("tokens", "num_experts"), [(9, 40), (1, 12), (5, 64)])
def test_kernel_equals_reference_with_every_option(
    tokens: int, num_experts: int, routing: Routing, has_bias: bool, device: torch.device
) -> None:
    assert_equal_choice(
        3 * torch.randn(tokens, num_experts), routing, torch.randn(num_experts) if has_bias else None, device
    )


def assert_equal_choice(logits: Tensor, routing: Routing, bias: Tensor | None, device: torch.device) -> None:
    weights, experts = gpu.route_experts(logits.to(device), routing, None if bias is None else bias.to(device))
    expected_weights, expected_experts = reference.route_experts(logits, routing, bias)
    assert experts.dtype == torch.int32
    assert torch.equal(experts.cpu(), expected_experts)
    assert_near(weights, expected_weights, 2e-6 * routing.scale)


@pytest.mark.parametrize("function", [gpu.route_experts, reference.route_experts], ids=["kernel", "reference"])
def test_each_expert_has_a_factor(function: Callable[..., tuple[Tensor, Tensor]], device: torch.device) -> None:
    logits, factors, routing = torch.randn(7, 24, device=device), torch.randn(24, device=device), Routing(num_chosen=3)
    weights, experts = function(logits, routing)
    multiplied, chosen = function(logits, routing, None, factors)
    assert torch.equal(chosen, experts)
    assert torch.equal(multiplied, weights * factors[experts])


@pytest.mark.parametrize("function", [gpu.route_experts, reference.route_experts], ids=["kernel", "reference"])
def test_experts_are_counted_from_a_ranks_first_one_on(
    function: Callable[..., tuple[Tensor, Tensor]], device: torch.device
) -> None:
    """Factors are of the experts themselves."""
    logits, factors, routing = torch.randn(7, 24, device=device), torch.randn(24, device=device), Routing(num_chosen=3)
    weights, experts = function(logits, routing, None, factors)
    same, counted = function(logits, routing, None, factors, 16)
    assert torch.equal(same, weights) and torch.equal(counted, experts - 16)
    assert (counted < 0).any() and counted.dtype == torch.int32


SIZE, NUM_EXPERTS = 8, 24
SIZES: dict[str, Any] = {"hidden_size": SIZE, "num_attention_heads": 1, "num_experts_per_tok": 3}
GROUPED: dict[str, Any] = {"n_routed_experts": NUM_EXPERTS, "n_group": 6, "topk_group": 2, "routed_scaling_factor": 2.5}
IN_GROUPS = {"num_groups": 6, "num_chosen_groups": 2, "scale": 2.5}
TOP2 = {"scores": Scores.SIGMOID, "group_score": GroupScore.TOP2_SUM, **IN_GROUPS}
ROUTERS: dict[str, tuple[Callable[[], torch.nn.Module], dict[str, Any]]] = {
    "deepseek v2": (
        lambda: modeling_deepseek_v2.DeepseekV2TopkRouter(
            modeling_deepseek_v2.DeepseekV2Config(**SIZES, **GROUPED, topk_method="group_limited_greedy")
        ),
        {"renormalize": False, **IN_GROUPS},
    ),
    "deepseek v3": (
        lambda: modeling_deepseek_v3.DeepseekV3TopkRouter(
            modeling_deepseek_v3.DeepseekV3Config(**SIZES, **GROUPED, norm_topk_prob=True)
        ),
        TOP2,
    ),
    "glm 4.5": (
        lambda: modeling_glm4_moe.Glm4MoeTopkRouter(
            modeling_glm4_moe.Glm4MoeConfig(**SIZES, **GROUPED, norm_topk_prob=False)
        ),
        {"renormalize": False, **TOP2},
    ),
    "ernie 4.5": (
        lambda: modeling_ernie4_5_moe.Ernie4_5_MoeTopKRouter(
            modeling_ernie4_5_moe.Ernie4_5_MoeConfig(**SIZES, num_experts=NUM_EXPERTS)
        ),
        {},
    ),
    "qwen2": (
        lambda: modeling_qwen2_moe.Qwen2MoeTopKRouter(
            modeling_qwen2_moe.Qwen2MoeConfig(**SIZES, num_experts=NUM_EXPERTS, norm_topk_prob=False)
        ),
        {"renormalize": False},
    ),
    "gpt-oss": (
        lambda: modeling_gpt_oss.GptOssTopKRouter(
            modeling_gpt_oss.GptOssConfig(**SIZES, num_local_experts=NUM_EXPERTS)
        ),
        {},
    ),
    "granite": (
        lambda: modeling_granitemoe.GraniteMoeTopKRouter(
            modeling_granitemoe.GraniteMoeConfig(**SIZES, num_local_experts=NUM_EXPERTS)
        ),
        {},
    ),
}
"""transformers' routers, and what is other than Routing's defaults in ours."""


@pytest.mark.parametrize(("make", "options"), ROUTERS.values(), ids=ROUTERS)
@torch.inference_mode()
def test_reference_is_transformers_router(make: Callable[[], torch.nn.Module], options: dict[str, Any]) -> None:
    router, x = make(), torch.randn(40, SIZE)
    for tensor in (*router.parameters(), *router.buffers()):
        tensor.copy_(torch.randn(tensor.shape))
    results = router(x)
    # Most give logits, weights and experts, in this order.
    experts, weights = (results[i] for i in ((0, 1) if len(results[0][0]) == 3 else (2, 1)))
    states = router.state_dict()
    logits = torch.nn.functional.linear(x, states["weight"], states.get("bias"))
    bias = next((value.flatten() for name, value in states.items() if "correction_bias" in name), None)
    found_weights, found_experts = reference.route_experts(logits, Routing(num_chosen=3, **options), bias)
    # transformers leaves the order open.
    order, found_order = experts.argsort(dim=-1), found_experts.argsort(dim=-1)
    assert torch.equal(found_experts.gather(-1, found_order).long(), experts.gather(-1, order))
    torch.testing.assert_close(found_weights.gather(-1, found_order), weights.gather(-1, order))


def test_of_equals_the_lower_expert_comes_first(device: torch.device) -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 0.0, 2.0, 1.0], [0.0] * 6])
    for route, where in ((gpu.route_experts, device), (reference.route_experts, "cpu")):
        _, experts = route(logits.to(where), Routing(num_chosen=4))
        assert experts.tolist() == [[1, 2, 4, 0], [0, 1, 2, 3]]


def test_of_equal_groups_the_lower_one_comes_first(device: torch.device) -> None:
    logits = torch.tensor([[0.0, 1.0, 3.0, 1.0, 3.0, 1.0, 2.0, 2.0], [-float("inf")] * 8])
    for group_score, expected in ((GroupScore.MAX, [2, 4, 3]), (GroupScore.TOP2_SUM, [2, 4, 3])):
        routing = Routing(num_chosen=3, num_groups=4, num_chosen_groups=2, group_score=group_score)
        for route, where in ((gpu.route_experts, device), (reference.route_experts, "cpu")):
            _, experts = route(logits.to(where), routing)
            assert experts.tolist() == [expected, [0, 1, 2]]


def test_logits_are_compared_where_scores_are_rounded_to_the_same_number(device: torch.device) -> None:
    logits = torch.tensor([[90.0, 91.0, 92.0, -200.0, -190.0]])
    routing = Routing(num_chosen=4, scores=Scores.SIGMOID)
    for route, where in ((gpu.route_experts, device), (reference.route_experts, "cpu")):
        assert route(logits.to(where), routing)[1].tolist() == [[2, 1, 0, 4]]


@pytest.mark.parametrize(("routing", "has_bias"), ROUTINGS.values(), ids=ROUTINGS)
def test_whatever_the_logits_every_expert_is_a_valid_one(
    routing: Routing, has_bias: bool, device: torch.device
) -> None:
    nan, inf = float("nan"), float("inf")
    rows = [[nan, 1.0, nan, 0.0, nan, nan, 0.5, nan], [-inf] * 8, [nan] * 8, [-1e30, 3e38, 0.0, nan, -inf, 0, 0, 1]]
    logits, bias = torch.tensor(rows), torch.arange(8.0) / 8 if has_bias else None
    routing = routing if routing.num_chosen == 3 else Routing(num_chosen=4)
    weights, experts = gpu.route_experts(logits.to(device), routing, None if bias is None else bias.to(device))
    expected_weights, expected_experts = reference.route_experts(logits, routing, bias)
    assert experts.tolist() == expected_experts.tolist()
    assert all(len({*row}) == routing.num_chosen and {*row} <= {*range(8)} for row in experts.tolist())
    if not has_bias:
        assert experts.tolist()[1:3] == [[*range(routing.num_chosen)]] * 2
    assert_near(weights, expected_weights, 1e-6 * routing.scale)
    assert weights[1:3].abs().sum() == 0


@pytest.mark.parametrize("name", ["renormalised shares", "sigmoids of groups with a bias"])
def test_a_row_does_not_depend_on_its_batch(name: str, device: torch.device) -> None:
    routing, has_bias = ROUTINGS[name]
    logits, bias = torch.randn(11, 128, device=device), torch.randn(128, device=device) if has_bias else None
    weights, experts = gpu.route_experts(logits, routing, bias)
    for row in (0, 3, 10):
        alone_weights, alone_experts = gpu.route_experts(logits[row : row + 1], routing, bias)
        assert torch.equal(alone_weights[0], weights[row])
        assert torch.equal(alone_experts[0], experts[row])


@pytest.mark.parametrize(
    ("routing", "sentence"),
    [
        (Routing(num_chosen=9), "9 of 8 experts cannot be chosen"),
        (Routing(num_chosen=2, num_groups=3), "8 experts do not make 3 equal groups"),
        (Routing(num_chosen=2, num_groups=4, num_chosen_groups=5), "5 of 4 groups of experts cannot be chosen"),
        (Routing(num_chosen=3, num_groups=4), "1 groups of 2 experts have fewer than 3"),
        (
            Routing(num_chosen=1, num_groups=8, group_score=GroupScore.TOP2_SUM),
            "groups of one expert have no second score",
        ),
    ],
)
def test_launcher_refuses_what_cannot_be_chosen(routing: Routing, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        gpu.route_experts(torch.randn(1, 8), routing)


def test_launcher_takes_no_rows_and_refuses_too_many_choices() -> None:
    weights, experts = gpu.route_experts(torch.empty(0, 8), Routing(num_chosen=2))
    assert weights.shape == experts.shape == (0, 2)
    with pytest.raises(ValueError, match="at most 32 experts, got 33"):
        gpu.route_experts(torch.randn(1, 40), Routing(num_chosen=33))
