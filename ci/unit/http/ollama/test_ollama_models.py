"""How the real `ollama` package sees the models of the server: their list, what runs, what each can do."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import ollama
import pytest
import torch
from openai_server import CLIENT, TEMPLATE, PlayedEngine, Running, checkpoint_folder, openai_server
from safetensors.torch import save_file

from inflight.config import EngineConfig
from inflight.engine_description import EngineDescription
from inflight.generation_defaults import GenerationDefaults
from inflight.http.dialects.ollama.models import as_size
from inflight.output_config import SCORES
from inflight.scheduler_output import HIDDEN_STATES

CONFIG = {
    "model_type": "qwen3",
    "num_hidden_layers": 3,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
WEIGHTS = 1000
ADAPTER = "fox"


def folder_with(tmp_path: Path, config: dict[str, Any], **files: str) -> Path:
    """`files`: further ones, by name without its ending, .json."""
    folder = checkpoint_folder(tmp_path / "tiny")
    for name, text in {"config": json.dumps(config), **files}.items():
        (folder / f"{name}.json").write_text(text)
    (folder / "model.safetensors").write_bytes(b"w" * WEIGHTS)
    return folder


def shown(tmp_path: Path, **tensors: torch.Tensor) -> ollama.ShowResponse:
    """What is told of a checkpoint of these."""
    folder = folder_with(tmp_path, CONFIG)
    save_file(tensors, folder / "model.safetensors")
    with openai_server(engine(), folder) as url:
        return ollama.Client(host=url, trust_env=False).show("llm")


def engine(*, device: str = "cpu", **changes: Any) -> PlayedEngine:
    """`changes`: of its limits."""
    played = PlayedEngine()
    given = {"hidden_size": 64, "model_outputs": [HIDDEN_STATES], **changes}
    limits = msgspec.structs.replace(played.limits, **given)
    description = EngineDescription(device=device, architecture="Qwen3ForCausalLM", weight_dtype="bfloat16")
    played._replica_ready(limits, description, max_in_flight=0)
    played._generation_defaults = GenerationDefaults(temperature=0.6, repetition_penalty=1.1)
    return played


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    tmp_path = tmp_path_factory.mktemp("models")
    adapter = tmp_path / "adapters" / ADAPTER
    adapter.mkdir(parents=True)
    (adapter / "adapter_config.json").write_text("{}")
    folder, played = folder_with(tmp_path, CONFIG), engine()
    config = EngineConfig(gpt_model_path=str(folder), lora_dir=str(adapter.parent))
    settings: Any = {"tool_parser": "hermes", "reasoning_parser": "qwen3", "served_model_names": ["llm", "tiny"]}
    with openai_server(played, folder, config=config, **settings) as url:
        yield Running(url, played)


@pytest.fixture
def client(running: Running) -> Iterator[ollama.Client]:
    running.engine.ready = True
    client = ollama.Client(host=running.url, trust_env=False)
    yield client
    client._client.close()


def capabilities(tmp_path: Path, played: PlayedEngine, **files: str) -> list[str]:
    with openai_server(played, folder_with(tmp_path, CONFIG, **files)) as url:
        shown = CLIENT.post(f"{url}/api/show", json={"model": "llm"}).json()
    found: list[str] = shown["capabilities"]
    return found


def test_a_model_is_described_as_the_server_knows_it(client: ollama.Client) -> None:
    shown = client.show("llm:latest")
    assert shown.details is not None and shown.modelinfo is not None
    assert (shown.details.format, shown.details.family, shown.details.families) == ("safetensors", "qwen3", ["qwen3"])
    assert (shown.details.quantization_level, shown.details.parent_model) == ("bfloat16", "")
    assert shown.modelinfo == {
        "general.architecture": "qwen3",
        "general.basename": "tiny",
        "qwen3.context_length": 512,
        "qwen3.embedding_length": 64,
        "qwen3.vocab_size": 300,
        "qwen3.block_count": 3,
        "qwen3.feed_forward_length": 96,
        "qwen3.attention.head_count": 4,
        "qwen3.attention.head_count_kv": 2,
    }
    assert shown.capabilities == ["completion", "tools", "thinking"]
    assert dict(line.split() for line in (shown.parameters or "").splitlines()) == {
        "num_ctx": "512",
        "temperature": "0.6",
        "repeat_penalty": "1.1",
    }
    assert shown.modified_at == client.list().models[0].modified_at


def test_parameters_are_counted_where_each_has_a_number(tmp_path: Path) -> None:
    weights = {"a": torch.zeros(700, 1001, dtype=torch.bfloat16), "b": torch.zeros(1001), "ids": torch.arange(9)}
    of_file = shown(tmp_path / "a", **weights)
    assert of_file.details is not None and of_file.modelinfo is not None
    assert (of_file.details.parameter_size, of_file.modelinfo["general.parameter_count"]) == ("702K", 701 * 1001)
    codes = shown(tmp_path / "b", a=torch.zeros(8, 8), codes=torch.zeros(8, 8, dtype=torch.int32))
    assert codes.details is not None and codes.modelinfo is not None
    assert codes.details.parameter_size == ""
    assert "general.parameter_count" not in codes.modelinfo
    assert of_file.template == TEMPLATE


def test_numbers_of_parameters_are_written_as_ollama_does() -> None:
    counts = (12, 137_000, 22_566_000, 137_000_000, 7_615_616_512, 70_000_000_000)
    assert [as_size(count) for count in counts] == ["12", "137K", "22.57M", "137M", "7.6B", "70B"]


def test_an_adapter_names_the_model_that_it_changes(client: ollama.Client) -> None:
    shown = client.show(ADAPTER)
    assert shown.details is not None and shown.details.parent_model == "llm"
    assert [model.model for model in client.list().models] == ["llm", "tiny", ADAPTER]
    assert [model.model for model in client.ps().models] == ["llm", "tiny"], "which adapters are loaded is not known"


def test_what_runs_is_what_the_engine_serves_now(running: Running, client: ollama.Client) -> None:
    listed, (loaded, _) = client.list().models[0], client.ps().models
    assert (loaded.name, loaded.size, loaded.size_vram, loaded.context_length) == ("llm", WEIGHTS, 0, 512)
    assert (loaded.digest, loaded.details) == (listed.digest, listed.details)
    assert loaded.expires_at is not None and loaded.expires_at.year > 2100
    assert len(listed.digest or "") >= 12, "Ollama's command line shows so many characters of it, or ends"
    assert client.chat("llm", [{"role": "user", "content": "hi"}]).done
    running.engine.ready = False
    assert client.ps().models == []


def test_a_gpu_holds_the_weights(tmp_path: Path) -> None:
    with openai_server(engine(device="cuda"), folder_with(tmp_path, CONFIG)) as url:
        (model,) = CLIENT.get(f"{url}/api/ps").json()["models"]
    assert model["size_vram"] == model["size"] == WEIGHTS


def test_an_unknown_model_is_not_found_in_ollamas_words(client: ollama.Client) -> None:
    calls: list[Any] = [client.show, client.generate, client.chat, lambda name: client.embed(name, "a")]
    for call in calls:
        with pytest.raises(ollama.ResponseError) as caught:
            call("other")
        assert (caught.value.status_code, caught.value.error) == (404, "model 'other' not found")


def test_who_shows_a_model_must_name_it(running: Running) -> None:
    response = running.post("/api/show", {})
    assert (response.status_code, response.json()) == (400, {"error": "model is required"})
    assert running.post("/api/show", {"name": "llm"}).status_code == 200, "as older clients call it"


def test_the_version_is_three_numbers(running: Running) -> None:
    version = running.get("/api/version").json()["version"]
    assert [int(part) for part in version.split(".")] >= [0, 6, 4], "which editors ask for at least"


def test_a_model_calls_tools_or_thinks_only_if_both_sides_know_how(tmp_path: Path) -> None:
    assert capabilities(tmp_path, engine()) == ["completion"]


def test_a_model_is_one_of_embeddings_if_it_is_an_encoder_or_made_for_them(tmp_path: Path) -> None:
    assert capabilities(tmp_path / "a", engine(), modules="[]") == ["completion", "embedding"]
    assert capabilities(tmp_path / "b", engine(pooled="vectors")) == ["embedding"]
    assert capabilities(tmp_path / "c", engine(pooled="scores", num_labels=1)) == ["embedding"]
    assert capabilities(tmp_path / "d", engine(pooled="scores", num_labels=1, model_outputs=[SCORES])) == []


def test_an_encoder_reads_no_more_than_its_steps_take(tmp_path: Path) -> None:
    with openai_server(engine(pooled="vectors", max_input_len=40), folder_with(tmp_path, {})) as url:
        info = CLIENT.post(f"{url}/api/show", json={"model": "llm"}).json()["model_info"]
    assert info["Qwen3ForCausalLM.context_length"] == 40, "of a checkpoint that names no kind the class's name"


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("POST", "/api/pull", 404), ("DELETE", "/api/delete", 404), ("GET", "/api", 404), ("GET", "/api/chat", 405)],
)
def test_errors_at_every_path_have_ollamas_form(running: Running, method: str, path: str, status: int) -> None:
    response = CLIENT.request(method, running.url + path)
    assert response.status_code == status
    assert [*response.json()] == ["error"] and isinstance(response.json()["error"], str)
