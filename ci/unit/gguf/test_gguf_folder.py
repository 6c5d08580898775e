"""A GGUF file becomes the folder of a checkpoint, wherever a model is named; what the engine would compute otherwise is
refused with a sentence.

Run: pytest ci/unit/gguf/test_gguf_folder.py
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from gguf import ExpertGatingFuncType, GGMLQuantizationType, GGUFWriter
from gguf_files import F32, Q8_0, add_tokenizer, write_model
from gguf_networks import CONFIGS, DESCRIBED_OTHERWISE

from inflight.asking.chat_template import ChatTemplate
from inflight.cache_folder import cache_folder
from inflight.config import EngineConfig
from inflight.errors import ConfigurationError
from inflight.executor.executor import resolve_config
from inflight.gguf.__main__ import main
from inflight.gguf.architectures import ARCHITECTURES
from inflight.gguf.folder import find_file, make_folder
from inflight.gguf.parts import linked_files
from inflight.hub.local_checkpoint import with_local_checkpoint
from inflight.hub.model_name import find_name, shown_name
from inflight.models.config import ModelConfig
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


@pytest.mark.parametrize("name", [name for name in CONFIGS if name not in DESCRIBED_OTHERWISE])
def test_the_configuration_is_that_of_transformers(name: str, tmp_path: Path) -> None:
    model = write_model(tmp_path, name, F32)
    found, expected = (ModelConfig.load(folder) for folder in (make_folder(model.file), model.dense.folder))
    assert rounded(found) == rounded(expected)


def rounded(value: Any) -> Any:
    """The same with numbers of so many digits as those of the file, which are float32."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: rounded(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, tuple):
        return tuple(rounded(each) for each in value)
    return f"{value:.6g}" if isinstance(value, float) else value


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
    (only / "mmproj-a.gguf").touch()
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


@pytest.fixture
def parts(tmp_path: Path) -> list[Path]:
    """Of a model in several files, alone in their folder."""
    folder = tmp_path / "split"
    folder.mkdir()
    first = write_model(tmp_path, "llama", Q8_0, with_tokenizer, tensors_of_part=12).file
    return [path.rename(folder / path.name) for path in sorted(first.parent.glob("*.gguf"))]


def test_every_part_names_the_model_and_so_does_their_folder(parts: list[Path]) -> None:
    folder = make_folder(parts[0])
    assert [path.name for path in parts] == [f"llama-0000{number}-of-00003.gguf" for number in (1, 2, 3)]
    assert {make_folder(part) for part in (*parts, find_file(parts[0].parent) or Path())} == {folder}
    assert shown_name(folder) == "llama"
    assert [path.resolve() for path in linked_files(folder)] == parts
    assert ModelConfig.load(folder).weight_format.quantized == "gguf"
    assert Tokenizer.load(folder).encode("the") == Tokenizer.load(CHECKPOINT).encode("the")
    config = EngineConfig(gpt_model_path=str(folder))
    before = weight_identity(config)
    os.utime(parts[2], ns=(1, 1))
    assert weight_identity(config) != before and make_folder(parts[0]) != folder


def test_a_part_that_is_missing_is_named(parts: list[Path]) -> None:
    parts[0].unlink()
    for way in (parts[1], parts[0].parent):
        assert refusal(lambda way=way: make_folder(find_file(way) or Path())) == (  # type: ignore[misc]
            f"{parts[1]} is one of 3 parts of a model, and {parts[0].name} is not beside it: download what is missing"
        )
    parts[2].unlink()
    assert f"and {parts[0].name}, {parts[2].name} are not beside it" in refusal(lambda: make_folder(parts[1]))


