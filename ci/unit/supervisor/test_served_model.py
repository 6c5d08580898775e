"""Several models on a command line, and what of the machine each gets."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from inflight.config import EngineConfig
from inflight.errors import ConfigurationError
from inflight.hub.model_name import ModelName
from inflight.model_config import parse
from inflight.openai_options import OpenAIOptions
from inflight.supervisor import apis, installation, plan, shares
from inflight.supervisor.options import ServeOptions
from inflight.supervisor.served_model import ServedModel, choose_name, of_arguments, split_name
from inflight.supervisor.several_models import write_several

ENGINE = """
backend: "inflight"
input { name: "input_ids" data_type: TYPE_INT32 dims: [-1] }
input { name: "max_tokens" data_type: TYPE_INT32 dims: [1] }
parameters { key: "gpt_model_path" value { string_value: "checkpoint" } }
parameters { key: "max_batch_size" value { string_value: "8" } }
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    for name, text in (("llm", ENGINE), ("ensemble", 'backend: "python"')):
        (tmp_path / "source" / name / "1").mkdir(parents=True)
        (tmp_path / "source" / name / "config.pbtxt").write_text(text)
    return tmp_path / "source"


def make_checkpoint(folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    (folder / "model.safetensors").write_bytes(b"weights")
    (folder / "tokenizer.json").write_text("{}")
    return folder


def refused(*texts: str, **options: object) -> str:
    with pytest.raises(ConfigurationError) as caught:
        of_arguments(texts, **options)  # type: ignore[arg-type]
    return str(caught.value)


class TestNames:
    @pytest.mark.parametrize(
        ("text", "found"),
        [
            ("chat=org/name", ("chat", "org/name")),
            ("chat=/models/a=b", ("chat", "/models/a=b")),
            ("/models/a=b", ("", "/models/a=b")),
            ("org/name:Q4_K_M", ("", "org/name:Q4_K_M")),
        ],
    )
    def test_a_name_stands_before_the_first_equals_sign(self, text: str, found: tuple[str, str]) -> None:
        assert split_name(text) == found

    @pytest.mark.parametrize(
        ("model", "name"),
        [
            ("org/Small-1.5B", "Small-1.5B"),
            ("org/small:Q4_K_M@main", "small"),
            ("/models/small/", "small"),
            ("/models/Small-Q8_0.gguf", "Small-Q8_0"),
        ],
    )
    def test_without_one_it_is_the_models_own(self, model: str, name: str) -> None:
        assert choose_name(model) == name

    def test_clients_may_ask_by_the_name_on_the_hub(self) -> None:
        model, folder = of_arguments(["org/small", "b=/models/b"])
        assert isinstance(model.checkpoint, ModelName) and model.client_names == ["small", "org/small"]
        assert folder == ServedModel(name="b", checkpoint=Path("/models/b")) and folder.client_names == ["b"]

    def test_what_is_wrong_is_one_sentence(self) -> None:
        assert refused("/a/m", "/b/m") == "two models are called m: write OTHER=/a/m for one of them"
        assert "cannot be called '.hidden'" in refused("/a/.hidden")
        assert refused("a=/a", "b=/b", shares={"c": "2"}) == "--share names the model c, and there are a, b"
        assert refused("a=/a", "b=/b", shares={"a": "-1"}) == "--share a=-1: a share is a number above 0"
        assert refused("a=/a", parameters={"x": {}}) == "--set names the model x, and there are a"
        assert "--pin is for servers with --load-on-demand" in refused("a=/a", "b=/b", pinned=["a"])

    def test_all_but_the_pinned_are_loaded_on_demand(self) -> None:
        models = of_arguments(["a=/a", "b=/b"], on_demand=True, pinned=["b"])
        assert [model.is_on_demand for model in models] == [True, False]


class TestCores:
    @pytest.mark.parametrize(
        ("cores", "weights", "threads"),
        [
            (2, {"a": 1, "b": 1}, {"a": 1, "b": 1}),
            (8, {"a": 1, "b": 1}, {"a": 4, "b": 4}),
            (8, {"a": 3, "b": 1}, {"a": 6, "b": 2}),
            (9, {"a": 1, "b": 1}, {"a": 5, "b": 4}),
            (4, {"a": 1000, "b": 1}, {"a": 3, "b": 1}),
        ],
    )
    def test_all_are_given_and_none_twice(self, cores: int, weights: dict[str, float], threads: dict[str, int]) -> None:
        assert shares.share_cores(dict.fromkeys(weights, EngineConfig()), weights, cores) == threads

    def test_ranks_of_an_engine_have_equal_parts(self) -> None:
        engines = {"a": EngineConfig(tensor_parallel_size=2), "b": EngineConfig()}
        assert shares.share_cores(engines, {"a": 1, "b": 1}, 7) == {"a": 2, "b": 3}

    def test_what_is_configured_stays(self) -> None:
        engines = {"a": EngineConfig(num_threads=5), "b": EngineConfig()}
        assert shares.share_cores(engines, {"a": 1, "b": 1}, 8) == {"a": 5, "b": 3}

    def test_no_engine_without_a_core(self) -> None:
        engines = {"a": EngineConfig(num_threads=2), "b": EngineConfig(data_parallel_size=2)}
        with pytest.raises(ConfigurationError, match=r"2 engines need 4 cores \(a 2, b 2\) and there are 3: serve"):
            shares.share_cores(engines, {"a": 1, "b": 1}, 3)

    def test_more_on_demand_than_cores_are_planned_one_at_a_time(self) -> None:
        engines = {name: EngineConfig() for name in "abcd"} | {"d": EngineConfig(tensor_parallel_size=2)}
        weights = dict.fromkeys(engines, 1.0)
        assert shares.share_cores(engines, weights, 8, frozenset("bcd")) == {"a": 2, "b": 2, "c": 2, "d": 1}
        assert shares.share_cores(engines, weights, 4, frozenset("bcd")) == {"a": 2, "b": 2, "c": 2, "d": 1}
        with pytest.raises(ConfigurationError, match=r"need 3 cores \(a 1, d 2\) and there are 2"):
            shares.share_cores(engines, weights, 2, frozenset("bcd"))

    def test_ranks_that_run_elsewhere_take_none(self) -> None:
        engines = {"a": EngineConfig(executor="external"), "b": EngineConfig()}
        assert shares.share_cores(engines, {"a": 1, "b": 1}, 3) == {"b": 3}


class TestMemory:
    @pytest.fixture
    def engines(self, tmp_path: Path) -> dict[str, EngineConfig]:
        engines = {}
        for name, gib in (("a", 1), ("b", 2), ("c", 3)):
            folder = tmp_path / name
            folder.mkdir()
            with open(folder / "model.safetensors", "wb") as file:
                file.truncate(gib * 2**30)  # with no blocks on the disk
            engines[name] = EngineConfig(gpt_model_path=str(folder), device="cpu")
        return engines

    def test_all_weights_must_fit(self, engines: dict[str, EngineConfig]) -> None:
        shares.check_memory(engines, available=6 * 2**30)
        with pytest.raises(ConfigurationError) as caught:
            shares.check_memory(engines, available=5 * 2**30)
        assert str(caught.value) == (
            "the weights of the models take 6.00 GiB (a 1.00 GiB, b 2.00 GiB, c 3.00 GiB) and 5.00 GiB of memory are "
            "available: serve fewer of them, or smaller ones"
        )

    def test_of_those_on_demand_the_largest_must(self, engines: dict[str, EngineConfig]) -> None:
        on_demand = frozenset(("b", "c"))
        shares.check_memory(engines, on_demand, available=4 * 2**30)
        with pytest.raises(ConfigurationError, match=r"take 4\.00 GiB \(a 1\.00 GiB, c 3\.00 GiB\)"):
            shares.check_memory(engines, on_demand, available=3 * 2**30)

    def test_the_parts_of_all_are_at_most_the_whole(self) -> None:
        parts = shares.share_memory({"a": 1, "b": 1, "c": 1, "d": 1e-9})
        assert sum(parts.values()) <= 1 + 1e-4 and parts["a"] == parts["b"] == 0.3333
        assert all(EngineConfig(memory_share=part).memory_share == part for part in parts.values())


class TestRepository:
    def models(self, tmp_path: Path, **options: object) -> tuple[ServedModel, ...]:
        folders = [make_checkpoint(tmp_path / name) for name in ("first", "second")]
        return of_arguments([f"one={folders[0]}", str(folders[1])], **options)  # type: ignore[arg-type]

    @pytest.fixture(autouse=True)
    def eight_cores(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(shares.os, "sched_getaffinity", lambda _: set(range(8)))

    def test_each_has_the_engines_tensors_under_its_name(self, source: Path, tmp_path: Path) -> None:
        models = self.models(tmp_path, shares={"one": "3"}, parameters={"second": {"max_batch_size": "4"}})
        served = write_several(
            source, tmp_path / "target", models, parameters={"max_seq_len": "64"}, api_models={}, fetch=_nothing
        )
        assert (served.models, served.engine, served.attached) == (("one", "second", "ensemble"), "one", {})
        assert served.answering == ("one", "second")
        rows = (("one", "first", "8", "6", "0.75"), ("second", "second", "4", "2", "0.25"))
        for name, folder, batch, threads, memory in rows:
            config = parse((served.path / name / "config.pbtxt").read_text(), Path(name))
            values = {key: value.string_value for key, value in config.parameters.items()}
            assert config.name == name and config.backend == "inflight"
            assert values["gpt_model_path"] == str(tmp_path / folder) and values["max_seq_len"] == "64"
            assert (values["max_batch_size"], values["num_threads"], values["memory_share"]) == (batch, threads, memory)
            assert served.configs[name].num_threads == int(threads)

    def test_apis_are_the_first_models(self, source: Path, tmp_path: Path) -> None:
        found = apis.choose(["vllm"], installation.find_apis())
        served = write_several(
            source, tmp_path / "target", self.models(tmp_path), parameters={}, api_models=found, fetch=_nothing
        )
        assert served.attached == {"vllm_model": "one"} and served.attached_to("one") == ("vllm_model",)

    def test_an_api_may_be_another_models(self, source: Path, tmp_path: Path) -> None:
        found = apis.choose(["vllm", "second:embedding-unary"], installation.find_apis(), ["one", "second"])
        served = write_several(
            source, tmp_path / "target", self.models(tmp_path), parameters={}, api_models=found, fetch=_nothing
        )
        assert served.attached == {"vllm_model": "one", "embedding": "second", "rerank": "second"}
        configs = {name: parse((served.path / name / "config.pbtxt").read_text(), Path(name)) for name in found}
        assert {name: config.parameters["engine"].string_value for name, config in configs.items()} == served.attached

    @pytest.mark.parametrize(
        ("names", "engines", "sentence"),
        [
            (["third:vllm"], ["one", "second"], "--api third:vllm names the model third, and there are one, second"),
            (["one:vllm"], [], "names the model one, and there is one without a name: serve NAME=MODEL"),
            (["one:vlm"], ["one"], "--api has no 'vlm': did you mean vllm"),
            (["one:vllm", "second:vllm"], ["one", "second"], "--api one:vllm and second:vllm both have a model vllm_"),
        ],
    )
    def test_an_api_that_is_no_models(self, names: list[str], engines: list[str], sentence: str) -> None:
        with pytest.raises(ConfigurationError, match=sentence):
            apis.choose(names, installation.find_apis(), engines)

    def test_no_model_takes_the_name_of_another_one(self, source: Path, tmp_path: Path) -> None:
        models = of_arguments([f"ensemble={make_checkpoint(tmp_path / 'x')}"])
        with pytest.raises(ConfigurationError, match="cannot be called ensemble here"):
            write_several(source, tmp_path / "target", models, parameters={}, api_models={}, fetch=_nothing)
        assert not (tmp_path / "target").exists()

    def test_settings_are_of_all_models_or_of_one(self, source: Path, tmp_path: Path) -> None:
        models = self.models(tmp_path, settings={"second": {"embedding_pooling": "cls", "served_model_names": "x,y"}})
        served = write_several(source, tmp_path / "target", models, parameters={}, api_models={}, fetch=_nothing)
        one, second = plan._model_options(models, OpenAIOptions(tool_parser="hermes"), served)
        assert (one.tool_parser, one.embedding_pooling, one.served_model_names) == ("hermes", "", ["one"])
        assert (second.tool_parser, second.embedding_pooling, second.served_model_names) == (
            "hermes",
            "cls",
            ["x", "y"],
        )
        whole = OpenAIOptions(models=[one, second], port=1)
        assert [each.engine for each in whole.of_each()] == ["one", "second"]
        assert [each.model_names for each in whole.of_each()] == [["one"], ["x", "y"]]
        assert {each.port for each in whole.of_each()} == {1}

    @pytest.mark.parametrize(
        ("settings", "options", "words"),
        [
            ({"second": {"served_model_names": "one"}}, {}, "two models are called one for clients"),
            ({"second": {"max_body_bytes": "5"}}, {}, "max_body_bytes is of the whole server, not of the model second"),
            ({}, {"served_model_names": ["x"]}, "set MODEL:served_model_names"),
        ],
    )
    def test_wrong_settings_are_one_sentence(
        self, source: Path, tmp_path: Path, settings: dict[str, dict[str, str]], options: dict[str, object], words: str
    ) -> None:
        models = self.models(tmp_path, settings=settings)
        served = write_several(source, tmp_path / "target", models, parameters={}, api_models={}, fetch=_nothing)
        with pytest.raises(ConfigurationError, match=words):
            plan._model_options(models, OpenAIOptions(**options), served)  # type: ignore[arg-type]


def test_tritonserver_loads_all_at_the_start(tmp_path: Path) -> None:
    models = of_arguments(["a=/a", "b=/b"], on_demand=True)
    with (
        pytest.raises(ConfigurationError, match="by inflight openai alone"),
        plan.make_plan(ServeOptions(models=models), print),
    ):
        pass


def _nothing(*_: object) -> Path:
    raise AssertionError("no model is named")
