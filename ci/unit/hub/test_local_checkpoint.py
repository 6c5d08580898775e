"""What names a model, on a command line, in config.pbtxt or in a program, becomes a folder."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from gguf_files import Q8_0, write_model
from loopback_hub import LoopbackHub

from inflight.config import EngineConfig
from inflight.errors import ConfigurationError
from inflight.executor.executor import resolve_config
from inflight.hub import local_checkpoint as module
from inflight.hub.client import Hub
from inflight.hub.local_checkpoint import check_config, local_checkpoint, with_local_checkpoint
from inflight.hub.model_name import shown_name
from inflight.models.config import ModelConfig
from inflight.supervisor.options import ServeOptions
from inflight.supervisor.plan import write_repository

ROOT = Path(__file__).resolve().parents[3]
CHECKPOINT = ROOT / "model_repository" / "llm" / "1" / "checkpoint"
NAME = "org/model"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LoopbackHub]:
    """Has the default model, which this process's environment finds there; no process checks its config.json."""
    with LoopbackHub() as running:
        running.publish(NAME, {path.name: path.read_bytes() for path in CHECKPOINT.iterdir()})
        here = Hub(endpoint=running.endpoint, cache=tmp_path / "hub", patience=0.0)
        monkeypatch.setattr(Hub, "of_environment", lambda: here)
        monkeypatch.setattr(module, "check_config", lambda *_: None)
        yield running


def test_a_path_stays_a_path(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nowhere", Path("./nowhere/at-all")):
        assert local_checkpoint(f"{path}/") == path
    assert with_local_checkpoint({"gpt_model_path": "checkpoint"}, tmp_path) == {"gpt_model_path": "checkpoint"}
    assert with_local_checkpoint({}, tmp_path) == {}


def test_a_name_is_fetched_for_the_command_line_for_config_pbtxt_and_for_programs(
    hub: LoopbackHub, tmp_path: Path
) -> None:
    folder = local_checkpoint(NAME)
    assert (folder / "model.safetensors").read_bytes() == (CHECKPOINT / "model.safetensors").read_bytes()
    assert with_local_checkpoint({"gpt_model_path": f" {NAME} ", "dtype": "auto"}, tmp_path) == {
        "gpt_model_path": str(folder),
        "dtype": "auto",
    }
    assert resolve_config(NAME, None).gpt_model_path == str(folder)
    assert resolve_config(None, EngineConfig(gpt_model_path=NAME)).gpt_model_path == str(folder)


def test_a_gguf_file_that_is_named_is_fetched_and_a_folder_is_made_of_it(
    hub: LoopbackHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("inflight.gguf.folder.cache_folder", lambda _: tmp_path / "made")
    (tmp_path / "made").mkdir()
    file = write_model(tmp_path, "llama", Q8_0).file
    name = "org/quantised:Q8_0"
    hub.publish("org/quantised", {"llama-Q8_0.gguf": file.read_bytes(), "llama-F16.gguf": b""})
    folder = with_local_checkpoint({"gpt_model_path": name}, tmp_path)["gpt_model_path"]
    assert shown_name(folder) == "llama-Q8_0" and ModelConfig.load(folder).weight_format.quantized == "gguf"
    assert Path(folder, "model.gguf").read_bytes() == file.read_bytes()
    config = resolve_config(None, EngineConfig.from_parameters({"gpt_model_path": name}))
    assert config.gpt_model_path == config.tokenizer_dir == folder
    parameters = {"tokenizer_dir": str(CHECKPOINT)}
    options = ServeOptions(checkpoint=module.find_name(name), parameters=parameters)
    before = write_repository(options, tmp_path / "before", print)
    assert Path(before.fetched[name]).read_bytes() == file.read_bytes()
    hub.close()
    after = write_repository(options, tmp_path / "after", print, pinned=before.fetched)
    assert before.config is not None and after.config == before.config


def test_ranks_that_others_start_are_told_a_folder(hub: LoopbackHub, tmp_path: Path) -> None:
    parameters = {"gpt_model_path": NAME, "executor": "external"}
    with pytest.raises(ConfigurationError, match=r"^gpt_model_path: org/model is not a folder, and is not fetched by"):
        with_local_checkpoint(parameters, tmp_path)
    assert hub.asked == []


def test_who_adopts_a_server_means_the_files_that_it_has(hub: LoopbackHub, tmp_path: Path) -> None:
    """A supervisor that is started after another one was killed: the branch may have moved, the hub may be gone."""
    options = ServeOptions(checkpoint=module.find_name(NAME))
    before = write_repository(options, tmp_path / "before", print)
    hub.publish(NAME, {"config.json": b"{}"})
    hub.asked.clear()
    after = write_repository(options, tmp_path / "after", print, pinned=before.fetched)
    assert after.fetched == before.fetched and hub.asked == []
    texts = [(served.path / "llm" / "config.pbtxt").read_text() for served in (before, after)]
    assert texts[0] == texts[1] and before.fetched[NAME] in texts[0]


@pytest.mark.slow
def test_what_config_json_alone_shows(tmp_path: Path) -> None:
    """Of loading's own checks, in a process that has torch: this one needs none."""
    values = json.loads((CHECKPOINT / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(values | {"quantization_config": {"quant_method": "gptq"}}))
    with pytest.raises(ConfigurationError) as caught:
        check_config(tmp_path, {"max_batch_size": "4"})
    assert str(caught.value).startswith(f"{tmp_path}/config.json: ") and "gptq" in str(caught.value)
    assert "\n" not in str(caught.value)
    (tmp_path / "config.json").write_text(json.dumps(values))
    check_config(tmp_path, {"max_batch_size": "4"})