def test_parts_that_do_not_belong_together_are_refused(parts: list[Path], tmp_path: Path) -> None:
    alone = tmp_path / "alone.gguf"
    alone.symlink_to(parts[0])
    assert refusal(lambda: make_folder(alone)) == (
        f"{alone} is one of 3 parts of a model by its metadata (split.count), and of 1 by its name: call them "
        "NAME-00001-of-00003.gguf and so on"
    )
    second, third = (part.read_bytes() for part in parts[1:])
    parts[1].write_bytes(third)
    assert re.fullmatch(
        rf"{parts[2]} and {parts[1]} have the tensor '.*' both: download them again",
        refusal(lambda: make_folder(parts[0])),
    )
    parts[2].write_bytes(second)
    assert refusal(lambda: make_folder(parts[0])) == (
        f"{parts[1]} is part 3 of 3 by its metadata (split.no), and part 2 by its name: download it again"
    )
    parts[2].write_bytes(third)
    parts[1].write_bytes(re.sub(rb"(split\.tensors\.count\x05\0\0\0).", rb"\1c", second, count=1, flags=re.DOTALL))
    assert refusal(lambda: make_folder(parts[0])).startswith(
        f"{parts[1]}: the model has 99 tensors by its metadata (split.tensors.count), and 30 are in its 3 parts: "
    )


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
        (lambda w: w.add_logit_scale(2.0), "llama.logit_scale may change what the network computes, and"),
        (lambda w: w.add_string("llama.rope.scaling.type", "longrope"), "llama.rope.scaling.type 'longrope' is not"),
        (
            lambda w: w.add_tensor("rope_freqs.weight", np.linspace(1, 9, 8, dtype=np.float32)),
            "the factors in tensor rope_freqs.weight are neither those of Llama 3's",
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


@pytest.mark.parametrize(
    ("name", "change", "sentence"),
    [
        ("granite", lambda w: w.add_rope_scaling_finetuned(False), "granite.rope.scaling.finetuned must be true, got"),
        ("granite-moe", lambda w: w.add_expert_shared_feed_forward_length(8), "granitemoe.expert_shared_feed_forward"),
        ("glm4-moe", lambda w: w.add_expert_gating_func(ExpertGatingFuncType.SOFTMAX), "glm4moe.expert_gating_func mu"),
        ("gemma2", lambda w: w.add_rope_freq_base_swa(7.0), "gemma2.rope.freq_base_swa must be gemma2.rope.freq_base"),
        ("gemma3", lambda w: w.add_sliding_window_pattern([True]), "gemma3.attention.sliding_window_pattern must be a"),
        ("qwen2-yarn", lambda w: w.add_rope_scaling_yarn_attn_factor(1.0), "qwen2.rope.scaling.yarn_attn_factor other"),
        ("qwen2-yarn", lambda w: w.add_rope_scaling_attn_factors(1.3), "qwen2.rope.scaling.attn_factor other than 1 o"),
        ("starcoder2", lambda w: w.add_sliding_window(9), "starcoder2.attention.sliding_window is not supported for"),
        (
            "qwen3_5",
            lambda w: w.add_ssm_group_count(4),
            "qwen35.ssm.group_count (4) must divide qwen35.ssm.time_step_r",
        ),
        (
            "qwen3_5",
            lambda w: w.add_ssm_group_count(1),
            "the 320 rows of blk.0.ssm_conv1d.weight are not the 256 that",
        ),
        (
            "granite-hybrid",
            lambda w: w.add_rope_scaling_finetuned(True),
            "granitehybrid.attention.scale, granitehybrid.embedding_scale, granitehybrid.",
        ),
        (
            "deepseek-v2",
            lambda w: w.tensors[0].pop("blk.1.attn_v_b.weight"),
            "of blk.1.attn_k_b.weight, blk.1.attn_v_b.weight there is no blk.1.attn_v_b.weight",
        ),
        ("gemma4", lambda w: w.tensors[0].pop("rope_freqs.weight"), "there is no tensor rope_freqs.weight, which says"),
        ("gemma4", lambda w: w.add_key_length_swa(48), "gemma4.attention.value_length_swa (32) must be the key"),
        (
            "gemma4",
            lambda w: w.add_feed_forward_length([128, 128, 128, 256, 256]),
            "gemma4.feed_forward_length must be",
        ),
        (
            "gemma4",
            lambda w: w.add_shared_kv_layers(5),
            "gemma4.attention.shared_kv_layers (5) must be less than gemma4",
        ),
        (
            "gemma4",
            lambda w: w.add_head_count_kv([1, 2, 2, 2, 2]),
            "gemma4.attention.head_count_kv differs between lay",
        ),
        (
            "gemma4",
            lambda w: w.add_head_count_kv([2, 2]),
            "gemma4.attention.head_count_kv must be a whole number, or o",
        ),
        ("bamba", lambda w: w.add_rope_dimension_count(32), "granitehybrid.rope.dimension_count must be half the size"),
        ("kimi-linear", lambda w: w.add_expert_gating_func(ExpertGatingFuncType.SOFTMAX), "kimi-linear.expert_gating_"),
        ("lfm2", lambda w: w.add_block_count(4), "layer 3 has none of the tensors shortconv.conv, attn_q"),
    ],
)
def test_so_is_what_other_architectures_have(
    name: str, change: Callable[[GGUFWriter], None], sentence: str, tmp_path: Path
) -> None:
    file = write_model(tmp_path, name, F32, change).file
    assert refusal(lambda: make_folder(file)).startswith(f"{file}: {sentence}")


@pytest.mark.parametrize(("name", "num_layers"), [("gemma2", 46), ("gemma3", 62)])
def test_scores_of_the_largest_gemma_are_divided_by_another_number(name: str, num_layers: int, tmp_path: Path) -> None:
    """Which no key says."""
    file = write_model(tmp_path, name, F32, lambda w: w.add_block_count(num_layers)).file
    values = json.loads((make_folder(file) / "config.json").read_text())
    assert values["query_pre_attn_scalar"] == values["hidden_size"] // values["num_attention_heads"] == 16


def test_the_file_says_which_layers_have_a_window(tmp_path: Path) -> None:
    file = write_model(tmp_path, "cohere2", F32, lambda w: w.add_sliding_window_pattern(2)).file
    assert ModelConfig.load(make_folder(file)).sliding_windows == (11, 0, 11, 0)


def test_an_expert_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    def with_another(writer: GGUFWriter) -> None:
        writer.add_tensor("blk.0.ffn_up.1.weight", np.zeros((256, 256), np.float32))

    file = write_model(tmp_path, "mixtral", F32, with_another).file
    assert refusal(lambda: make_folder(file)) == (
        f"{file}: the tensors blk.0.ffn_up_exps.weight and blk.0.ffn_up.1.weight are both "
        "model.layers.0.block_sparse_moe.experts.1.w3.weight of the model"
    )


def test_an_unknown_architecture_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "x.gguf", "mamba2")
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write()
    writer.close()
    assert refusal(lambda: make_folder(tmp_path / "x.gguf")) == (
        f"{tmp_path}/x.gguf: general.architecture 'mamba2' is not supported in GGUF files; these are: "
        f"{', '.join(ARCHITECTURES)}"
    )
