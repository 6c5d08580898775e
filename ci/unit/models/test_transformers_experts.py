"""Experts of transformers' classes: which of them this engine's operation computes, and that it gives what they give.

Run: pytest ci/unit/models/test_transformers_experts.py
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.models.gemma4.modeling_gemma4 import Gemma4TextExperts
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts
from transformers_checkpoints import EXPERTS, make_config

from inflight.models.formats.format import Target
from inflight.models.transformers_experts import kind_of, replace_experts, settle_experts
from inflight_kernels import Activation, cpu

SIZE, INNER, NUM_TOKENS, NUM_CHOSEN = 64, 48, 9, 2
MIXTRAL = make_config("mixtral", **EXPERTS, intermediate_size=INNER)
NEMOTRON: dict[str, Any] = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": INNER}
CLASSES = [
    pytest.param(MixtralExperts, MIXTRAL, Activation.SILU, id="mixtral"),
    pytest.param(
        Gemma4TextExperts,
        make_config("gemma4_text", num_experts=4, moe_intermediate_size=INNER),
        Activation.GELU_TANH,
        id="gemma4",
    ),
    pytest.param(
        GptOssExperts,
        make_config("gpt_oss", **EXPERTS, intermediate_size=INNER),
        Activation.CLAMPED_SWIGLU,
        id="gpt_oss",
    ),
    pytest.param(NemotronHExperts, make_config("nemotron_h", **NEMOTRON), Activation.RELU_SQUARED, id="nemotron_h"),
]


class Layer(nn.Module):
    """A network that is nothing but the experts of a layer."""

    def __init__(self, experts_class: Any, config: PreTrainedConfig) -> None:
        super().__init__()
        self.config, config._experts_implementation = config, "eager"
        self.experts = experts_class(config).requires_grad_(False)
        torch.manual_seed(0)
        for values in self.experts.parameters():
            values.normal_(std=0.4)

    def forward(self, x_TD: Tensor, experts_TK: Tensor, weights_TK: Tensor) -> Tensor:
        return self.experts(x_TD, experts_TK, weights_TK)


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    experts_TK = torch.stack([torch.randperm(4)[:NUM_CHOSEN] for _ in range(NUM_TOKENS)])
    return torch.randn(NUM_TOKENS, SIZE), experts_TK, torch.rand(experts_TK.shape)


def target_of(dtype: torch.dtype) -> Target:
    def empty(*shape: int, dtype: torch.dtype | None = dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype)

    return Target(dtype=dtype, device=torch.device("cpu"), empty=empty)


def replaced(layer: Layer, order: cpu.Order | None = None) -> None:
    experts = replace_experts(layer, torch.float32, None, target_of(torch.float32), {})
    layer(*inputs())
    settle_experts(experts, torch.float32, order)


@pytest.mark.parametrize("is_compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("experts_class", "config", "activation"), CLASSES)
@torch.inference_mode()
def test_experts_give_what_the_class_gives(
    experts_class: Any, config: PreTrainedConfig, activation: Activation, is_compiled: bool
) -> None:
    layer, given = Layer(experts_class, config), inputs()
    kind = kind_of(layer.experts)
    assert kind is not None
    assert (kind.activation, kind.size, kind.inner_size) == (activation, SIZE, INNER)
    expected = layer(*given)
    replaced(layer, cpu.Order.AUTO if is_compiled else None)
    found = layer(*given)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    if is_compiled:
        for row in range(NUM_TOKENS):
            assert torch.equal(layer(*(each[row : row + 1] for each in given)), found[row : row + 1])


def test_experts_that_compute_something_else_are_left_to_the_class(caplog: pytest.LogCaptureFixture) -> None:
    clamped = Layer(GptOssExperts, make_config("gpt_oss", **EXPERTS))
    clamped.experts.limit = 5.0
    quick = Layer(MixtralExperts, make_config("mixtral", **EXPERTS, hidden_act="quick_gelu"))
    for layer in (clamped, quick):
        replaced(layer)
        assert isinstance(layer.experts, (GptOssExperts, MixtralExperts))
        name = type(layer.experts).__name__
        assert f"1 modules of experts are computed by transformers' code: {name}" in caplog.text


def test_experts_of_another_type_than_the_network_are_left_to_the_class() -> None:
    layer = Layer(MixtralExperts, MIXTRAL)
    assert replace_experts(layer, torch.bfloat16, None, target_of(torch.bfloat16), {}) == []
    assert isinstance(layer.experts, MixtralExperts)


@torch.inference_mode()
def test_calls_of_other_shapes_and_types_are_refused() -> None:
    layer, (x_TD, experts_TK, weights_TK) = Layer(MixtralExperts, MIXTRAL), inputs()
    replaced(layer)
    with pytest.raises(ValueError, match=r"experts for 64 features of torch\.float32 got"):
        layer(x_TD.half(), experts_TK, weights_TK)
    with pytest.raises(ValueError, match=r"weights of 9 tokens have the shapes \(9, 2\) and \(9, 1\)"):
        layer(x_TD, experts_TK, weights_TK[:, :1])
    assert layer(x_TD[:0], experts_TK[:0], weights_TK[:0]).shape == (0, SIZE)
