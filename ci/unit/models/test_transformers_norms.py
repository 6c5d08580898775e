"""Norms of transformers' classes: which of them C++ computes, and that it gives what they give.

Run: pytest ci/unit/models/test_transformers_norms.py
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compiled_network import needs_compiler
from torch import nn
from transformers.models.cohere.modeling_cohere import CohereLayerNorm
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated

from inflight.models.transformers_norms import _CompiledNorm, compile_norms
from inflight_kernels import cpu

pytestmark = [pytest.mark.slow, needs_compiler]

SIZE = 96


def norm(norm_class: Any, dtype: torch.dtype, size: int = SIZE) -> Any:
    module = norm_class(size, eps=1e-5).to(dtype).requires_grad_(False)
    module.weight.copy_(1 + 0.5 * torch.randn(size, generator=torch.Generator().manual_seed(3)))
    return module


def is_compiled(module: Any) -> bool:
    return isinstance(module.forward, _CompiledNorm)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("norm_class", [LlamaRMSNorm, Olmo2RMSNorm, Gemma3RMSNorm])
@torch.inference_mode()
def test_norms_give_what_the_class_gives(norm_class: Any, dtype: torch.dtype) -> None:
    module = norm(norm_class, dtype)
    x = torch.randn(2, 3, 5, SIZE, generator=torch.Generator().manual_seed(4)).to(dtype)
    small, expected = 1e-3 * x, module(x)
    expected_small = module(small)
    compile_norms(nn.ModuleList([module]), dtype, cpu.Order.AUTO)
    assert is_compiled(module)
    for given, right in ((x.transpose(1, 2), expected.transpose(1, 2)), (small, expected_small)):
        found = module(given)
        assert found.shape == given.shape
        assert ((found - right).abs() > 1e-5 * right.abs()).float().mean() < 0.01
        assert torch.equal(module(given[1, 2, 1:2]), found[1, 2, 1:2])
    assert module(x[:0]).shape == x[:0].shape


@torch.inference_mode()
def test_other_norms_and_inputs_of_other_types_are_left_to_the_class() -> None:
    # One takes the mean off, one has a gate, and one fewer features than C++ reads at once.
    others = norm(CohereLayerNorm, torch.bfloat16), norm(Qwen3NextRMSNormGated, torch.bfloat16)
    others = *others, norm(LlamaRMSNorm, torch.bfloat16, 24), norm(LlamaRMSNorm, torch.float32)
    module, x = norm(LlamaRMSNorm, torch.bfloat16), torch.randn(3, SIZE)
    expected = module(x)
    compile_norms(nn.ModuleList([*others, module]), torch.bfloat16, cpu.Order.AUTO)
    assert not any(map(is_compiled, others))
    assert is_compiled(module)
    assert torch.equal(module(x), expected)
    without = norm(LlamaRMSNorm, torch.bfloat16)
    compile_norms(nn.ModuleList([without]), torch.bfloat16, None)
    assert not is_compiled(without)
