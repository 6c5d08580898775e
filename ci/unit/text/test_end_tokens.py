"""The end tokens that a checkpoint's configuration files name.

pytest ci/unit/text/test_end_tokens.py
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from inflight.errors import ConfigurationError
from inflight.text.tokenizer import Tokenizer

TOKENIZER = Path(__file__).resolve().parents[3] / "model_repository" / "llm" / "1" / "checkpoint" / "tokenizer.json"
FILES = ["config.json", "generation_config.json"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copy(TOKENIZER, tmp_path)
    return tmp_path


def test_both_files_are_read(folder: Path) -> None:
    (folder / "config.json").write_text('{"eos_token_id": 5}')
    (folder / "generation_config.json").write_text('{"eos_token_id": [7, 5]}')
    assert Tokenizer.load(folder).end_ids == [5, 7]


@pytest.mark.parametrize("text", ["{}", '{"eos_token_id": null}', '{"eos_token_id": []}'])
def test_there_may_be_none(folder: Path, text: str) -> None:
    (folder / "config.json").write_text(text)
    assert Tokenizer.load(folder).end_ids == []


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("value", ["x", "7", True, 1.5, float("nan"), {}, [1, "x"], [[1]], [None]], ids=repr)
def test_anything_else_is_refused_with_a_sentence(folder: Path, name: str, value: object) -> None:
    (folder / name).write_text(json.dumps({"eos_token_id": value}))
    with pytest.raises(ConfigurationError) as caught:
        Tokenizer.load(folder)
    assert str(caught.value) == f"{folder / name}: eos_token_id must be a token id or a list of them, got {value!r}"


@pytest.mark.parametrize("text", ["{", "[" * 200_000])
def test_a_file_that_is_not_json_is_named(folder: Path, text: str) -> None:
    (folder / "generation_config.json").write_text(text)
    with pytest.raises(ConfigurationError, match=r"generation_config\.json "):
        Tokenizer.load(folder)
