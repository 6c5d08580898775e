"""Checkpoints that are not whole, not safe or not what config.json says: each is refused with a sentence.

Run: pytest ci/unit/models/test_weights.py
"""

from __future__ import annotations

import json
import math
import os
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from model_driver import Driver, Work
from safetensors.torch import load_file, save_file
from tiny_checkpoints import make_checkpoint, make_prompt

from inflight.config import EngineConfig
from inflight.distributed.rank_group import SingleRank
from inflight.distributed.tensor_parallel import TensorParallelGroup
from inflight.errors import ConfigurationError
from inflight.layers.linear import ColumnParallelLinear, RowParallelLinear
from inflight.layers.weight import DenseWeight
from inflight.models.checkpoint import Checkpoint
from inflight.models.family import NormStyle
from inflight.models.formats.dense import DenseFormat
from inflight.models.split_tensors import NotSplit, SplitByInputs, SplitByOutputs, SplitByVocabulary
from inflight.models.weights import Section, WeightLoader
from inflight.runtime.model_runner import ModelRunner

pytestmark = pytest.mark.slow


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path / "checkpoint", "llama").folder


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path / "sharded", "llama", max_shard_size="40KB").folder


def config_of(folder: Path, **options: Any) -> EngineConfig:
    return EngineConfig(
        gpt_model_path=str(folder), device="cpu", **{"max_tokens_in_paged_kv_cache": 256, "max_seq_len": 64, **options}
    )


def load(folder: Path, **options: Any) -> None:
    ModelRunner.load(config_of(folder, **options), SingleRank()).close()


def tokens_of(folder: Path) -> list[int]:
    """What the checkpoint says to some prompt."""
    work = Work(prompt=make_prompt(9), max_tokens=8)
    with closing(ModelRunner.load(config_of(folder), SingleRank())) as runner:
        Driver(runner).run([work])
    return work.output


def refusal(folder: Path, **options: Any) -> str:
    with pytest.raises(ConfigurationError) as caught:
        load(folder, **options)
    return str(caught.value)


def change_config(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config.update(values)
    path.write_text(json.dumps({key: value for key, value in config.items() if value != "absent"}))


def change_tensors(folder: Path, **tensors: torch.Tensor | None) -> None:
    """Keyword names stand for tensor names with "__" for "."."""
    path = folder / "model.safetensors"
    weights = load_file(path)
    for name, tensor in tensors.items():
        name = name.replace("__", ".")
        weights.pop(name, None)
        if tensor is not None:
            weights[name] = tensor
    save_file(weights, path)


def test_the_checkpoint_itself_is_fine(folder: Path) -> None:
    load(folder)


def test_layers_that_predict_further_tokens_are_not_read(tmp_path: Path) -> None:
    """GLM-4.5 publishes one of them behind the last layer."""
    folder = make_checkpoint(tmp_path, "glm4-moe").folder
    change_tensors(folder, **{"model.layers.3.eh_proj.weight": torch.zeros(2, 2)})
    load(folder)
    change_config(folder, num_mtp_layers=0, num_nextn_predict_layers=0)
    assert refusal(folder).endswith("does not account for: model.layers.3.eh_proj.weight")


# -- files -------------------------------------------------------------------------------------------------------------


def test_folder_without_config(tmp_path: Path) -> None:
    assert refusal(tmp_path) == f"{tmp_path} is not a Hugging Face checkpoint folder: it has no config.json"


def test_config_that_is_not_json(folder: Path) -> None:
    (folder / "config.json").write_text("{")
    assert refusal(folder).startswith(f"{folder / 'config.json'} cannot be read: Expecting property name")


def test_no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    assert refusal(folder) == f"{folder} holds neither model.safetensors nor model.safetensors.index.json"


def test_pickled_weights_are_never_opened(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert "its weights are pickled, save them with save_pretrained(safe_serialization=True)" in refusal(folder)


@pytest.mark.parametrize("kept_bytes", [0, 5, 2000, -1])
def test_truncated_file(folder: Path, kept_bytes: int) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept_bytes])
    sentence = refusal(folder)
    assert sentence.startswith(f"{path} is not a whole safetensors file (")
    assert sentence.endswith("): download it again")


@pytest.mark.parametrize("header", [b"\xff" * 64, b"\x08" + b"\x00" * 7 + b"notjson!", b"<html>not found</html>" * 9])
def test_garbage_in_place_of_a_header(folder: Path, header: bytes) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(header)
    assert refusal(folder).startswith(f"{path} is not a whole safetensors file (")


def test_missing_shard(sharded: Path) -> None:
    victim = sorted(sharded.glob("model-*.safetensors"))[1]
    victim.unlink()
    index = sharded / "model.safetensors.index.json"
    assert refusal(sharded) == f"{index} names the file {victim.name}, which is not there: download it again"


