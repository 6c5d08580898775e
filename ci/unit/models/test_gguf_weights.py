"""Networks of GGUF files: the tensors, tokens and logits of the checkpoint that they were written of, on each rank, as
codes or as floats; in C++ and in torch.

Run: pytest ci/unit/models/test_gguf_weights.py
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
from compiled_network import needs_compiler
from fake_cuda.context import fake_cuda
from fake_cuda.device import CUDA
from gguf import GGMLQuantizationType, GGUFWriter, quants
from gguf_files import BF16, CONFIGS, F16, F32, Q4_0, Q8_0, GgufModel, write_model
from quantized_runs import load, run
from safetensors.torch import load_file
from tiny_checkpoints import make_prompt

from inflight.distributed.tensor_parallel import TensorParallelGroup
from inflight.errors import ConfigurationError
from inflight.gguf.file import GgufFile
from inflight.gguf.folder import make_folder
from inflight.gguf.tensor_types import TensorType
from inflight.layers.weight import CodedGroups, DenseWeight, Weight
from inflight.models.config import ModelConfig
from inflight.models.family import SplitByInputs, SplitByOutputs, SplitByVocabulary
from inflight.models.formats.gguf import GgufFormat
from inflight.models.ggml_codes import CODES, GROUP_SIZE
from inflight.models.gguf_checkpoint import GgufCheckpoint, open_checkpoint
from inflight.models.weights import WeightLoader
from inflight_kernels.matmul.coded_weight import Code, CodedWeight, join_halves

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

PROMPTS = [make_prompt(length) for length in (1, 8, 21)]
OTHER_CODES = [GGMLQuantizationType.Q4_1, GGMLQuantizationType.Q5_0, GGMLQuantizationType.Q5_1]
LAYER = "model.layers.0"
QKV = SplitByOutputs(tuple(f"self_attn.{name}_proj" for name in "qkv"))


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inflight.gguf.folder.cache_folder", lambda name: tmp_path_factory.mktemp(name))


def results(folder: Path, **options: Any) -> tuple[list[list[int]], list[float]]:
    works = run(folder, PROMPTS, **{"dtype": "float32", **options})
    return [work.output for work in works], [value for work in works for value in work.output_log_probs]


def assert_equal_results(model: GgufModel, **options: Any) -> None:
    tokens, log_probs = results(make_folder(model.file), **options)
    expected_tokens, expected_log_probs = results(model.dense.folder, **options)
    assert tokens == expected_tokens
    assert len({tuple(of_one) for of_one in tokens}) == len(PROMPTS)
    np.testing.assert_allclose(log_probs, expected_log_probs, atol=2e-5)


@pytest.mark.parametrize("name", CONFIGS)
def test_tokens_and_logits_are_those_of_the_checkpoint_it_was_written_of(name: str, tmp_path: Path) -> None:
    assert_equal_results(write_model(tmp_path, name, F32))


@pytest.mark.parametrize("kind", [F16, Q8_0, Q4_0, GGMLQuantizationType.Q5_0], ids=lambda kind: kind.name)
@pytest.mark.parametrize("name", ["llama-biases", "qwen3", "phi3", "qwen3-moe"])
def test_quantised_networks_are_those_of_the_numbers_that_the_codes_stand_for(
    name: str, kind: GGMLQuantizationType, tmp_path: Path
) -> None:
    assert_equal_results(write_model(tmp_path, name, kind))


@needs_compiler
@pytest.mark.parametrize("kind", [Q8_0, Q4_0, *OTHER_CODES], ids=lambda kind: kind.name)
@pytest.mark.parametrize("name", ["llama-tied", "qwen3"])
def test_compiled_layers_multiply_the_codes(name: str, kind: GGMLQuantizationType, tmp_path: Path) -> None:
    assert_equal_results(write_model(tmp_path, name, kind), cpu_compile="true")


@pytest.mark.parametrize("kind", [F32, F16, BF16, Q8_0, Q4_0], ids=lambda kind: kind.name)
@pytest.mark.parametrize("name", ["llama-biases", "qwen3-moe"])
def test_each_tensor_is_what_gguf_dequantises(name: str, kind: GGMLQuantizationType, tmp_path: Path) -> None:
    model = write_model(tmp_path, name, kind)
    expected = load_file(model.dense.folder / "model.safetensors")
    with open_checkpoint(make_folder(model.file)) as checkpoint:
        assert isinstance(checkpoint, GgufCheckpoint)
        assert set(checkpoint.names) == set(expected)
        for tensor_name, values in expected.items():
            found = torch.empty_like(values)
            checkpoint.copy_into(found, tensor_name, tuple(values.shape))
            assert torch.equal(found, values)
            # A part, in the middle.
            starts = tuple(size // 4 for size in values.shape)
            part = torch.empty([size // 2 for size in values.shape])
            checkpoint.copy_into(part, tensor_name, tuple(values.shape), starts)
            index = tuple(slice(start, start + size) for start, size in zip(starts, part.shape, strict=True))
            assert torch.equal(part, values[index])


@pytest.mark.parametrize("kind", CODES, ids=lambda kind: kind.name)
def test_codes_mean_what_gguf_dequantises(kind: TensorType) -> None:
    """Of blocks of any bytes, with numbers in the places of their float16s; some scales are 0."""
    rng, count = np.random.default_rng(1), 64
    blocks = rng.integers(0, 256, (count, kind.block_bytes), dtype=np.uint8)
    if kind.name == "MXFP4":
        blocks[:, 0] = rng.integers(110, 140, count)
    else:
        scales = np.where(np.arange(count) % 7 == 0, 0.0, rng.normal(scale=0.02, size=(2, count))).astype(np.float16)
        for place in range(2 if CODES[kind].has_zeros else 1):
            blocks[:, 2 * place : 2 * place + 2] = scales[place][:, None].view(np.uint8)
    expected = torch.from_numpy(quants.dequantize(blocks, GGMLQuantizationType[kind.name]))
    decoded, coded = CODES[kind].decode(blocks), CODES[kind]
    codes, of_group = torch.from_numpy(np.ascontiguousarray(decoded.codes)), torch.from_numpy(decoded.scales)
    weight = CodedWeight(
        coded.code,
        codes if coded.code.bits == 8 else join_halves(codes),
        of_group.to(coded.scale_dtype),
        None if decoded.zeros is None else torch.from_numpy(decoded.zeros),
        GROUP_SIZE,
    )
    torch.testing.assert_close(weight.dequantize(), expected, rtol=1e-5, atol=1e-6)


def test_large_matrices_are_made_a_few_rows_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = write_model(tmp_path, "llama", Q8_0)
    name, shape = "lm_head.weight", (203, 64)
    monkeypatch.setattr("inflight.models.gguf_checkpoint.DENSE_BYTES", 7 * 64 * 4)
    found = torch.zeros(210, 64)
    with open_checkpoint(make_folder(model.file)) as checkpoint:
        checkpoint.copy_into(found, name, shape)
    assert torch.equal(found[:203], load_file(model.dense.folder / "model.safetensors")[name])
    assert not found[203:].any()


# -- what a layer holds, and each rank ---------------------------------------------------------------------------------


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


def loaders(checkpoint: Any, size: int) -> Iterator[WeightLoader]:
    for rank in range(size):
        group, cpu = FakeGroup(rank, size), torch.device("cpu")
        yield WeightLoader(checkpoint, GgufFormat(), group, torch.float32, cpu, keeps_codes=True)


def test_layers_hold_codes(model: GgufModel) -> None:
    with open_checkpoint(make_folder(model.file)) as checkpoint:
        (loader,) = loaders(checkpoint, 1)
        sections = [loader.even_section("features", size) for size in (64, 32, 32)]
        qkv = loader.by_outputs(QKV, f"{LAYER}.", sections, 64).weight
        weights: list[Any] = [qkv, loader.head(SplitByVocabulary("lm_head"), 203, 64)]
    code = {"Q8_0": Code.INT8, "Q4_0": Code.INT4}[GgufFile(model.file).tensors["blk.0.attn_q.weight"].type.name]
    assert [weight.packed.code for weight in weights] == [code] * 2
    assert all(weight.packed.scales.dtype == torch.float16 for weight in weights)


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


def test_a_gpu_multiplies_floats(model: GgufModel) -> None:
    expected = load_file(model.dense.folder / "model.safetensors")[f"{LAYER}.mlp.down_proj.weight"]
    with fake_cuda(), open_checkpoint(make_folder(model.file)) as checkpoint:
        loader = WeightLoader(checkpoint, GgufFormat(), TensorParallelGroup(), torch.float32, CUDA)
        inputs = loader.even_section("intermediate_size", 128)
        weight = loader.by_inputs(SplitByInputs("mlp.down_proj"), f"{LAYER}.", 64, inputs).weight
        assert isinstance(weight, DenseWeight) and weight.values_OI.shape == expected.shape


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
    assert [record.message for record in caplog.records if "made dense" in record.message]


def test_stacked_layers_of_several_types_are_dense(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As in files that keep values more exactly than queries and keys."""
    more_exact = GGMLQuantizationType.Q5_1
    model = write_model(
        tmp_path, "llama", lambda name: Q8_0 if "v_proj" in name else more_exact if "o_p" in name else Q4_0
    )
    with caplog.at_level(logging.INFO):
        assert_equal_results(model)
    told = [record.message for record in caplog.records if "made dense" in record.message]
    assert told == [
        "layers of type Q4_0, Q5_1, Q8_0 were made dense as they were read, and take as much memory as unquantised ones"
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
