"""Mixtures of experts of a checkpoint, in every layout that they are published in: what ranks read of them.

Run: pytest ci/unit/models/test_expert_weights.py
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from compiled_network import Step
from safetensors.torch import save_file
from tiny_checkpoints import make_checkpoint
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from transformers.models.gpt_oss import modeling_gpt_oss

from inflight.distributed.tensor_parallel import TensorParallelGroup
from inflight.errors import ConfigurationError
from inflight.layers.experts import Experts, SharedExperts
from inflight.layers.weight import DenseWeight
from inflight.models.checkpoint import Checkpoint
from inflight.models.config import ModelConfig
from inflight.models.expert_weights import load_experts, load_mixture
from inflight.models.families import gpt_oss
from inflight.models.family import ExpertTensors
from inflight.models.formats.dense import DenseFormat
from inflight.models.formats.format import WeightFormat
from inflight.models.formats.mxfp4 import Mxfp4Experts
from inflight.models.formats.on_load import OnLoadFormat
from inflight.models.split_tensors import NotSplit
from inflight.models.weight_formats import choose_weight_format
from inflight.models.weights import WeightLoader
from inflight_kernels import Code, CodedWeight
from inflight_kernels.activation.kinds import Activation
from inflight_kernels.moe.routing import Routing

pytestmark = pytest.mark.slow


@dataclass
class OneOf(TensorParallelGroup):
    """A rank that reads its part and sums nothing."""

    rank: int
    size: int


def loaders(
    checkpoint: Checkpoint, size: int, weight_format: WeightFormat | None = None, **options: Any
) -> list[WeightLoader]:
    return [
        WeightLoader(
            checkpoint,
            weight_format or DenseFormat(),
            OneOf(rank, size),
            torch.float32,
            torch.device("cpu"),
            **options,
        )
        for rank in range(size)
    ]


@pytest.mark.parametrize("name", ["qwen3-moe", "mixtral-window", "granite-moe"])
def test_a_rank_reads_its_part_of_experts_from_either_layout(name: str, tmp_path: Path) -> None:
    """Each expert's tensors, or those of all, stacked. A shape that config.json does not ask for is refused."""
    of_layouts = []
    for folder, is_stacked in ((tmp_path / "own", False), (tmp_path / "stacked", True)):
        make_checkpoint(folder, name, save_original_format=not is_stacked)
        tensors = ModelConfig.load(folder).family.experts
        assert tensors is not None
        wider = replace(tensors, intermediate_size=tensors.intermediate_size + 2)
        with Checkpoint(folder) as checkpoint:
            ranks = loaders(checkpoint, 2)
            of_layouts.append([load_experts(rank, tensors, "model.layers.0.", 48) for rank in ranks])
            with pytest.raises(ConfigurationError, match=r"tensor model\.layers\.0\..*, config.json asks for"):
                load_experts(ranks[0], wider, "model.layers.0.", 48)
    for of_own, of_stacked in zip(*of_layouts, strict=True):
        for tensor in ("gate_up_ECD", "down_EDI"):
            assert torch.equal(getattr(of_own, tensor), getattr(of_stacked, tensor))
        assert isinstance(of_own.router, DenseWeight) and isinstance(of_stacked.router, DenseWeight)
        assert torch.equal(of_own.router.values_OI, of_stacked.router.values_OI)
    first, second = of_layouts[0]
    assert not torch.equal(first.down_EDI, second.down_EDI)