def test_truncated_shard_is_named(sharded: Path) -> None:
    victim = sorted(sharded.glob("model-*.safetensors"))[1]
    victim.write_bytes(victim.read_bytes()[:-4])
    assert refusal(sharded).startswith(f"{victim} is not a whole safetensors file (")


@pytest.mark.parametrize("text", ["", "[]", '{"weight_map": 3}', '{"metadata": {}}', "[" * 100_000])
def test_index_that_is_none(sharded: Path, text: str) -> None:
    index = sharded / "model.safetensors.index.json"
    index.write_text(text)
    assert refusal(sharded) == f"{index} is not a safetensors index: it must hold a weight_map object"


def test_index_that_leads_out_of_the_folder(sharded: Path) -> None:
    index = sharded / "model.safetensors.index.json"
    values = json.loads(index.read_text())
    values["weight_map"]["lm_head.weight"] = "../elsewhere.safetensors"
    index.write_text(json.dumps(values))
    assert refusal(sharded) == f"{index} names the file '../elsewhere.safetensors', which is outside the folder"


def test_index_that_names_the_wrong_shard(sharded: Path) -> None:
    index = sharded / "model.safetensors.index.json"
    values = json.loads(index.read_text())
    places = values["weight_map"]
    places["lm_head.weight"] = next(name for name in places.values() if name != places["lm_head.weight"])
    index.write_text(json.dumps(values))
    assert f"{sharded / places['lm_head.weight']} is not a whole safetensors file" in refusal(sharded)


# -- tensors -----------------------------------------------------------------------------------------------------------


def test_missing_tensor(folder: Path) -> None:
    change_tensors(folder, model__layers__1__mlp__up_proj__weight=None)
    assert refusal(folder) == f"{folder}: the checkpoint has no tensor model.layers.1.mlp.up_proj.weight"


def test_missing_head(folder: Path) -> None:
    change_tensors(folder, lm_head__weight=None)
    assert refusal(folder) == f"{folder}: the checkpoint has no tensor lm_head.weight"


def test_wrong_shape(folder: Path) -> None:
    change_tensors(folder, model__norm__weight=torch.ones(47))
    path = folder / "model.safetensors"
    assert refusal(folder) == f"{path}: tensor model.norm.weight has shape [47], config.json asks for [48]"


@pytest.mark.parametrize(
    ("values", "tensor"),
    [
        ({"vocab_size": 2**31 - 1}, "model.embed_tokens.weight"),
        ({"hidden_size": 2**31 - 4}, "model.embed_tokens.weight"),
        ({"intermediate_size": 2**31 - 1}, "model.layers.0.mlp.gate_proj.weight"),
    ],
)
def test_no_memory_is_taken_for_sizes_that_the_tensors_do_not_have(
    folder: Path, monkeypatch: pytest.MonkeyPatch, values: dict[str, int], tensor: str
) -> None:
    def small(shape: tuple[int, ...], **options: Any) -> torch.Tensor:
        assert math.prod(shape) < 2**20
        return torch.zeros(shape, **options)

    change_config(folder, **values)
    monkeypatch.setattr(torch, "empty", small)
    assert f"tensor {tensor} has shape" in refusal(folder)


def test_wrong_type(folder: Path) -> None:
    change_tensors(folder, model__norm__weight=torch.ones(48, dtype=torch.int8))
    path = folder / "model.safetensors"
    assert refusal(folder) == f"{path}: tensor model.norm.weight is I8; only F32, BF16, F16 weights are supported"


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    "name",
    ["model.embed_tokens.weight", "model.layers.1.self_attn.v_proj.weight", "model.layers.2.input_layernorm.weight"]
    + ["model.layers.0.mlp.down_proj.weight", "lm_head.weight"],
)
def test_a_value_that_is_no_number(folder: Path, name: str, value: float) -> None:
    path = folder / "model.safetensors"
    tensor = load_file(path)[name]
    tensor.view(-1)[-1] = value
    change_tensors(folder, **{name: tensor})
    assert refusal(folder) == (
        f"{path}: tensor {name} holds {value}, which is no weight: the file is damaged, or was saved from a training "
        "that diverged; take another one"
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_value_that_is_no_number_in_fewer_bits(folder: Path, dtype: torch.dtype) -> None:
    weights = {name: tensor.to(dtype) for name, tensor in load_file(folder / "model.safetensors").items()}
    weights["model.norm.weight"][3] = math.nan
    save_file(weights, folder / "model.safetensors")
    assert "tensor model.norm.weight holds nan, which is no weight" in refusal(folder)


def test_a_value_that_float16_cannot_have(folder: Path) -> None:
    """A larger one than it has would become infinite."""
    tensor = load_file(folder / "model.safetensors")["model.norm.weight"]
    tensor[5] = -70_000.0
    change_tensors(folder, model__norm__weight=tensor)
    load(folder)
    assert refusal(folder, dtype="float16") == (
        f"{folder / 'model.safetensors'}: tensor model.norm.weight holds -70000, and float16 has no numbers beyond "
        "65504: set dtype to bfloat16 or float32"
    )


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "generation_config.json", "tokenizer.json"])
def test_what_is_no_file_is_not_opened(folder: Path, name: str) -> None:
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    assert refusal(folder) == f"{folder / name} is a FIFO where a file is expected"
    (folder / name).unlink()
    (folder / name).mkdir()
    assert refusal(folder) == f"{folder / name} is a folder where a file is expected"


