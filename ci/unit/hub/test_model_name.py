"""How a name is told from a path, and which name a folder has for people."""

from __future__ import annotations

from pathlib import Path

import pytest

from inflight.hub.model_name import ModelName, find_name, shown_name

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("Qwen/Qwen3-0.6B", ModelName("Qwen/Qwen3-0.6B", "main")),
        ("Qwen/Qwen3-0.6B@refs/pr/1", ModelName("Qwen/Qwen3-0.6B", "refs/pr/1")),
        (f"Qwen/Qwen3-0.6B@{COMMIT}", ModelName("Qwen/Qwen3-0.6B", COMMIT)),
        ("org/model@main", ModelName("org/model")),
        ("org/model:Q4_K_M", ModelName("org/model", gguf="Q4_K_M")),
        (f"org/model:Q4_K_M@{COMMIT}", ModelName("org/model", COMMIT, "Q4_K_M")),
        ("org/model/x-Q8_0.gguf", ModelName("org/model", gguf="x-Q8_0.gguf")),
        ("org/model/Q8_0/x.gguf@v2", ModelName("org/model", "v2", "Q8_0/x.gguf")),
    ],
)
def test_a_name(text: str, name: ModelName) -> None:
    assert ModelName.parse(text) == name
    assert ModelName.parse(str(name)) == name
    assert name.is_pinned == (name.revision == COMMIT)


@pytest.mark.parametrize(
    "text",
    ["", "checkpoint", "./org/model", "../model", "/org/model", "org/model/", "org/model/x", "~/model", "org//model"]
    + ["org/model@", "org/model@../x", "org/mo--del", "org/mo del", "org/model@-x", "org/" + "m" * 100, "örg/model"]
    + ["org/model:", "org/model:../x", "org/model:x.gguf", "org/model/../x.gguf", "org/model:" + "m" * 200],
)
def test_a_path(text: str) -> None:
    assert ModelName.parse(text) is None


def test_what_lies_at_the_path_goes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_name("org/model", tmp_path) == ModelName("org/model")
    (tmp_path / "org" / "model").mkdir(parents=True)
    assert find_name("org/model", tmp_path) is None
    monkeypatch.chdir(tmp_path)
    assert find_name("org/model") is None
    assert find_name("org/model/x.gguf") == ModelName("org/model", gguf="x.gguf")
    (tmp_path / "org" / "model" / "x.gguf").touch()
    assert find_name("org/model/x.gguf") is None


def test_a_name_that_no_path_can_be(tmp_path: Path) -> None:
    revision = "r" * 5000
    assert find_name(f"org/model@{revision}", tmp_path) == ModelName("org/model", revision)


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("org/model@v2", "folder that is printed by hf download org/model --revision v2"),
        ("org/model:Q4_0", "path that is printed by hf download org/model --include '*Q4_0*.gguf'"),
        ("org/model/x/y.gguf@v2", "path that is printed by hf download org/model x/y.gguf --revision v2"),
    ],
)
def test_how_to_fetch_it_by_hand(name: str, command: str) -> None:
    parsed = ModelName.parse(name)
    assert parsed is not None and parsed.by_hand == f"name the {command}"


def test_a_folder_of_the_cache_is_called_like_its_model(tmp_path: Path) -> None:
    assert shown_name(tmp_path / f"models--Qwen--Qwen3-0.6B/snapshots/{COMMIT}") == "Qwen/Qwen3-0.6B"
    assert shown_name(tmp_path / "checkpoint") == "checkpoint"
