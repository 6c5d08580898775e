"""The repository that is served: parameters replaced in a private copy, everything else linked, mistakes in words."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from inflight.errors import ConfigurationError
from inflight.hub.model_name import ModelName
from inflight.supervisor import apis, installation, repository

ENGINE = """
name: "llm"
backend: "inflight"
# a comment
parameters { key: "gpt_model_path" value { string_value: "checkpoint" } }
parameters { key: "max_batch_size" value { string_value: "8" } }
parameters { key: "dtype" value { string_value: "" } }
"""
CALLER = """
name: "ensemble"
backend: "python"
parameters { key: "model" value { string_value: "llm" } }
"""


def make_checkpoint(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    (folder / "model.safetensors").write_bytes(b"weights")
    (folder / "tokenizer.json").write_text("{}")
    return folder


@pytest.fixture
def source(tmp_path: Path) -> Path:
    for name, text in {"llm": ENGINE, "ensemble": CALLER}.items():
        (tmp_path / "source" / name / "1").mkdir(parents=True)
        (tmp_path / "source" / name / "config.pbtxt").write_text(text)
    make_checkpoint(tmp_path / "source" / "llm" / "1" / "checkpoint")
    return tmp_path / "source"


def served_parameters(served: repository.ServedRepository) -> dict[str, str]:
    config = repository.read(served.path)["llm"]
    return {key: value.string_value for key, value in config.parameters.items()}


def test_nothing_to_replace_serves_the_repository_as_it_is(source: Path, tmp_path: Path) -> None:
    served = repository.write(source, tmp_path / "target")
    assert (served.path / "llm" / "config.pbtxt").read_text() == ENGINE
    assert served.models == ("llm", "ensemble")
    assert served.engine == "llm"
    assert served.config is not None
    assert served.config.max_batch_size == 8


def test_only_an_engine_whose_inputs_are_known_can_be_asked(source: Path, tmp_path: Path) -> None:
    assert repository.write(source, tmp_path / "unknown").answering == ()
    inputs = "".join(
        f'input {{ name: "{name}" data_type: TYPE_INT32 dims: [ 1 ] }}\n' for name in ("input_ids", "max_tokens")
    )
    (source / "llm" / "config.pbtxt").write_text(ENGINE + inputs)
    (source / "ensemble" / "config.pbtxt").write_text(CALLER + inputs)
    assert repository.write(source, tmp_path / "known").answering == ("llm",)


def test_overrides_reach_the_engine_alone_and_the_original_stays(source: Path, tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "other")
    parameters = {"tensor_parallel_size": "2", "max_batch_size": "4"}
    served = repository.write(source, tmp_path / "target", checkpoint_folder=checkpoint, parameters=parameters)
    assert served_parameters(served) == {
        "gpt_model_path": str(checkpoint),
        "max_batch_size": "4",
        "dtype": "auto",
        "max_loras": "",
        "lora_dir": "",
        "tensor_parallel_size": "2",
    }
    assert (source / "llm" / "config.pbtxt").read_text() == ENGINE
    assert (served.path / "ensemble" / "config.pbtxt").read_text() == CALLER
    assert (served.path / "llm" / "1").resolve() == source / "llm" / "1"
    assert served.config is not None
    assert served.config.tensor_parallel_size == 2


def test_a_quoted_value_survives(source: Path, tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / 'a "quoted" \\ näme')
    served = repository.write(source, tmp_path / "target", checkpoint_folder=checkpoint)
    assert served_parameters(served)["gpt_model_path"] == str(checkpoint)


@pytest.mark.parametrize(
    ("parameters", "sentence"),
    [
        ({"max_batch_sise": "4"}, "did you mean max_batch_size"),
        ({"max_batch_size": "many"}, "max_batch_size must be a whole number"),
        ({"tokens_per_block": "24"}, "power of two"),
    ],
)
def test_a_wrong_parameter_is_told_before_anything_starts(
    source: Path, tmp_path: Path, parameters: dict[str, str], sentence: str
) -> None:
    with pytest.raises(ConfigurationError, match=sentence):
        repository.write(source, tmp_path / "target", parameters=parameters)


def test_a_repository_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="is not a folder"):
        repository.write(tmp_path / "nowhere", tmp_path / "target")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigurationError, match="is not a model repository"):
        repository.write(tmp_path / "empty", tmp_path / "target")


def test_a_broken_config_names_file_and_line(source: Path, tmp_path: Path) -> None:
    (source / "llm" / "config.pbtxt").write_text('name: "llm"\nbackend = 3\n')
    with pytest.raises(ConfigurationError, match=r"config\.pbtxt cannot be read: line 2"):
        repository.write(source, tmp_path / "target")


def test_parameters_without_an_engine_have_no_target(source: Path, tmp_path: Path) -> None:
    (source / "llm" / "config.pbtxt").write_text('name: "llm"\nbackend: "python"\n')
    assert repository.write(source, tmp_path / "as-is").config is None
    with pytest.raises(ConfigurationError, match="0 models of backend inflight"):
        repository.write(source, tmp_path / "target", parameters={"max_batch_size": "4"})


class TestModelsByName:
    """What is fetched stands in a list: the hub has tests of its own."""

    @pytest.fixture
    def fetched(self, tmp_path: Path) -> list[tuple[str, str]]:
        """(name, the tensor_parallel_size of the engine that it is for)."""
        self.folder = make_checkpoint(tmp_path / "cache")
        return []

    def write(
        self, source: Path, target: Path, fetched: list[tuple[str, str]], **options: Any
    ) -> repository.ServedRepository:
        def fetch(model: ModelName, parameters: Mapping[str, str]) -> Path:
            fetched.append((str(model), parameters.get("tensor_parallel_size", "")))
            return self.folder

        return repository.write(source, target, fetch=fetch, **options)

    def test_one_on_the_command_line(self, source: Path, tmp_path: Path, fetched: list[tuple[str, str]]) -> None:
        name = ModelName("meta-llama/Llama-3.1-8B", "v2")
        served = self.write(
            source,
            tmp_path / "target",
            fetched,
            checkpoint_folder=name,
            parameters={"tensor_parallel_size": "2"},
        )
        parameters = served_parameters(served)
        assert fetched == [("meta-llama/Llama-3.1-8B@v2", "2")]
        assert parameters["gpt_model_path"] == str(self.folder) and parameters["dtype"] == "auto"
        assert served.fetched == {"meta-llama/Llama-3.1-8B@v2": str(self.folder)}

    def test_one_in_config_pbtxt(self, source: Path, tmp_path: Path, fetched: list[tuple[str, str]]) -> None:
        (source / "llm" / "config.pbtxt").write_text(ENGINE.replace('"checkpoint"', '"org/model"'))
        served = self.write(source, tmp_path / "target", fetched)
        assert served.config is not None and served.config.gpt_model_path == str(self.folder)
        assert [name for name, _ in fetched] == ["org/model"]

    def test_a_parameter_goes_first(self, source: Path, tmp_path: Path, fetched: list[tuple[str, str]]) -> None:
        parameters = {"gpt_model_path": "org/model@main"}
        assert self.write(source, tmp_path / "target", fetched, parameters=parameters).fetched.keys() == {"org/model"}

    def test_a_folder_of_that_name_goes_first(
        self, source: Path, tmp_path: Path, fetched: list[tuple[str, str]]
    ) -> None:
        folder = make_checkpoint(source / "llm" / "1" / "org" / "model")
        (source / "llm" / "config.pbtxt").write_text(ENGINE.replace('"checkpoint"', '"org/model"'))
        served = self.write(source, tmp_path / "target", fetched)
        assert served.config is not None and served.config.gpt_model_path == str(folder)
        assert fetched == []

    def test_ranks_that_others_start_read_a_folder(
        self, source: Path, tmp_path: Path, fetched: list[tuple[str, str]]
    ) -> None:
        with pytest.raises(ConfigurationError, match=r"printed by hf download org/model --revision v2$"):
            self.write(
                source,
                tmp_path / "target",
                fetched,
                parameters={"gpt_model_path": "org/model@v2", "executor": "external"},
            )
        assert fetched == []


class TestCheckpoint:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        return make_checkpoint(tmp_path / "checkpoint")

    def refusal(self, source: Path, folder: Path, tmp_path: Path) -> str:
        with pytest.raises(ConfigurationError) as caught:
            repository.write(source, tmp_path / "target", checkpoint_folder=folder)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    def test_no_folder(self, source: Path, tmp_path: Path) -> None:
        assert "is not a folder" in self.refusal(source, tmp_path / "nowhere", tmp_path)

    def test_no_config(self, source: Path, folder: Path, tmp_path: Path) -> None:
        (folder / "config.json").unlink()
        assert "it has no config.json" in self.refusal(source, folder, tmp_path)

    @pytest.mark.parametrize(
        ("text", "sentence"),
        [
            ("{", "cannot be read"),
            ("[" * 100_000, "cannot be read: it is nested too deeply"),
            ("[]", "JSON object"),
            ("{}", "names no"),
        ],
    )
    def test_a_config_that_is_none(self, source: Path, folder: Path, tmp_path: Path, text: str, sentence: str) -> None:
        (folder / "config.json").write_text(text)
        assert sentence in self.refusal(source, folder, tmp_path)

    @pytest.mark.parametrize(
        "name", ["config.json", "tokenizer.json", "model.safetensors", "additional_chat_templates/a.jinja"]
    )
    def test_what_is_no_file_is_not_opened(self, source: Path, folder: Path, tmp_path: Path, name: str) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).parent.mkdir(exist_ok=True)
        os.mkfifo(folder / name)
        assert self.refusal(source, folder, tmp_path) == f"{folder / name} is a FIFO where a file is expected"

    def test_nor_in_the_tokenizers_folder(self, source: Path, folder: Path, tmp_path: Path) -> None:
        elsewhere = tmp_path / "elsewhere"
        elsewhere.mkdir()
        os.mkfifo(elsewhere / "tokenizer.json")
        with pytest.raises(ConfigurationError, match=r"elsewhere/tokenizer\.json is a FIFO where a file is expected"):
            parameters = {"tokenizer_dir": str(elsewhere)}
            repository.write(source, tmp_path / "target", checkpoint_folder=folder, parameters=parameters)

    def test_weights_of_another_format(self, source: Path, folder: Path, tmp_path: Path) -> None:
        (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
        assert "no safetensors weights, only pytorch_model.bin" in self.refusal(source, folder, tmp_path)

    def test_a_missing_shard(self, source: Path, folder: Path, tmp_path: Path) -> None:
        shards = {"a": "model.safetensors", "b": "model-00002-of-00002.safetensors"}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
        assert "1 of 2 shards missing (model-00002-of-00002" in self.refusal(source, folder, tmp_path)

    def test_no_tokenizer(self, source: Path, folder: Path, tmp_path: Path) -> None:
        (folder / "tokenizer.json").unlink()
        (folder / "tokenizer_config.json").write_text("{}")
        refusal = self.refusal(source, folder, tmp_path)
        assert (
            refusal.startswith(f"{folder} has no tokenizer.json") and "copy it there, or set tokenizer_dir" in refusal
        )

    @pytest.mark.parametrize("name", ["tokenizer.model", "spiece.model", "vocab.json", "vocab.txt"])
    def test_other_tokenizers_are_left_to_the_server(
        self, source: Path, folder: Path, tmp_path: Path, name: str
    ) -> None:
        (folder / "tokenizer.json").rename(folder / name)
        assert repository.write(source, tmp_path / "target", checkpoint_folder=folder).config

    def test_adapters_that_are_nowhere(self, source: Path, folder: Path, tmp_path: Path) -> None:
        parameters = {"max_loras": "2", "lora_dir": str(tmp_path / "nowhere")}
        with pytest.raises(ConfigurationError, match=f"lora_dir: {tmp_path}/nowhere is not a folder"):
            repository.write(source, tmp_path / "target", checkpoint_folder=folder, parameters=parameters)

    def test_a_tokenizer_elsewhere_is_the_remedy(self, source: Path, folder: Path, tmp_path: Path) -> None:
        elsewhere = tmp_path / "elsewhere"
        elsewhere.mkdir()
        (folder / "tokenizer.json").rename(elsewhere / "tokenizer.json")
        parameters = {"tokenizer_dir": str(elsewhere)}
        assert repository.write(source, tmp_path / "target", checkpoint_folder=folder, parameters=parameters).config

    @pytest.mark.parametrize("key", ["moe_expert_parallel_size", "pipeline_parallel_size"])
    def test_ranks_of_code_that_shares_layers_alone(self, source: Path, folder: Path, tmp_path: Path, key: str) -> None:
        """Layers are split as the class says, which the ranks look at."""
        parameters = {"model_impl": "transformers", "tensor_parallel_size": "2"}
        assert repository.write(source, tmp_path / "one", checkpoint_folder=folder, parameters=parameters).config
        with pytest.raises(ConfigurationError, match=f"{key} is for native layers: set it to 1, or model_impl to auto"):
            repository.write(source, tmp_path / "two", checkpoint_folder=folder, parameters={**parameters, key: "2"})

    @pytest.mark.parametrize(
        ("changes", "num_ranks", "sentence"),
        [
            ({}, 3, "tensor_parallel_size 3 does not divide the checkpoint's num_attention_heads (16)"),
            ({"num_attention_heads": 12}, 3, "3 does not divide the checkpoint's num_key_value_heads (4)"),
            ({"intermediate_size": 66}, 4, "4 does not divide the checkpoint's intermediate_size (66)"),
            ({"moe_intermediate_size": 42}, 4, "4 does not divide the checkpoint's moe_intermediate_size (42)"),
            ({"intermediate_size": 66, "moe_intermediate_size": 44}, 4, ""),
            ({}, 8, ""),
            ({}, 16, ""),
            ({"num_attention_heads": "many", "num_key_value_heads": None}, 3, ""),
        ],
    )
    def test_ranks_that_cannot_share_it(
        self, source: Path, folder: Path, tmp_path: Path, changes: dict[str, object], num_ranks: int, sentence: str
    ) -> None:
        values = {"num_attention_heads": 16, "num_key_value_heads": 4, "intermediate_size": 48, **changes}
        (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], **values}))
        parameters = {"tensor_parallel_size": str(num_ranks)}
        target = tmp_path / "target"
        if not sentence:
            served = repository.write(source, target, checkpoint_folder=folder, parameters=parameters)
            assert served.config is not None
            return
        with pytest.raises(ConfigurationError) as caught:
            repository.write(source, target, checkpoint_folder=folder, parameters=parameters)
        assert sentence in str(caught.value) and str(caught.value).endswith("choose another one")

    def test_ranks_that_have_whole_experts_share_attention(self, source: Path, folder: Path, tmp_path: Path) -> None:
        """Whether they can share the rest they find out themselves."""
        values = {"architectures": ["MixtralForCausalLM"], "intermediate_size": 66, "moe_intermediate_size": 42}
        parameters = {"tensor_parallel_size": "4", "moe_expert_parallel_size": "4"}

        def write(num_heads: int) -> None:
            (folder / "config.json").write_text(json.dumps({"num_attention_heads": num_heads, **values}))
            target = tmp_path / str(num_heads)
            repository.write(source, target, checkpoint_folder=folder, parameters=parameters)

        write(8)
        with pytest.raises(ConfigurationError, match=r"4 does not divide the checkpoint's num_attention_heads \(6\)"):
            write(6)

    def test_more_stages_than_layers(self, source: Path, folder: Path, tmp_path: Path) -> None:
        values = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 3}
        (folder / "config.json").write_text(json.dumps(values))

        def write(num_stages: int) -> None:
            parameters = {"pipeline_parallel_size": str(num_stages)}
            repository.write(source, tmp_path / str(num_stages), checkpoint_folder=folder, parameters=parameters)

        write(3)
        with pytest.raises(
            ConfigurationError, match="pipeline_parallel_size 4 is more than the checkpoint's 3 layers;"
        ):
            write(4)


class TestApis:
    def write(self, source: Path, target: Path, *names: str) -> repository.ServedRepository:
        return repository.write(source, target, api_models=apis.choose(names, installation.find_apis()))

    def test_models_of_an_api_stand_beside_the_engine(self, source: Path, tmp_path: Path) -> None:
        (source / "ensemble").rename(tmp_path / "away")
        (source / "llm").rename(source / "mine")
        (source / "mine" / "config.pbtxt").write_text(ENGINE.replace('"llm"', '"mine"'))
        served = self.write(source, tmp_path / "target", "vllm", "tensorrtllm")
        streaming = ("ensemble", "tensorrt_llm", "tensorrt_llm_bls", "vllm_model")
        names = (*streaming, "preprocessing", "postprocessing")
        assert (served.models, served.engine, sorted(served.attached)) == (("mine",), "mine", sorted(names))
        assert sorted(served.attached_to("mine")) == sorted(names)
        for name in names:
            config = repository.read(served.path)[name]
            assert config.parameters["engine"].string_value == "mine"
            assert config.model_transaction_policy.decoupled == (name in streaming)
            assert (served.path / name / "1").is_dir()

    def test_unary_models(self, source: Path, tmp_path: Path) -> None:
        served = self.write(source, tmp_path / "target", "vllm-unary", "unary")
        configs = repository.read(served.path)
        assert not configs["vllm_model"].model_transaction_policy.decoupled
        assert not configs["llm_unary"].model_transaction_policy.decoupled

    @pytest.mark.parametrize(
        ("names", "sentence"),
        [
            (("vlm",), "did you mean vllm"),
            (("x",), "there are embedding, llmapi, tensorrtllm, unary, vllm"),
            (("vllm", "vllm-unary"), "both have a model vllm_model"),
            (("tensorrtllm", "llmapi"), "both have a model tensorrt_llm"),
            (("tensorrtllm",), "has a model ensemble already"),
        ],
    )
    def test_wrong_apis(self, source: Path, tmp_path: Path, names: tuple[str, ...], sentence: str) -> None:
        with pytest.raises(ConfigurationError, match=sentence):
            self.write(source, tmp_path / "target", *names)

    def test_an_ensemble_of_dialect_models_is_loaded_after_them(self, source: Path, tmp_path: Path) -> None:
        for name, step in (("outer", "inner"), ("inner", "vllm_model"), ("other", "llm")):
            (source / name / "1").mkdir(parents=True)
            text = f'name: "{name}" platform: "ensemble" ensemble_scheduling {{ step [ {{ model_name: "{step}" }} ] }}'
            (source / name / "config.pbtxt").write_text(text)
        served = self.write(source, tmp_path / "target", "vllm")
        assert list(served.attached.items()) == [("vllm_model", "llm"), ("inner", "llm"), ("outer", "llm")]
        assert served.models[0] == "llm" and {"other", "ensemble"} == set(served.models[1:])

    def test_a_dialect_model_of_a_repository_of_ones_own(self, source: Path, tmp_path: Path) -> None:
        ours = CALLER.replace("python", "inflight").replace('"model"', '"engine"')
        (source / "ensemble" / "config.pbtxt").write_text(ours)
        served = repository.write(source, tmp_path / "target", parameters={"max_batch_size": "4"})
        assert (served.models, served.attached) == (("llm",), {"ensemble": "llm"})
        (source / "ensemble" / "config.pbtxt").write_text(ours.replace('"llm"', '"other"'))
        with pytest.raises(ConfigurationError, match="names the engine other"):
            repository.write(source, tmp_path / "wrong")
