"""Weights of networks that transformers' code computes: what is loaded, and what is refused.

Run: pytest ci/unit/models/test_transformers_loading.py
"""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_checkpoints import TinyCheckpoint, write_checkpoint
from transformers_checkpoints import CONFIGS
from transformers_runner import Sample, load, refusal, run

from inflight.models.checkpoint import SINGLE_FILE

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]


@pytest.fixture
def gpt2(tmp_path: Path) -> TinyCheckpoint:
    return write_checkpoint(tmp_path, CONFIGS["gpt2"], 1)


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / SINGLE_FILE)
    change(tensors)
    save_file(tensors, folder / SINGLE_FILE)


def change_json(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def test_experts_in_several_files(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path, CONFIGS["mixtral"], 1, max_shard_size="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    runner = load(tmp_path, model_impl="transformers")
    sample = Sample.of(checkpoint, 13)
    run(runner, [sample], [sample.work()])
    runner.close()


def refused(checkpoint: TinyCheckpoint) -> str:
    return refusal(checkpoint.folder, model_impl="transformers")


def test_numbers_that_a_network_cannot_have(gpt2: TinyCheckpoint) -> None:
    change_json(gpt2.folder, n_head=5)
    assert refused(gpt2).startswith("transformers cannot read it as GPT2LMHeadModel: ")


def test_a_missing_tensor(gpt2: TinyCheckpoint) -> None:
    change_tensors(gpt2.folder, lambda tensors: tensors.pop("transformer.h.1.attn.c_proj.bias"))
    assert refused(gpt2) == "the checkpoint has no tensor transformer.h.1.attn.c_proj.bias"


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_value_that_is_no_number(gpt2: TinyCheckpoint, value: float) -> None:
    name = "transformer.h.1.mlp.c_fc.weight"
    change_tensors(gpt2.folder, lambda tensors: tensors[name].view(-1).__setitem__(7, value))
    assert refused(gpt2).startswith(f"tensor {name} holds {value}, which is no weight: the file is damaged")


def test_a_tensor_too_many(gpt2: TinyCheckpoint) -> None:
    change_tensors(gpt2.folder, lambda tensors: tensors.update({"transformer.h.1.more": torch.zeros(3)}))
    assert refused(gpt2).endswith("its config.json does not account for: transformer.h.1.more")


def test_what_old_checkpoints_carry_is_no_weight(gpt2: TinyCheckpoint) -> None:
    mask = torch.ones((1, 1, 8, 8), dtype=torch.uint8)
    sample = Sample.of(gpt2, 9)
    change_tensors(gpt2.folder, lambda tensors: tensors.update({"transformer.h.1.attn.bias": mask}))
    runner = load(gpt2.folder, model_impl="transformers")
    run(runner, [sample], [sample.work()])
    runner.close()


def test_a_tensor_of_another_shape(gpt2: TinyCheckpoint) -> None:
    change_tensors(gpt2.folder, lambda tensors: tensors.update({"transformer.ln_f.weight": torch.zeros(3)}))
    assert refused(gpt2) == ("the checkpoint holds transformer.ln_f.weight (shape [3] where config.json asks for [64])")


def test_a_tensor_of_another_kind(gpt2: TinyCheckpoint) -> None:
    weight = torch.zeros(64, dtype=torch.int8)
    change_tensors(gpt2.folder, lambda tensors: tensors.update({"transformer.ln_f.weight": weight}))
    assert "tensor transformer.ln_f.weight is I8; only F32, BF16, F16 weights are supported" in refusal(
        gpt2.folder, model_impl="transformers"
    )


def test_nothing_points_into_the_files_afterwards(gpt2: TinyCheckpoint) -> None:
    sample = Sample.of(gpt2, 9)
    runner = load(gpt2.folder, model_impl="transformers")
    path = gpt2.folder / SINGLE_FILE
    with path.open("r+b") as file:
        file.write(bytes(path.stat().st_size))
    run(runner, [sample], [sample.work()])
    runner.close()


def test_pickled_weights_are_refused(gpt2: TinyCheckpoint) -> None:
    (gpt2.folder / SINGLE_FILE).rename(gpt2.folder / "pytorch_model.bin")
    assert "its weights are pickled" in refused(gpt2)


def test_a_checkpoints_own_code_is_never_run(gpt2: TinyCheckpoint) -> None:
    witness = gpt2.folder / "witness"
    (gpt2.folder / "code.py").write_text(f"open({str(witness)!r}, 'w')\nclass Network: pass\n")
    change_json(gpt2.folder, auto_map={"AutoConfig": "code.Network", "AutoModelForCausalLM": "code.Network"})
    load(gpt2.folder, model_impl="transformers").close()
    change_json(gpt2.folder, model_type="mine", architectures=["MineForCausalLM"])
    refused(gpt2)
    assert not witness.exists()


@pytest.mark.parametrize("architecture", ["MineForCausalLM", "GPT2ForSequenceClassification"])
def test_a_class_that_is_no_language_model_of_transformers(gpt2: TinyCheckpoint, architecture: str) -> None:
    change_json(gpt2.folder, architectures=[architecture])
    assert refused(gpt2).startswith(f"{architecture} is not a causal language model of transformers ")
