"""Kept references are taken where nothing that decides them changed, and never otherwise."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import references
import torch
from references import VARIABLE, digest, generated
from tiny_checkpoints import TinyCheckpoint, make_checkpoint, make_prompt

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:transformers computed tokens")]

QUESTION: dict[str, Any] = {"prompt": [1, 2], "max_tokens": 3}
TOKENS = [7, 8, 9]


@pytest.fixture
def checkpoint(tmp_path: Path) -> TinyCheckpoint:
    return make_checkpoint(tmp_path / "model", "llama-tied")


@pytest.fixture
def kept(checkpoint: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Of the checkpoint as it is."""
    found = {digest(checkpoint.model, QUESTION): TOKENS}
    monkeypatch.setattr(references, "kept", lambda: found)
    monkeypatch.delenv(VARIABLE, raising=False)
    return found


def never() -> list[int]:
    raise AssertionError("transformers was asked")


@pytest.mark.usefixtures("kept")
def test_what_is_kept_is_not_computed(checkpoint: TinyCheckpoint) -> None:
    assert generated(checkpoint.model, QUESTION, never) == TOKENS


def change_weight(network: Any) -> None:
    with torch.no_grad():
        network.model.layers[1].mlp.up_proj.weight[0, 0] += 1e-6


def change_config(network: Any) -> None:
    network.config.rope_parameters["rope_theta"] *= 2


def change_attention(network: Any) -> None:
    network.set_attn_implementation("eager")


def change_module(network: Any) -> None:
    network.model.layers[0].mlp.act_fn = torch.nn.GELU()


def change_generation(network: Any) -> None:
    network.generation_config.repetition_penalty = 1.3


def add_hook(network: Any) -> None:
    network.model.layers[0].register_forward_hook(lambda module, inputs, output: output)


def replace_forward(network: Any) -> None:
    network.model.forward = network.model.forward


@pytest.mark.parametrize(
    "change",
    [change_weight, change_config, change_attention, change_module, change_generation, add_hook, replace_forward],
    ids=lambda change: change.__name__,
)
@pytest.mark.usefixtures("kept")
def test_another_network_is_asked(checkpoint: TinyCheckpoint, change: Callable[[Any], None]) -> None:
    change(checkpoint.model)
    assert generated(checkpoint.model, QUESTION, lambda: [1]) == [1]


@pytest.mark.parametrize("change", [{"prompt": [1, 3]}, {"max_tokens": 4}])
@pytest.mark.usefixtures("kept")
def test_another_question_is_asked(checkpoint: TinyCheckpoint, change: dict[str, Any]) -> None:
    assert generated(checkpoint.model, QUESTION | change, lambda: [1]) == [1]


@pytest.mark.usefixtures("kept")
def test_what_is_not_kept_is_told(checkpoint: TinyCheckpoint) -> None:
    with pytest.warns(UserWarning, match="make references"):
        generated(checkpoint.model, QUESTION | {"max_tokens": 4}, lambda: [1])


@pytest.mark.parametrize("library", ["torch", "transformers"])
@pytest.mark.usefixtures("kept")
def test_another_version_is_asked(checkpoint: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch, library: str) -> None:
    monkeypatch.setattr(getattr(references, library), "__version__", "0")
    assert generated(checkpoint.model, QUESTION, lambda: [1]) == [1]


@pytest.mark.usefixtures("kept")
def test_live_compares(checkpoint: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "live")
    assert generated(checkpoint.model, QUESTION, lambda: TOKENS) == TOKENS
    with pytest.raises(AssertionError, match="make references"):
        generated(checkpoint.model, QUESTION, lambda: [7, 8, 8])


def test_what_is_asked_for_can_be_kept(
    checkpoint: TinyCheckpoint, kept: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(references, "NEW", tmp_path / "new")
    monkeypatch.setenv(VARIABLE, "keep")
    assert generated(checkpoint.model, QUESTION, never) == TOKENS
    (file,) = (tmp_path / "new").iterdir()
    assert json.loads(file.read_text()) == [*kept, TOKENS]
    assert generated(checkpoint.model, QUESTION | {"max_tokens": 4}, lambda: None) is None
    assert json.loads(file.read_text().splitlines()[1])[1] is None


def test_a_checkpoint_takes_what_it_kept(
    checkpoint: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(references, "NEW", tmp_path / "new")
    monkeypatch.setenv(VARIABLE, "keep")
    tokens = checkpoint.expected(make_prompt(9), 6)
    (file,) = (tmp_path / "new").iterdir()
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setattr(references, "kept", lambda: dict([json.loads(file.read_text())]))
    monkeypatch.setattr(TinyCheckpoint, "_generate", lambda *_: never())
    assert checkpoint.expected(make_prompt(9), 6) == tokens
    with pytest.raises(AssertionError, match="transformers was asked"):
        checkpoint.expected(make_prompt(9), 7)
