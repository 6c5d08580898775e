"""A GGUF file becomes the folder of a checkpoint, wherever a model is named; what the engine would compute otherwise is
refused with a sentence.

Run: pytest ci/unit/gguf/test_gguf_folder.py
"""

from __future__ import annotations

import dataclasses
import inspect
import os
import sys
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from gguf import GGMLQuantizationType, GGUFWriter
from gguf_files import CONFIGS, F32, Q8_0, add_tokenizer, write_model

from inflight.cache_folder import cache_folder
from inflight.config import EngineConfig
from inflight.errors import ConfigurationError
from inflight.executor.executor import resolve_config
from inflight.gguf.__main__ import main
from inflight.gguf.folder import find_file, make_folder
from inflight.hub.local_checkpoint import with_local_checkpoint
from inflight.hub.model_name import find_name, shown_name
from inflight.models.config import ModelConfig
from inflight.openai.chat_template import ChatTemplate
from inflight.supervisor.options import ServeOptions
from inflight.supervisor.plan import write_repository
from inflight.text.tokenizer import Tokenizer
from inflight.weight_identity import weight_identity
from inflight_kernels.cache_folder import cache_folder as kernels_folder

CHECKPOINT = Path(__file__).resolve().parents[3] / "model_repository" / "llm" / "1" / "checkpoint"
TEMPLATE = (CHECKPOINT / "chat_template.jinja").read_text(encoding="utf-8")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("INFLIGHT_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def with_tokenizer(writer: GGUFWriter, **values: Any) -> None:
    tokenizer = tokenizers.Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))
    special = {"bos_token_id": 1, "eos_token_id": 2, "padding_token_id": 0, "add_bos_token": True}
    add_tokenizer(writer, tokenizer, "gpt2", "gpt-2", chat_template=TEMPLATE, **{**special, **values})


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write_model(tmp_path, "llama", Q8_0, with_tokenizer).file


def test_the_engine_and_its_kernels_keep_things_in_one_place() -> None:
    """Two functions, as neither imports the other one's."""
    assert inspect.getsource(cache_folder) == inspect.getsource(kernels_folder)


def refusal(make: Callable[[], object]) -> str:
    with pytest.raises(ConfigurationError) as caught:
        make()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_the_folder_has_what_a_checkpoint_has(file: Path) -> None:
    folder = make_folder(file)
    assert shown_name(folder) == "llama"
    assert os.path.samefile(folder / "model.gguf", file)
    assert Tokenizer.load(folder).encode("the") == Tokenizer.load(CHECKPOINT).encode("the")
    assert ChatTemplate.load(folder) is not None
    config = ModelConfig.load(folder)
    assert (config.architecture, config.weight_format.quantized) == ("LlamaForCausalLM", "gguf")


@pytest.mark.parametrize("name", CONFIGS)
def test_the_configuration_is_that_of_transformers(name: str, tmp_path: Path) -> None:
    model = write_model(tmp_path, name, F32)
    found, expected = (ModelConfig.load(folder) for folder in (make_folder(model.file), model.dense.folder))
    rounded = dataclasses.replace(found.rope, theta=expected.rope.theta, factor=expected.rope.factor)
    assert rounded == expected.rope
    for key in ("rope.theta", "rope.factor", "rms_norm_eps"):  # float32 in the file
        assert attrgetter(key)(found) == pytest.approx(attrgetter(key)(expected), rel=1e-6)
    family = found.family if name == "granite" else expected.family  # likewise
    assert dataclasses.replace(
        found, rope=rounded, rms_norm_eps=expected.rms_norm_eps, family=family
    ) == dataclasses.replace(expected, family=family)


def test_it_is_made_once(file: Path, cache: Path) -> None:
    folder = make_folder(file)
    config = EngineConfig(gpt_model_path=str(folder))
    before = weight_identity(config)
    assert make_folder(file) == folder
    assert weight_identity(config) == before
    os.utime(file, ns=(1, 1))
    assert make_folder(file) != folder
    assert weight_identity(config) != before
    assert not [path for path in cache.rglob("tmp*")]


