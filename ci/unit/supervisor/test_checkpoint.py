"""What a checkpoint's files say of it before a server is started."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from inflight.models.families import ENCODERS, FAMILIES
from inflight.supervisor.checkpoint import find_pooled

ONE_LABEL = {"id2label": {"0": "LABEL_0"}}


def pooled(folder: Path, config: Any) -> str:
    (folder / "config.json").write_text(json.dumps(config))
    return find_pooled(folder)


@pytest.mark.parametrize("architecture", [*ENCODERS])
def test_an_encoder_is_known_by_its_architecture(tmp_path: Path, architecture: str) -> None:
    expected = "scores" if architecture.endswith("ForSequenceClassification") else "vectors"
    assert pooled(tmp_path, {"architectures": [architecture], **ONE_LABEL}) == expected


def test_all_other_architectures_write_text(tmp_path: Path) -> None:
    assert {pooled(tmp_path, {"architectures": [each], **ONE_LABEL}) for each in FAMILIES} == {""}


def test_scores_for_several_labels_are_no_answer_to_a_question(tmp_path: Path) -> None:
    config: dict[str, Any] = {"architectures": ["BertForSequenceClassification"]}
    assert pooled(tmp_path, config) == "vectors", "two labels, if the file names none"
    assert pooled(tmp_path, {**config, "id2label": {"0": "bad", "1": "good"}}) == "vectors"


@pytest.mark.parametrize("config", [{}, [], {"architectures": []}, {"architectures": "BertModel"}])
def test_what_cannot_be_read_is_left_to_the_ranks(tmp_path: Path, config: object) -> None:
    assert find_pooled(tmp_path) == ""
    assert pooled(tmp_path, config) == ""
