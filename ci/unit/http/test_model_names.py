"""The names that a request's `model` may have.

pytest ci/unit/http/test_model_names.py
"""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from inflight.http.api_error import APIError
from inflight.http.model_names import CONFIG, ModelNames
from inflight.lora import LoRARequest


@pytest.fixture
def lora_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "adapters"
    for name in ("pirate", "poet"):
        (folder / name).mkdir(parents=True)
        (folder / name / CONFIG).write_text("{}")
    (folder / "empty").mkdir()
    (tmp_path / CONFIG).write_text("{}")
    (folder / CONFIG).write_text("{}")
    return folder


@pytest.fixture
def names(lora_dir: Path) -> ModelNames:
    return ModelNames(["llm", "alias"], "checkpoint", str(lora_dir))


def test_adapters_are_the_folders_that_hold_some(names: ModelNames) -> None:
    assert names.find("pirate") == ("pirate", LoRARequest("pirate"))
    assert names.find(None) == names.find("llm") == ("llm", None)
    assert [card["id"] for card in names.cards(64)] == ["llm", "alias", "pirate", "poet"]
    assert not any("pooled" in card for card in names.cards(64))
    assert {card["pooled"] for card in names.cards(64, "vectors")} == {"vectors"}, "which the page goes by"


@pytest.mark.parametrize(
    "name", ["empty", "", ".", "..", "pirate/", "./pirate", "pirate/../poet", "/", "\0", "pirate\0", "x" * 10_000, "*"]
)
def test_other_names_are_unknown(names: ModelNames, lora_dir: Path, name: str) -> None:
    for asked in (name, str(lora_dir / "pirate")):
        with pytest.raises(APIError) as caught:
            names.find(asked)
        assert caught.value.status == 404
    assert not names.is_adapter(name)


def test_a_name_is_found_without_a_descriptor(names: ModelNames, lora_dir: Path) -> None:
    """A server that may open no more files answers the requests of its open connections."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, before[1]))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            next(lora_dir.iterdir())
        assert names.find("poet") == ("poet", LoRARequest("poet"))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