@pytest.mark.parametrize("is_stacked", [False, True])
@pytest.mark.parametrize("name", ["qwen3-moe", "mixtral-window"])
def test_a_rank_reads_whole_experts(name: str, is_stacked: bool, tmp_path: Path) -> None:
    """Its own alone. Of four ranks in two sets each has half of the features of half of them."""
    make_checkpoint(tmp_path, name, save_original_format=not is_stacked)
    tensors = ModelConfig.load(tmp_path).family.experts
    assert tensors is not None
    num_bytes = []

    def read(size: int, sets: int) -> list[Experts]:
        parts = []
        for rank in range(size):
            with Checkpoint(tmp_path) as checkpoint:
                loader = loaders(checkpoint, size, expert_parallel_size=sets)[rank]
                parts.append(load_experts(loader, tensors, "model.layers.0.", 48))
                num_bytes.append(checkpoint._num_bytes - of_router)
        return parts

    of_router = tensors.num_experts * 48 * 4
    (whole,), halves, quarters = read(1, 1), read(2, 2), read(4, 2)
    assert num_bytes == [num_bytes[0], *[num_bytes[0] // 2] * 2, *[num_bytes[0] // 4] * 4]
    half = tensors.num_experts // 2
    assert [part.first_expert for part in (whole, *halves, *quarters)] == [0, 0, half, *[0, half] * 2]
    for tensor in ("gate_up_ECD", "down_EDI"):
        assert torch.equal(torch.cat([getattr(part, tensor) for part in halves]), getattr(whole, tensor))
    for number, part in enumerate(halves):
        assert torch.equal(torch.cat([each.down_EDI for each in quarters[number::2]], 2), part.down_EDI)


def test_experts_and_features_that_sets_of_ranks_do_not_divide_are_refused(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "qwen3-moe")
    tensors = ModelConfig.load(tmp_path).family.experts
    assert tensors is not None and (tensors.num_experts, tensors.intermediate_size) == (6, 20)
    sentences = {
        (4, 4): "moe_expert_parallel_size 4 does not divide the checkpoint's number of experts (6)",
        (6, 2): "tensor_parallel_size / moe_expert_parallel_size = 3 does not divide the checkpoint's intermediate "
        "size of an expert (20)",
    }
    with Checkpoint(tmp_path) as checkpoint:
        for (size, sets), sentence in sentences.items():
            loader = loaders(checkpoint, size, expert_parallel_size=sets)[0]
            with pytest.raises(ConfigurationError, match=re.escape(sentence)):
                load_experts(loader, tensors, "model.layers.0.", 48)


@pytest.mark.parametrize("sets", [1, 2])
@pytest.mark.parametrize("name", ["qwen2-moe", "glm4-moe"])
def test_shared_experts_are_divided_like_a_feed_forward_and_summed_once(name: str, sets: int, tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path, name)
    family, number = ModelConfig.load(tmp_path).family, 2
    tensors = family.experts
    assert tensors is not None and tensors.shared is not None
    x = torch.randn(7, 48, generator=torch.Generator().manual_seed(1))
    with Checkpoint(tmp_path) as opened, torch.inference_mode():
        parts = [
            load_mixture(rank, tensors, f"model.layers.{number}.", 48, family.norms)
            for rank in loaders(opened, 2, expert_parallel_size=sets)
        ]
        expected = checkpoint.model.model.layers[number].mlp(x[None])[0]
        found = sum_of(parts, x)
    assert all(isinstance(part, SharedExperts) for part in parts)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def sum_of(parts: Sequence[Experts | SharedExperts], x: Tensor) -> Tensor:
    metadata = Step(decodes=[1]).metadata()  # of which only adapters would matter, of which there are none
    return torch.stack([part(x, metadata) for part in parts]).sum(0)


# -- gpt-oss -----------------------------------------------------------------------------------------------------------

NUM_EXPERTS, SIZE, INNER = 6, 64, 128
RANKS = [(1, 1), (2, 1), (2, 2), (4, 2), (6, 6)]
"""So many, in so many sets, each of which has some of the experts."""
GPT_OSS = ExpertTensors(
    layers=frozenset({0}),
    num_experts=NUM_EXPERTS,
    routing=Routing(num_chosen=2),
    intermediate_size=INNER,
    router=NotSplit("mlp.router"),
    router_bias=True,
    has_biases=True,
    stacked=(gpt_oss.EXPERTS,),
    activation=Activation.CLAMPED_SWIGLU,
)


@pytest.fixture(scope="module")
def of_transformers() -> modeling_gpt_oss.GptOssMLP:
    config = modeling_gpt_oss.GptOssConfig(
        hidden_size=SIZE, intermediate_size=INNER, num_local_experts=NUM_EXPERTS, num_experts_per_tok=2
    )
    layer, generator = modeling_gpt_oss.GptOssMLP(config), torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return layer


def write(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    named = {f"model.layers.0.mlp.{name}": tensor.contiguous() for name, tensor in tensors.items()}
    save_file(named, folder / "model.safetensors", {"format": "pt"})


@pytest.fixture(scope="module")
def x() -> Tensor:
    return torch.randn(9, SIZE, generator=torch.Generator().manual_seed(5))


def experts_of_ranks(
    folder: Path, size: int, weight_format: WeightFormat | None = None, **options: Any
) -> list[Experts]:
    with Checkpoint(folder) as checkpoint:
        ranks = loaders(checkpoint, size, weight_format, **options)
        return [load_experts(rank, GPT_OSS, "model.layers.0.", SIZE) for rank in ranks]


@pytest.mark.parametrize(("size", "sets"), RANKS)
@torch.inference_mode()
def test_transposed_experts_with_biases(
    size: int, sets: int, of_transformers: modeling_gpt_oss.GptOssMLP, x: Tensor, tmp_path: Path
) -> None:
    write(tmp_path, of_transformers.state_dict())
    parts = experts_of_ranks(tmp_path, size, expert_parallel_size=sets)
    assert [part.down_bias_ED is None for part in parts] == [rank >= sets for rank in range(size)]
    torch.testing.assert_close(sum_of(parts, x), of_transformers(x[None])[0][0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("size", "sets"), RANKS)
@torch.inference_mode()
def test_they_become_codes_on_load(
    size: int, sets: int, of_transformers: modeling_gpt_oss.GptOssMLP, x: Tensor, tmp_path: Path
) -> None:
    write(tmp_path, of_transformers.state_dict())
    parts = experts_of_ranks(tmp_path, size, OnLoadFormat(Code.INT8), keeps_codes=True, expert_parallel_size=sets)
    assert all(isinstance(part.gate_up_ECD, CodedWeight) for part in parts)
    expected = of_transformers(x[None])[0][0]
    assert (sum_of(parts, x) - expected).norm() < 0.02 * expected.norm()


@pytest.mark.parametrize("keeps_codes", [True, False])
@pytest.mark.parametrize(("size", "sets"), RANKS)
@torch.inference_mode()
def test_experts_in_mxfp4(
    size: int, sets: int, keeps_codes: bool, of_transformers: modeling_gpt_oss.GptOssMLP, x: Tensor, tmp_path: Path
) -> None:
    """As published: codes where C++ multiplies them, floats elsewhere, both with the numbers of transformers."""
    generator = torch.Generator().manual_seed(6)
    tensors, dense = dict(of_transformers.state_dict()), dict(of_transformers.state_dict())
    for name, (outputs, inputs) in {"gate_up_proj": (2 * INNER, SIZE), "down_proj": (SIZE, INNER)}.items():
        shape = (NUM_EXPERTS, outputs, inputs // 32)
        blocks = torch.randint(0, 256, (*shape, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(120, 125, shape, generator=generator, dtype=torch.uint8)
        del tensors[f"experts.{name}"]
        tensors |= {f"experts.{name}_blocks": blocks, f"experts.{name}_scales": scales}
        dense[f"experts.{name}"] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    write(tmp_path, tensors)
    weight_format = choose_weight_format(tmp_path / "config.json", {"quant_method": "mxfp4"})
    assert isinstance(weight_format, Mxfp4Experts)
    parts = experts_of_ranks(tmp_path, size, weight_format, keeps_codes=keeps_codes, expert_parallel_size=sets)
    assert all(isinstance(part.down_EDI, CodedWeight) == keeps_codes for part in parts)
    of_transformers.load_state_dict(dense)
    torch.testing.assert_close(sum_of(parts, x), of_transformers(x[None])[0][0], rtol=1e-4, atol=1e-4)
    if (size, sets) == (2, 1):
        with pytest.raises(ConfigurationError, match="one rank's share of them, 16, is not a whole number of groups"):
            experts_of_ranks(tmp_path, 8, weight_format, keeps_codes=keeps_codes)


def test_a_scale_that_is_no_number_is_refused(of_transformers: modeling_gpt_oss.GptOssMLP, tmp_path: Path) -> None:
    tensors = dict(of_transformers.state_dict())
    for name, (outputs, inputs) in {"gate_up_proj": (2 * INNER, SIZE), "down_proj": (SIZE, INNER)}.items():
        shape = (NUM_EXPERTS, outputs, inputs // 32)
        del tensors[f"experts.{name}"]
        tensors[f"experts.{name}_blocks"] = torch.zeros((*shape, 16), dtype=torch.uint8)
        tensors[f"experts.{name}_scales"] = torch.full(shape, 255, dtype=torch.uint8)
    write(tmp_path, tensors)
    with pytest.raises(ConfigurationError, match=r"tensor .*gate_up_proj_scales holds a scale that is NaN"):
        experts_of_ranks(tmp_path, 1, Mxfp4Experts())
