"""Encoders give the hidden states and scores of transformers' classes, whatever shares their steps.

float32, so that equality means the same network and not the same rounding.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from encoder_checkpoints import (
    CLASSES,
    MAX_POSITIONS,
    EncoderEngine,
    TinyEncoder,
    scores_request,
    states_request,
    token_ids,
    write_encoder,
)
from safetensors.torch import load_file, save_file

from inflight.errors import ConfigurationError

CLOSE = {"rtol": 1e-4, "atol": 1e-4}
LENGTHS = (1, 2, 7, 19, MAX_POSITIONS)


@pytest.fixture(scope="module", params=CLASSES)
def encoder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TinyEncoder:
    return write_encoder(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def engine(encoder: TinyEncoder) -> Iterator[EncoderEngine]:
    engine = EncoderEngine(encoder.folder, max_num_tokens=128, model_impl="native")
    yield engine
    engine.close()


def test_hidden_states_are_transformers(engine: EncoderEngine, encoder: TinyEncoder) -> None:
    """In one batch, the first texts' tokens packed beside each other."""
    texts = [token_ids(length) for length in LENGTHS]
    results = engine.run([states_request(number, text) for number, text in enumerate(texts, 1)])
    for number, text in enumerate(texts, 1):
        (tensor,) = results[number].tensors
        np.testing.assert_allclose(tensor.array(), encoder.states(text), **CLOSE)


def test_a_pair_has_its_types(engine: EncoderEngine, encoder: TinyEncoder) -> None:
    text = token_ids(11)
    beside = [states_request(2, token_ids(5)), states_request(3, token_ids(9), second_text_start=4)]
    found = engine.tensor(states_request(1, text, second_text_start=6), *beside)
    np.testing.assert_allclose(found, encoder.states(text, 6), **CLOSE)


