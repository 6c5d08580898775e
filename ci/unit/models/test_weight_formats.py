"""Checkpoints with quantised weights: the same tokens as the network with the dequantised weights, in both ways to
compute them and on each rank; formats and splits that are not supported are refused with a sentence.

Run: pytest ci/unit/models/test_weight_formats.py
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from awq_checkpoints import GROUP_SIZE, QUANTIZATION, write_awq_checkpoint
from quantized_runs import NUM_TOKENS, load, refusal, run
from safetensors.torch import load_file, save_file
from tiny_checkpoints import TinyCheckpoint, make_checkpoint, make_prompt

from inflight.distributed.tensor_parallel import TensorParallelGroup
from inflight.errors import ConfigurationError
from inflight.layers.weight import DenseWeight, Int4Groups, Weight
from inflight.models.checkpoint import Checkpoint
from inflight.models.config import ModelConfig
from inflight.models.decoder import Decoder
from inflight.models.formats import coded
from inflight.models.formats.awq import AwqFormat
from inflight.models.formats.dense import DenseFormat
from inflight.models.split_tensors import SplitByInputs, SplitByOutputs
from inflight.models.weights import WeightLoader

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]


@pytest.fixture(scope="module", params=[torch.float16, torch.bfloat16], ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    found: torch.dtype = request.param
    return found


@pytest.fixture(scope="module")
def checkpoint(dtype: torch.dtype, tmp_path_factory: pytest.TempPathFactory) -> TinyCheckpoint:
    return write_awq_checkpoint(tmp_path_factory.mktemp("awq"), dtype)


@pytest.fixture(params=[True, False], ids=["dequantised", "kept"])
def dequantized(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[bool]:
    """Whether weights are dequantised when they are read, as on a CPU, or kept in 4 bits, as on a GPU."""
    if not request.param:
        monkeypatch.setattr(coded, "INT4_KERNEL_ON", frozenset({"cpu"}))
    yield bool(request.param)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_awq_checkpoint(tmp_path).folder


def results(folder: Path, prompts: list[list[int]], **options: Any) -> tuple[list[list[int]], list[list[float]]]:
    """Tokens and their log probabilities."""
    works = run(folder, prompts, **options)
    return [work.output for work in works], [work.output_log_probs for work in works]


def change_quantization(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"].update(values)
    path.write_text(json.dumps(config))


def test_tokens_and_logits_are_those_of_the_dequantised_weights(checkpoint: TinyCheckpoint, dequantized: bool) -> None:
    prompts = [make_prompt(length) for length in (1, 8, 21)]
    tokens, log_probs = results(checkpoint.folder, prompts)
    assert (tokens, log_probs) == results(checkpoint.folder.parent / "dense", prompts)
    assert len({tuple(of_one) for of_one in tokens}) == len(prompts)


def test_tokens_are_those_of_transformers(folder: Path, dequantized: bool, tmp_path: Path) -> None:
    checkpoint = write_awq_checkpoint(tmp_path / "again")
    pairs = [checkpoint.prompt(length, NUM_TOKENS) for length in (1, 8, 21)]
    assert results(folder, [prompt for prompt, _ in pairs])[0] == [tokens for _, tokens in pairs]


def test_the_format_decides_what_a_layer_holds(folder: Path, dequantized: bool) -> None:
    with closing(load(folder)) as runner:
        decoder = runner._computation.decoder
        assert isinstance(decoder, Decoder)
        weights = [getattr(decoder.layers[0].branches[0].stateful, name).weight for name in ("qkv", "output")]
    assert [type(weight) for weight in weights] == [DenseWeight if dequantized else Int4Groups] * 2


def test_a_layer_that_was_not_quantised_is_dense(folder: Path, dequantized: bool) -> None:
    """Its tensors, not the configuration, say so."""
    expected = results(folder, [make_prompt(8)])
    tensors = load_file(folder / "model.safetensors")
    dense = load_file(folder.parent / "dense" / "model.safetensors")
    name = "model.layers.1.mlp.down_proj"
    for kind in ("qweight", "qzeros", "scales"):
        del tensors[f"{name}.{kind}"]
    save_file({**tensors, f"{name}.weight": dense[f"{name}.weight"]}, folder / "model.safetensors")
    assert results(folder, [make_prompt(8)]) == expected


# -- ranks -------------------------------------------------------------------------------------------------------------


class FakeGroup(TensorParallelGroup):
    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


def ranks(checkpoint: Checkpoint, size: int) -> list[WeightLoader]:
    cpu, awq = torch.device("cpu"), AwqFormat(GROUP_SIZE)
    return [WeightLoader(checkpoint, awq, FakeGroup(rank, size), torch.float16, cpu) for rank in range(size)]


def values_of(weight: Weight) -> torch.Tensor:
    if isinstance(weight, Int4Groups):
        return weight.packed.dequantize()
    assert isinstance(weight, DenseWeight)
    return weight.values_OI


def test_ranks_hold_the_whole_weight_between_them(folder: Path, dequantized: bool) -> None:
    dense = load_file(folder.parent / "dense" / "model.safetensors")
    gate, up, down = (f"model.layers.0.mlp.{name}_proj" for name in ("gate", "up", "down"))
    with Checkpoint(folder) as checkpoint:
        loaders = ranks(checkpoint, 4)
        section = [loader.even_section("intermediate_size", 128) for loader in loaders]
        gate_up = [
            values_of(loader.by_outputs(SplitByOutputs((gate, up)), "", [mine, mine], 64).weight)
            for loader, mine in zip(loaders, section, strict=True)
        ]
        rows = [
            values_of(loader.by_inputs(SplitByInputs(down), "", 64, mine).weight)
            for loader, mine in zip(loaders, section, strict=True)
        ]
    assert torch.equal(torch.cat([part[:32] for part in gate_up]), dense[f"{gate}.weight"])
    assert torch.equal(torch.cat([part[32:] for part in gate_up]), dense[f"{up}.weight"])
    assert torch.equal(torch.cat(rows, dim=1), dense[f"{down}.weight"])


def test_a_share_that_cuts_a_group_is_refused(folder: Path) -> None:
    down = SplitByInputs("model.layers.0.mlp.down_proj")
    with Checkpoint(folder) as checkpoint:
        loader = ranks(checkpoint, 8)[0]
        with pytest.raises(ConfigurationError) as caught:
            loader.by_inputs(down, "", 64, loader.even_section("intermediate_size", 128))
    assert str(caught.value) == (
        f"{folder}: the 128 inputs of model.layers.0.mlp.down_proj are quantised in groups of 32, and one rank's share "
        "of them, 16, is not a whole number of groups; choose another tensor_parallel_size"
    )


# -- refused -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"quant_method": "aqlm"},
            "quantized checkpoints (aqlm) are not supported; use the float16, bfloat16 or float32 one, or one that awq",
        ),
        ({"bits": 8}, "not bits 8, version gemm and zero_point True"),
        ({"version": "gemv"}, "not bits 4, version gemv and zero_point True"),
        ({"zero_point": False}, "not bits 4, version gemm and zero_point False"),
        ({"group_size": 48}, "quantization_config.group_size must be a multiple of 32, got 48"),
        ({"group_size": -1}, "quantization_config.group_size must be a multiple of 32, got -1"),
    ],
)
def test_other_formats(folder: Path, changes: dict[str, Any], words: str) -> None:
    change_quantization(folder, **changes)
    with pytest.raises(ConfigurationError) as caught:
        ModelConfig.load(folder)
    assert str(caught.value).startswith(f"{folder / 'config.json'}: ") and words in str(caught.value)


@pytest.mark.parametrize(
    ("quantization", "words"),
    [
        (
            {"quant_algo": "NVFP4", "kv_cache_quant_algo": None},
            "(modelopt, quant_algo NVFP4, kv_cache_quant_algo None)",
        ),
        ({"quant_algo": None, "kv_cache_quant_algo": "NVFP4"}, "kv_cache_quant_algo NVFP4) are not supported"),
        (None, "hf_quant_config.json: quantization must be an object, got None"),
    ],
)
@pytest.mark.parametrize("model_impl", ["native", "transformers"])
def test_what_modelopt_says_beside_config_json(
    quantization: dict[str, Any] | None, words: str, model_impl: str, tmp_path: Path
) -> None:
    """Which is not ignored, though config.json is that of a checkpoint with floats."""
    folder = make_checkpoint(tmp_path, "llama").folder
    written = {"producer": {"name": "modelopt", "version": "0.23.0"}, "quantization": quantization}
    (folder / "hf_quant_config.json").write_text(json.dumps(written))
    assert words in refusal(folder, model_impl=model_impl)


@pytest.mark.parametrize("is_beside", [True, False])
def test_floats_of_modelopt_may_have_scales_of_the_cache(is_beside: bool, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "llama").folder
    quantization = {"quant_method": "modelopt", "quant_algo": None, "kv_cache_quant_algo": "FP8"}
    path = folder / "config.json"
    if is_beside:
        (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": quantization}))
    else:
        path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": quantization}))
    assert ModelConfig.load(folder).weight_format == DenseFormat()


def test_float32_is_for_weights_that_are_dequantised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, prompts = write_awq_checkpoint(tmp_path, torch.float32).folder, [make_prompt(8)]
    assert results(folder, prompts, dtype="float32") == results(folder.parent / "dense", prompts, dtype="float32")
    monkeypatch.setattr(coded, "INT4_KERNEL_ON", frozenset({"cpu"}))
    assert refusal(folder, dtype="float32") == (
        f"{folder}: 4-bit weights are computed in float16 or bfloat16, not in float32; set dtype to one of them"
    )


def test_another_group_size_than_the_tensors_have(folder: Path) -> None:
    change_quantization(folder, group_size=2 * GROUP_SIZE)
    assert "qzeros has shape [2, 8], config.json asks for [1, 8]" in refusal(folder)


def test_weights_of_another_type(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj.qweight"
    save_file({**tensors, name: tensors[name].float()}, folder / "model.safetensors")
    assert f"tensor {name} is F32; only I32 weights are supported" in refusal(folder)


def test_a_quantised_checkpoint_without_its_configuration(folder: Path) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    assert config.pop("quantization_config") == QUANTIZATION
    path.write_text(json.dumps(config))
    assert refusal(folder) == f"{folder}: the checkpoint has no tensor model.layers.0.self_attn.q_proj.weight"
