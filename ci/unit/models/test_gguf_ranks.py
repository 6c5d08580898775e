"""What layers of GGUF files hold on each rank, as codes or as floats, and what is refused.

Run: pytest ci/unit/models/test_gguf_ranks.py
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fake_cuda.context import fake_cuda
from fake_cuda.device import CUDA
from gguf import GGMLQuantizationType, GGUFWriter
from gguf_files import BF16, F16, F32, Q4_0, Q8_0, GgufModel, write_model
from numpy.typing import NDArray
from quantized_runs import load
from safetensors.torch import load_file

from inflight.distributed.tensor_parallel import TensorParallelGroup
from inflight.errors import ConfigurationError
from inflight.gguf.file import GgufFile
from inflight.gguf.folder import make_folder
from inflight.gguf.tensor_types import TensorType
from inflight.layers.experts import Experts
from inflight.layers.weight import CodedGroups, DenseWeight, Weight
from inflight.models.config import ModelConfig
from inflight.models.expert_weights import load_experts
from inflight.models.formats.coded import Coding
from inflight.models.formats.gguf import GgufFormat
from inflight.models.ggml_codes import Decoded, decode
from inflight.models.gguf_checkpoint import GgufCheckpoint, open_checkpoint
from inflight.models.split_tensors import SplitByInputs, SplitByOutputs, SplitByVocabulary
from inflight.models.weights import WeightLoader
from inflight_kernels.matmul.coded_weight import Code, CodedWeight

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

LAYER = "model.layers.0"
QKV = SplitByOutputs(tuple(f"self_attn.{name}_proj" for name in "qkv"))


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inflight.gguf.folder.cache_folder", lambda name: tmp_path_factory.mktemp(name))


def told_dense(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if "made dense" in record.message]


class FakeGroup(TensorParallelGroup):
    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


def values_of(weight: Weight) -> torch.Tensor:
    if isinstance(weight, CodedGroups):
        return weight.packed.dequantize()
    assert isinstance(weight, DenseWeight)
    return weight.values_OI


@pytest.fixture(params=[Q8_0, Q4_0], ids=lambda kind: kind.name)
def model(request: pytest.FixtureRequest, tmp_path: Path) -> GgufModel:
    return write_model(tmp_path, "llama", request.param)


def loaders(checkpoint: Any, size: int, **options: Any) -> Iterator[WeightLoader]:
    for rank in range(size):
        group, cpu = FakeGroup(rank, size), torch.device("cpu")
        yield WeightLoader(checkpoint, GgufFormat(), group, torch.float32, cpu, keeps_codes=True, **options)


def test_layers_hold_codes(model: GgufModel) -> None:
    with open_checkpoint(make_folder(model.file)) as checkpoint:
        (loader,) = loaders(checkpoint, 1)
        sections = [loader.even_section("features", size) for size in (64, 32, 32)]
        qkv = loader.by_outputs(QKV, f"{LAYER}.", sections, 64).weight
        weights: list[Any] = [qkv, loader.head(SplitByVocabulary("lm_head"), 203, 64)]
        embedding = loader.by_vocabulary(SplitByVocabulary("model.embed_tokens"), 203, 64).weight_UD
    code = {"Q8_0": Code.INT8, "Q4_0": Code.INT4}[GgufFile(model.file).tensors["blk.0.attn_q.weight"].type.name]
    assert [weight.packed.code for weight in weights] == [code] * 2
    assert isinstance(embedding, CodedWeight) and embedding.code is code
    dense = load_file(model.dense.folder / "model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(embedding.dequantize(), dense)
    assert all(weight.packed.scales.dtype == torch.float16 for weight in weights)


def test_an_embedding_whose_codes_have_zeros_is_dense_beside_the_head_of_the_same_codes(tmp_path: Path) -> None:
    model = write_model(tmp_path, "llama-tied", GGMLQuantizationType.Q5_1)
    with open_checkpoint(make_folder(model.file)) as checkpoint:
        (loader,) = loaders(checkpoint, 1)
        tensor = SplitByVocabulary("model.embed_tokens")
        head = loader.head(tensor, 203, 64)
        tables = [loader.by_vocabulary(tensor, 203, 64, same).weight_UD for same in (head, None)]
    dense = load_file(model.dense.folder / "model.safetensors")["model.embed_tokens.weight"]
    assert isinstance(head, CodedGroups)
    assert all(isinstance(table, torch.Tensor) and torch.equal(table, dense) for table in tables)


def test_ranks_hold_the_whole_weight_between_them(model: GgufModel) -> None:
    dense = load_file(model.dense.folder / "model.safetensors")
    names = [f"{LAYER}.{name}" for name in QKV.names]
    with open_checkpoint(make_folder(model.file)) as checkpoint:
        stacked, down = [], []
        for loader in loaders(checkpoint, 2):
            sections = [loader.even_section("features", size) for size in (64, 32, 32)]
            stacked.append(loader.by_outputs(QKV, f"{LAYER}.", sections, 64).weight)
            inputs = loader.even_section("intermediate_size", 128)
            down.append(loader.by_inputs(SplitByInputs("mlp.down_proj"), f"{LAYER}.", 64, inputs).weight)
        assert all(isinstance(weight, CodedGroups) for weight in (*stacked, *down))
        parts = zip(*(torch.split(values_of(weight), [32, 16, 16]) for weight in stacked), strict=True)
        for name, of_ranks in zip(names, parts, strict=True):
            assert torch.equal(torch.cat(of_ranks), dense[f"{name}.weight"])
        assert torch.equal(torch.cat([*map(values_of, down)], 1), dense[f"{LAYER}.mlp.down_proj.weight"])


def test_a_gpu_multiplies_floats(model: GgufModel, tmp_path: Path) -> None:
    expected = load_file(model.dense.folder / "model.safetensors")[f"{LAYER}.mlp.down_proj.weight"]
    with fake_cuda(), open_checkpoint(make_folder(model.file)) as checkpoint:
        loader = WeightLoader(checkpoint, GgufFormat(), TensorParallelGroup(), torch.float32, CUDA)
        inputs = loader.even_section("intermediate_size", 128)
        weight = loader.by_inputs(SplitByInputs("mlp.down_proj"), f"{LAYER}.", 64, inputs).weight
        assert isinstance(weight, DenseWeight) and weight.values_OI.shape == expected.shape
    with fake_cuda(), open_checkpoint(make_folder(write_model(tmp_path, "qwen3-moe", Q8_0).file)) as checkpoint:
        experts = first_experts(WeightLoader(checkpoint, GgufFormat(), TensorParallelGroup(), torch.float32, CUDA))
        assert isinstance(experts.down_EDI, torch.Tensor) and experts.down_EDI.shape == (4, 64, 32)


def test_a_share_that_divides_a_group_is_dense(model: GgufModel, caplog: pytest.LogCaptureFixture) -> None:
    expected = load_file(model.dense.folder / "model.safetensors")[f"{LAYER}.mlp.down_proj.weight"]
    with caplog.at_level(logging.INFO), open_checkpoint(make_folder(model.file)) as checkpoint:
        weights = [
            loader.by_inputs(
                SplitByInputs("mlp.down_proj"), f"{LAYER}.", 64, loader.even_section("intermediate_size", 128)
            ).weight
            for loader in loaders(checkpoint, 8)
        ]
    assert all(isinstance(weight, DenseWeight) for weight in weights)
    assert torch.equal(torch.cat([*map(values_of, weights)], 1), expected)
    assert told_dense(caplog)


def first_experts(loader: WeightLoader) -> Experts:
    config = ModelConfig.load(loader.checkpoint.folder)
    assert config.family.experts is not None
    return load_experts(loader, config.family.experts, f"{LAYER}.", config.hidden_size)


def experts_of(folder: Path, size: int, **options: Any) -> list[Experts]:
    """Of the first layer, on each rank."""
    with open_checkpoint(folder) as checkpoint:
        return [first_experts(loader) for loader in loaders(checkpoint, size, **options)]


def test_ranks_hold_all_experts_between_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though their shares end within a block of the file; and one matrix of one expert is decoded at a time."""
    model = write_model(tmp_path, "mixtral", GGMLQuantizationType.Q4_K)
    sizes = []

    def noting(blocks: NDArray[np.uint8], kind: TensorType, coding: Coding) -> Decoded:
        sizes.append(len(blocks) * kind.block_size)
        return decode(blocks, kind, coding)

    monkeypatch.setattr("inflight.models.gguf_tensor.decode", noting)
    dense = load_file(model.dense.folder / "model.safetensors")
    ranks = experts_of(make_folder(model.file), 2)
    assert max(sizes) == 256 * 256
    gate_ups, downs = [each.gate_up_ECD for each in ranks], [each.down_EDI for each in ranks]
    assert all(isinstance(each, CodedWeight) and each.code is Code.INT4 for each in (*gate_ups, *downs))
    for expert in range(4):
        name = f"{LAYER}.block_sparse_moe.experts.{expert}"
        halves = [coded.of_expert(expert).dequantize().chunk(2) for coded in gate_ups if isinstance(coded, CodedWeight)]
        whole = [torch.cat(parts) for parts in zip(*halves, strict=True)]
        parts = [coded.of_expert(expert).dequantize() for coded in downs if isinstance(coded, CodedWeight)]
        for found, number in zip((*whole, torch.cat(parts, 1)), (1, 3, 2), strict=True):
            torch.testing.assert_close(found, dense[f"{name}.w{number}.weight"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("name", "kind"), [("mixtral", GGMLQuantizationType.Q4_K), ("gpt-oss", Q8_0)])
def test_a_rank_may_have_whole_experts(name: str, kind: GGMLQuantizationType, tmp_path: Path) -> None:
    """As codes of whichever sizes, and with their biases."""
    folder = make_folder(write_model(tmp_path, name, kind).file)
    (whole,), halves = experts_of(folder, 1), experts_of(folder, 2, expert_parallel_size=2)
    assert [each.first_expert for each in halves] == [0, 2]
    for tensor in ("gate_up_ECD", "down_EDI"):
        parts = [getattr(each, tensor) for each in halves]
        assert all(isinstance(part, CodedWeight) for part in parts)
        assert torch.equal(torch.cat([part.dequantize() for part in parts]), getattr(whole, tensor).dequantize())
    for tensor in ("gate_up_bias_EC", "down_bias_ED") if name == "gpt-oss" else ():
        assert torch.equal(torch.cat([getattr(each, tensor) for each in halves]), getattr(whole, tensor))


def test_ranks_hold_their_part_of_the_biases_of_experts(tmp_path: Path) -> None:
    """Those of what they sum are on one rank."""
    model = write_model(tmp_path, "gpt-oss", Q8_0)
    dense = load_file(model.dense.folder / "model.safetensors")
    first, second = experts_of(make_folder(model.file), 2)
    assert first.gate_up_bias_EC is not None and second.gate_up_bias_EC is not None
    halves = zip(first.gate_up_bias_EC.chunk(2, 1), second.gate_up_bias_EC.chunk(2, 1), strict=True)
    in_turn = torch.stack([torch.cat(parts, 1) for parts in halves], -1).flatten(1)
    assert torch.equal(in_turn, dense[f"{LAYER}.mlp.experts.gate_up_proj_bias"])
    assert first.down_bias_ED is not None and second.down_bias_ED is None
    assert torch.equal(first.down_bias_ED, dense[f"{LAYER}.mlp.experts.down_proj_bias"])


def test_a_share_of_experts_that_divides_a_group_is_dense(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = write_model(tmp_path, "qwen3-moe", Q8_0)
    with caplog.at_level(logging.INFO):
        ranks = experts_of(make_folder(model.file), 2)
    assert all(isinstance(each.gate_up_ECD, CodedWeight) for each in ranks)
    downs = [each.down_EDI for each in ranks]
    found = torch.cat([down for down in downs if isinstance(down, torch.Tensor)], 2)
    dense = load_file(model.dense.folder / "model.safetensors")
    names = [f"{LAYER}.mlp.experts.{expert}.down_proj.weight" for expert in range(4)]
    assert torch.equal(found, torch.stack([dense[name] for name in names]))
    assert told_dense(caplog) == [
        "layers of type Q8_0 were made dense as they were read, and take as much memory as unquantised ones"
    ]


def test_what_is_not_read_is_checked(model: GgufModel) -> None:
    """Of other pipeline stages, and where another process has read the weights."""
    with open_checkpoint(make_folder(model.file), is_read=False) as checkpoint:
        loader = next(loaders(checkpoint, 1))
        for each in (loader, loader.elsewhere):
            sections = [loader.even_section("features", size) for size in (64, 32, 32)]
            weight = each.by_outputs(QKV, f"{LAYER}.", sections, 64).weight
            assert isinstance(weight, CodedGroups)
        with pytest.raises(ConfigurationError, match="has shape"):
            loader.by_inputs(SplitByInputs("mlp.down_proj"), f"{LAYER}.", 64, loader.even_section("x", 64))


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_a_scale_that_is_no_number_is_refused(model: GgufModel) -> None:
    content = bytearray(model.file.read_bytes())
    folder = make_folder(model.file)
    with GgufCheckpoint(folder) as checkpoint:
        start = checkpoint._tensors[f"{LAYER}.mlp.down_proj.weight"].info.start
    content[start : start + 2] = np.float16(np.nan).tobytes()
    model.file.write_bytes(content)
    with pytest.raises(ConfigurationError, match=r"down_proj\.weight holds nan, which is no"):
        load(make_folder(model.file), dtype="float32").close()
    with open_checkpoint(make_folder(model.file)) as checkpoint:
        (loader,) = loaders(checkpoint, 1)
        inputs = loader.even_section("intermediate_size", 128)
        with pytest.raises(ConfigurationError, match=r"down_proj\.weight has a scale that holds nan, which is no"):
            loader.by_inputs(SplitByInputs("mlp.down_proj"), f"{LAYER}.", 64, inputs)


def test_tensors_that_the_network_lacks_are_refused(tmp_path: Path) -> None:
    def add(writer: GGUFWriter) -> None:
        writer.add_tensor("blk.0.attn_sinks.weight", np.zeros(4, np.float32))

    folder = make_folder(write_model(tmp_path, "llama", F32, add).file)
    with pytest.raises(ConfigurationError, match=r"does not account for: blk\.0\.attn_sinks\.weight"):
        load(folder, dtype="float32").close()


def test_the_checkpoints_type_is_that_of_most_of_its_weights(tmp_path: Path) -> None:
    for kind, dtype in ((F32, "float32"), (F16, "float16"), (BF16, "bfloat16"), (Q8_0, "bfloat16")):
        folder = make_folder(write_model(tmp_path / kind.name, "llama", kind).file)
        config = json.loads((folder / "config.json").read_text())
        assert config["dtype"] == dtype
        assert ModelConfig.load(folder).weight_format.quantized == ("gguf" if kind is Q8_0 else "")