def test_scores_are_transformers(engine: EncoderEngine, encoder: TinyEncoder) -> None:
    if not hasattr(encoder.model, "num_labels") or engine.runner.limits.pooled != "scores":
        assert "ForSequenceClassification" not in type(encoder.model).__name__
        return
    assert engine.runner.limits.num_labels == 3
    texts = [token_ids(length) for length in LENGTHS]
    results = engine.run([scores_request(n, text, second_text_start=len(text) // 2) for n, text in enumerate(texts, 1)])
    for number, text in enumerate(texts, 1):
        (tensor,) = results[number].tensors
        assert (tensor.name, tensor.array().shape) == ("scores", (1, 3))
        np.testing.assert_allclose(tensor.array()[0], encoder.scores(text, len(text) // 2), **CLOSE)


@pytest.mark.parametrize("seed", range(1, 7))
def test_attention_to_places_is_debertas_for_all_its_options(tmp_path: Path, seed: int) -> None:
    """Texts longer than what has buckets of its own, beside each other."""
    encoder = write_encoder(tmp_path, "DebertaV2ForSequenceClassification", seed)
    engine = EncoderEngine(tmp_path, max_num_tokens=128)
    try:
        results = engine.run([states_request(length, token_ids(length)) for length in LENGTHS])
        for length in LENGTHS:
            (tensor,) = results[length].tensors
            np.testing.assert_allclose(tensor.array(), encoder.states(token_ids(length)), **CLOSE)
        found = engine.tensor(scores_request(1, token_ids(31)))
        np.testing.assert_allclose(found[0], encoder.scores(token_ids(31)), **CLOSE)
    finally:
        engine.close()


def test_norms_of_old_checkpoints_are_called_gamma_and_beta(tmp_path: Path) -> None:
    """As in the first of BERT, whose files hold both heads of its training, too."""
    encoder = write_encoder(tmp_path, "BertForMaskedLM")
    weights = load_file(tmp_path / "model.safetensors")
    old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    renamed = {re.sub("|".join(old), lambda found: old[found[0]], name): value for name, value in weights.items()}
    assert sum("gamma" in name for name in renamed) > 6
    renamed |= {"cls.seq_relationship.bias": torch.zeros(2), "bert.pooler.dense.bias": torch.zeros(64)}
    save_file(renamed, tmp_path / "model.safetensors")
    engine = EncoderEngine(tmp_path)
    try:
        found = engine.tensor(states_request(1, token_ids(11)))
    finally:
        engine.close()
    np.testing.assert_allclose(found, encoder.states(token_ids(11)), **CLOSE)


def test_layers_in_cpp_give_the_same_within_rounding(encoder: TinyEncoder) -> None:
    if "Deberta" in type(encoder.model).__name__:
        with pytest.raises(
            ConfigurationError, match="cpu_compile is true, but C\\+\\+ has no attention to where tokens"
        ):
            EncoderEngine(encoder.folder, cpu_compile="true")
        return
    engine = EncoderEngine(encoder.folder, max_num_tokens=128, cpu_compile="true")
    texts = [token_ids(length) for length in LENGTHS]
    try:
        results = engine.run(
            [states_request(n, text, second_text_start=len(text) // 2) for n, text in enumerate(texts, 1)]
        )
        for number, text in enumerate(texts, 1):
            (tensor,) = results[number].tensors
            expected = encoder.states(text, len(text) // 2)
            np.testing.assert_allclose(tensor.array(), expected, rtol=1e-3, atol=1e-3)
            if engine.runner.limits.pooled == "scores":
                found = engine.tensor(scores_request(9, text))
                np.testing.assert_allclose(found[0], encoder.scores(text), rtol=1e-3, atol=1e-3)
    finally:
        engine.close()


@pytest.mark.parametrize(
    ("architecture", "model_type", "reason"),
    [
        ("DebertaModel", "deberta", ": it makes keys of positions by weights of their own"),
        ("DebertaForSequenceClassification", "deberta", ": it makes keys of positions"),
        ("NewModel", "new", ": no class of transformers computes it, and code of checkpoints is not run"),
        ("SqueezeBertModel", "squeezebert", "; it has them for BertModel"),
    ],
)
def test_other_encoders_are_refused_by_name(tmp_path: Path, architecture: str, model_type: str, reason: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [architecture], "model_type": model_type}))
    with pytest.raises(ConfigurationError, match=f"{architecture} gives vectors or scores of texts.*{reason}"):
        EncoderEngine(tmp_path)


@pytest.mark.parametrize(
    ("name", "changes", "sentence"),
    [
        ("NomicBertModel", {"n_head": 4}, "n_head 4 is not supported; only 2 is"),
        ("NomicBertModel", {"rotary_emb_base": 500}, "rotary_emb_base 500 is not supported; only 1000.0 is"),
        ("NomicBertModel", {"rotary_emb_interleaved": True}, "rotary_emb_interleaved True is not supported"),
        ("DebertaV2Model", {"share_att_key": False}, "share_att_key False is not supported; only true is"),
        ("DebertaV2Model", {"relative_attention": False}, "relative_attention False is not supported; only true is"),
        ("DebertaV2Model", {"conv_kernel_size": 3}, "conv_kernel_size 3 is not supported; only 0 is"),
        ("DebertaV2ForSequenceClassification", {"pooler_hidden_size": 32}, "pooler_hidden_size 32 is not supported"),
        ("ElectraModel", {"embedding_size": 32}, "embedding_size 32 is not supported; only 64 is"),
        ("ErnieModel", {"use_task_id": True}, "use_task_id True is not supported; only false is"),
        ("EuroBertForSequenceClassification", {"classifier_pooling": "late"}, "classifier_pooling 'late' is not"),
    ],
)
def test_options_that_are_not_computed_are_refused(
    tmp_path: Path, name: str, changes: dict[str, object], sentence: str
) -> None:
    write_encoder(tmp_path, name)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(ConfigurationError, match=sentence):
        EncoderEngine(tmp_path)


def test_nomics_own_names_of_sizes_may_stand_beside_those_of_transformers(tmp_path: Path) -> None:
    encoder = write_encoder(tmp_path, "NomicBertModel")
    path = tmp_path / "config.json"
    own = {"n_head": 2, "n_embd": 64, "rotary_emb_base": 1000, "rotary_emb_fraction": 1, "prenorm": False}
    path.write_text(json.dumps({**json.loads(path.read_text()), **own}))
    engine = EncoderEngine(tmp_path)
    try:
        np.testing.assert_allclose(
            engine.tensor(states_request(1, token_ids(9))), encoder.states(token_ids(9)), **CLOSE
        )
    finally:
        engine.close()