def test_wherever_a_model_is_named_its_file_is_one(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(make_folder(file))
    assert resolve_config(file, None).gpt_model_path == folder
    assert resolve_config(None, EngineConfig.from_parameters({"gpt_model_path": str(file)})).tokenizer_dir == folder
    named = with_local_checkpoint({"gpt_model_path": " llama.gguf ", "speculative_model_dir": str(file)}, tmp_path)
    assert named["gpt_model_path"] == folder
    # A draft model needs no tokenizer.
    assert sorted(path.name for path in Path(named["speculative_model_dir"]).iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.gguf",
        "tokenizer_config.json",
    ]
    served = write_repository(ServeOptions(checkpoint=file), tmp_path / "served", print)
    assert served.config is not None and served.config.gpt_model_path == folder == served.config.tokenizer_dir
    options = ServeOptions(parameters={"gpt_model_path": str(file)})
    again = write_repository(options, tmp_path / "set", print)
    assert again.config is not None and again.config.gpt_model_path == folder
    monkeypatch.setattr(sys, "argv", ["inflight.gguf", str(file)])
    assert main() == 0 and capsys.readouterr().out == f"{folder}\n"


def test_a_folder_with_one_file_is_that_file(file: Path, tmp_path: Path) -> None:
    only = tmp_path / "only"
    only.mkdir()
    (only / "a.gguf").symlink_to(file)
    (only / "README.md").touch()
    assert find_file(only) == only / "a.gguf"
    assert shown_name(make_folder(only / "a.gguf")) == "a"
    (only / "b.gguf").symlink_to(file)
    assert refusal(lambda: find_file(only)) == f"{only} holds 2 GGUF files (a.gguf, b.gguf): name one of them"
    (only / "config.json").touch()
    assert find_file(only) is None
    assert find_file(CHECKPOINT) is None


def test_a_file_that_is_not_there_is_no_model_of_the_hub() -> None:
    assert find_name("org/model.gguf") is None
    assert refusal(lambda: write_repository(ServeOptions(checkpoint=Path("org/x.gguf")), Path("x"), print)) == (
        "org/x.gguf is not there: give the path of a GGUF file"
    )


def test_parts_of_a_model_are_refused_with_the_remedy(file: Path) -> None:
    part = file.rename(file.with_name("big-00002-of-00003.gguf"))
    assert refusal(lambda: make_folder(part)) == (
        f"{part} is one of 3 parts of a model, which are not read: join them with llama-gguf-split --merge "
        "big-00001-of-00003.gguf big.gguf, and name that file"
    )


def test_a_part_is_known_by_whatever_name(tmp_path: Path) -> None:
    file = write_model(tmp_path, "llama", F32, lambda writer: writer.add_uint16("split.count", 3)).file
    assert refusal(lambda: make_folder(file)).startswith(f"{file} is one of 3 parts of a model, which are not read")


def test_ranks_that_others_start_are_told_a_folder(file: Path, tmp_path: Path) -> None:
    sentence = refusal(
        lambda: with_local_checkpoint({"gpt_model_path": "llama.gguf", "executor": "external"}, tmp_path)
    )
    assert sentence.endswith(f"name the folder that is printed by python -m inflight.gguf {file}")


def test_an_own_tokenizer_takes_the_place_of_one_that_is_not_known(tmp_path: Path) -> None:
    def with_unknown(writer: GGUFWriter) -> None:
        add_tokenizer(writer, tokenizers.Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json")), "gpt2", "new")

    file = write_model(tmp_path, "llama", F32, with_unknown).file
    parameters = {"gpt_model_path": str(file), "tokenizer_dir": "${tokenizer_dir}"}
    assert refusal(lambda: with_local_checkpoint(parameters, tmp_path)).endswith(
        "set tokenizer_dir to a folder with the model's tokenizer.json"
    )
    found = with_local_checkpoint({**parameters, "tokenizer_dir": str(CHECKPOINT)}, tmp_path)
    assert (Path(found["gpt_model_path"]) / "config.json").is_file()


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda w: w.add_attn_logit_softcapping(3.0), "llama.attn_logit_softcapping may change what the network"),
        (lambda w: w.add_causal_attention(False), "llama.attention.causal must be true, got false"),
        (lambda w: w.add_logit_scale(2.0), "llama.logit_scale is not supported for this architecture"),
        (lambda w: w.add_string("llama.rope.scaling.type", "longrope"), "llama.rope.scaling.type 'longrope' is not"),
        (
            lambda w: w.add_tensor("rope_freqs.weight", np.linspace(1, 9, 8, dtype=np.float32)),
            "the factors in tensor rope_freqs.weight are not those of Llama 3's scaling",
        ),
        (
            lambda w: w.add_tensor("rope_freqs.weight", np.ones(3, np.float32)),
            "tensor rope_freqs.weight is F32 of shape [3], and 8 numbers of F32 are expected",
        ),
        (
            lambda w: w.add_tensor("rope_factors_long.weight", np.ones(8, np.float32)),
            "the scaling of positions by the tensor rope_factors_long.weight (longrope) is not supported",
        ),
        (
            lambda w: w.add_tensor("more", np.zeros((1, 40), np.uint8), raw_dtype=GGMLQuantizationType.Q8_1),
            "tensor more is of type Q8_1, of which no weights are read",
        ),
    ],
)
def test_what_would_be_computed_otherwise_is_refused(
    change: Callable[[GGUFWriter], None], sentence: str, tmp_path: Path
) -> None:
    file = write_model(tmp_path, "llama", F32, change).file
    assert refusal(lambda: make_folder(file)).startswith(f"{file}: {sentence}")


def test_an_unknown_architecture_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "x.gguf", "gemma3")
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write()
    writer.close()
    assert refusal(lambda: make_folder(tmp_path / "x.gguf")) == (
        f"{tmp_path}/x.gguf: general.architecture 'gemma3' is not supported in GGUF files; these are: llama, qwen2, "
        "qwen3, qwen3moe, phi3, granite"
    )