def test_tensor_that_the_network_would_leave_out(folder: Path) -> None:
    change_tensors(folder, model__layers__0__self_attn__q_proj__bias=torch.ones(48))
    assert refusal(folder) == (
        f"{folder}: the checkpoint holds tensors that its config.json does not account for: "
        "model.layers.0.self_attn.q_proj.bias"
    )


def test_more_layers_than_config_says(folder: Path) -> None:
    change_config(folder, num_hidden_layers=2)
    sentence = refusal(folder)
    assert "does not account for: model.layers.2.input_layernorm.weight," in sentence
    assert sentence.endswith("and 6 more")


def test_tables_that_follow_from_config_are_ignored(folder: Path) -> None:
    before = tokens_of(folder)
    change_tensors(folder, model__layers__0__self_attn__rotary_emb__inv_freq=torch.full((6,), torch.nan))
    assert tokens_of(folder) == before


def test_a_tied_head_beside_its_embedding_must_be_usable(tmp_path: Path) -> None:
    """Of other values than the embedding's it is the head (test_models.py)."""
    folder = make_checkpoint(tmp_path, "llama-tied").folder
    change_tensors(folder, lm_head__weight=torch.full((203, 48), torch.nan))
    with pytest.raises(ConfigurationError, match="tensor lm_head"):
        tokens_of(folder)


# -- slices ------------------------------------------------------------------------------------------------------------


class FakeGroup(TensorParallelGroup):
    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


def loaders(checkpoint: Checkpoint, size: int) -> list[WeightLoader]:
    cpu = torch.device("cpu")
    return [WeightLoader(checkpoint, DenseFormat(), FakeGroup(rank, size), torch.float32, cpu) for rank in range(size)]


def section(rank: WeightLoader, num_features: int) -> Section:
    return rank.even_section("features", num_features)


def values_of(linear: ColumnParallelLinear | RowParallelLinear) -> torch.Tensor:
    assert isinstance(linear.weight, DenseWeight)
    return linear.weight.values_OI


def test_ranks_hold_the_whole_weight_between_them(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    up, down = "model.layers.0.mlp.up_proj", "model.layers.0.mlp.down_proj"
    with Checkpoint(folder) as checkpoint:
        ranks = loaders(checkpoint, 4)
        columns = [values_of(rank.by_outputs(SplitByOutputs((up,)), "", [section(rank, 80)], 48)) for rank in ranks]
        rows = [values_of(rank.by_inputs(SplitByInputs(down), "", 48, section(rank, 80))) for rank in ranks]
    assert torch.equal(torch.cat(columns), weights[f"{up}.weight"])
    assert torch.equal(torch.cat(rows, dim=1), weights[f"{down}.weight"])
    assert all(weight.shape == (20, 48) for weight in columns)


@pytest.mark.parametrize("size", [2, 3, 7, 150])
def test_vocabulary_is_padded_with_zeros(folder: Path, size: int) -> None:
    """203 rows on `size` ranks; with 150, ranks beyond the last row hold zeros alone."""
    table = load_file(folder / "model.safetensors")["lm_head.weight"]
    with Checkpoint(folder) as checkpoint:
        parts = [
            rank.by_vocabulary(SplitByVocabulary("lm_head"), 203, 48).weight_UD for rank in loaders(checkpoint, size)
        ]
    assert len({part.shape for part in parts}) == 1
    whole = torch.cat(parts)
    assert torch.equal(whole[:203], table)
    assert not whole[203:].any()


def test_only_the_leader_adds_the_bias(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "llama-biases").folder
    with Checkpoint(folder) as checkpoint:
        down = SplitByInputs("mlp.down_proj", bias=True)
        biases = [
            rank.by_inputs(down, "model.layers.0.", 48, section(rank, 80)).bias_O for rank in loaders(checkpoint, 2)
        ]
    assert biases[0] is not None
    assert biases[1] is None


def test_weights_do_not_point_into_the_file(folder: Path) -> None:
    with Checkpoint(folder) as checkpoint:
        norm = loaders(checkpoint, 1)[0].norm(NotSplit("model.norm"), "", 48, NormStyle(eps=1e-6))
    before = norm.weight_D.clone()
    path = folder / "model.safetensors"
    content = path.read_bytes()
    with path.open("r+b") as file:
        file.write(b"\0" * len(content))
    assert torch.equal(norm.weight_D, before)
