"""Decoders that score texts, or give their vectors, compute what transformers' classes do, chunked and on prefixes that
are in the cache; and what is made of logits of tokens is what those logits say.

float32, so that equality means the same network and not the same rounding.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from compiled_network import needs_compiler
from encoder_checkpoints import EncoderEngine, scores_request, states_request, vector_request, write_encoder
from tiny_checkpoints import COMPILED_CONFIGS, CONFIGS, fill_with_noise, needs_eager, write_checkpoint

from inflight.config import EngineConfig
from inflight.errors import ConfigurationError
from inflight.models.families import OF_DECODERS
from inflight.models.implementation import read_config
from inflight.output_config import SCORES, AdditionalModelOutput, OutputConfig
from inflight.request import Request
from inflight.result import Array, Result
from inflight.scheduler_output import HIDDEN_STATES

pytestmark = pytest.mark.slow

CLOSE: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-4}
LENGTHS = (1, 2, 17, 60, 100)
"""In chunks of 32 tokens."""
CHUNKED = {"max_num_tokens": 32, "max_batch_size": 4, "model_impl": "native"}
OF_FAMILIES = {
    "Llama": "llama-biases",
    "Mistral": "mistral-window",
    "Mixtral": "mixtral-window",
    "Qwen2": "qwen2-window",
    "Qwen2Moe": "qwen2-moe",
    "Qwen3": "qwen3-window",
    "Qwen3Moe": "qwen3-moe",
    "Gemma2": "gemma2",
    "Gemma3Text": "gemma3",
    "Phi3": "phi3-partial-window",
    "SmolLM3": "smollm3",
    "StableLm": "stablelm",
    "Starcoder2": "starcoder2",
    "Glm4": "glm4",
}
WORDS = {"no": 7, "yes": 5, "1": 9}
NO, YES = WORDS["no"], WORDS["yes"]


def text(length: int, seed: int = 0) -> list[int]:
    """Tokens that are no padding."""
    return [random.Random(f"{length} {seed} {place}").randrange(4, 203) for place in range(length)]


def write_decoder(folder: Path, name: str, num_labels: int = 3) -> Any:
    """A checkpoint of transformers' class `name`; its network."""
    family = next(each for each in sorted(OF_FAMILIES, key=len, reverse=True) if name.startswith(each))
    config = copy.deepcopy(CONFIGS[OF_FAMILIES[family]])
    config.num_labels = num_labels
    config.dtype = torch.float32  # transformers notes there what other tests have saved it in
    model = getattr(transformers, name)(config).eval()
    if needs_eager(config):
        model.set_attn_implementation("eager")
    fill_with_noise(model, torch.Generator().manual_seed(3))
    model.save_pretrained(folder)
    return model


def write_words(folder: Path) -> None:
    """A tokenizer.json that has a yes and a no."""
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"type": "WordLevel", "vocab": WORDS}}))


def of_all(engine: EncoderEngine, make: Callable[[int, list[int]], Request]) -> dict[int, Array]:
    """By length, what the only tensor of a request for a text of it holds, all at once and then again."""
    requests = [make(length, text(length)) for length in LENGTHS]
    found = [engine.run(requests) for _ in range(2)]
    for number, first in found[0].items():
        again = found[1][number]
        assert isinstance(first, Result) and isinstance(again, Result), first
        assert first.output_token_ids == []
        np.testing.assert_allclose(again.tensors[0].array(), first.tensors[0].array(), **CLOSE)
    return {length: np.array(result.tensors[0].array()) for length, result in found[1].items()}  # type: ignore[union-attr]


@pytest.mark.parametrize("family", OF_DECODERS)
def test_scores_are_transformers(family: str, tmp_path: Path) -> None:
    model = write_decoder(tmp_path, f"{family}ForSequenceClassification")
    engine = EncoderEngine(tmp_path, **CHUNKED)
    try:
        limits = engine.runner.limits
        assert (limits.pooled, limits.num_labels, limits.is_causal) == ("scores", 3, True)
        for length, found in of_all(engine, scores_request).items():
            with torch.inference_mode():
                expected = model(torch.tensor([text(length)])).logits.numpy()
            np.testing.assert_allclose(found, expected, **CLOSE)
    finally:
        engine.close()


@pytest.mark.parametrize("family", OF_DECODERS)
def test_vectors_are_transformers(family: str, tmp_path: Path) -> None:
    """Of a class without a head, whose tensors are not called by the name of its body."""
    model = write_decoder(tmp_path, f"{family}Model")
    engine = EncoderEngine(tmp_path, **CHUNKED)
    try:
        assert (engine.runner.limits.pooled, engine.runner.limits.model_outputs[0]) == ("vectors", HIDDEN_STATES)
        for length, found in of_all(engine, lambda number, ids: vector_request(number, ids, "last")).items():
            with torch.inference_mode():
                states = model(torch.tensor([text(length)])).last_hidden_state[0].numpy()
            np.testing.assert_allclose(found[0], states[-1], **CLOSE)
        found_states = engine.tensor(states_request(1, text(40)))
        with torch.inference_mode():
            np.testing.assert_allclose(found_states, model(torch.tensor([text(40)])).last_hidden_state[0], **CLOSE)
    finally:
        engine.close()


@pytest.fixture(scope="module", params=[False, True], ids=["own-head", "tied"])
def reranker(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """Of the kind of Qwen3-Reranker."""
    folder = tmp_path_factory.mktemp("reranker")
    config = copy.deepcopy(CONFIGS["qwen3-biases" if request.param else "qwen3"])
    assert config.tie_word_embeddings == request.param
    write_words(folder)
    return folder, write_checkpoint(folder, config, 5).model


@pytest.fixture(scope="module")
def engine(reranker: tuple[Path, Any]) -> Iterator[EncoderEngine]:
    engine = EncoderEngine(reranker[0], score_tokens="no, yes", **CHUNKED)
    yield engine
    engine.close()


@torch.inference_mode()
def logits_behind(model: Any, ids: list[int]) -> torch.Tensor:
    found: torch.Tensor = model(torch.tensor([ids])).logits[0, -1]
    return found


def test_a_score_is_what_yes_is_likelier_than_no(engine: EncoderEngine, reranker: tuple[Path, Any]) -> None:
    """Its sigmoid is the softmax over both, which the model's publishers compute."""
    assert (engine.runner.limits.pooled, engine.runner.limits.num_labels) == ("scores", 1)
    for length, found in of_all(engine, scores_request).items():
        logits = logits_behind(reranker[1], text(length))
        np.testing.assert_allclose(found, [[logits[YES] - logits[NO]]], **CLOSE)
        chance = torch.softmax(logits[[NO, YES]], 0)[1].item()
        assert 1 / (1 + np.exp(-found[0, 0])) == pytest.approx(chance, abs=1e-5)


def test_what_texts_begin_with_is_computed_once(engine: EncoderEngine) -> None:
    """A question stands before each of the documents that may answer it."""
    question = text(48, 1)
    engine.run([scores_request(1, [*question, *text(9, 1)])])
    engine.run([scores_request(number, [*question, *text(9, number)]) for number in (2, 3)])
    assert sum(engine.steps) == 2 * 9


def test_what_is_left_out_of_a_vector_may_end_within_a_step(engine: EncoderEngine) -> None:
    ids = text(70)
    states = engine.tensor(states_request(1, ids))
    for first in (1, 31, 32, 33, 69):
        found = engine.tensor(vector_request(1, ids, first=first))
        np.testing.assert_allclose(found[0], states[first:].mean(0), **CLOSE)


def test_scores_come_beside_states(engine: EncoderEngine) -> None:
    """Which need every token of the prompt computed, in several steps."""
    ids = text(70)
    outputs = [AdditionalModelOutput(name=SCORES), AdditionalModelOutput(name=HIDDEN_STATES, gather_context=True)]
    asked = Request(
        request_id=1,
        input_token_ids=ids,
        max_tokens=0,
        output_config=OutputConfig(additional_model_outputs=outputs),
    )
    result = engine.run([asked])[1]
    assert isinstance(result, Result)
    found = {tensor.name: tensor.array() for tensor in result.tensors}
    assert found["context_hidden_states"].shape == (70, 48)
    np.testing.assert_allclose(found[SCORES], engine.tensor(scores_request(1, ids)), **CLOSE)


@pytest.mark.parametrize(
    ("written", "expected"), [("yes", [YES]), ("1", [WORDS["1"]]), ("yes,no", [NO, YES]), ("auto", [])]
)
def test_which_tokens_count_is_a_key(tmp_path: Path, written: str, expected: list[int]) -> None:
    model = write_checkpoint(tmp_path, CONFIGS["qwen3"], 5).model
    write_words(tmp_path)
    engine = EncoderEngine(tmp_path, score_tokens=written)
    try:
        if not expected:
            assert engine.runner.limits.pooled == "", "nothing says that it is a reranker"
            return
        logits = logits_behind(model, text(9))
        *no, yes = reversed(expected)
        score = logits[yes] - sum(logits[each] for each in no)
        np.testing.assert_allclose(engine.tensor(scores_request(1, text(9))), [[score]], **CLOSE)
    finally:
        engine.close()


def as_module(folder: Path, **tokens: Any) -> None:
    """As sentence-transformers writes it."""
    kinds = {"": "sentence_transformers.base.modules.transformer.Transformer"}
    kinds["1_LogitScore"] = "sentence_transformers.cross_encoder.modules.logit_score.LogitScore"
    modules = [{"idx": n, "name": str(n), "path": path, "type": kind} for n, (path, kind) in enumerate(kinds.items())]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_LogitScore").mkdir()
    (folder / "1_LogitScore" / "config.json").write_text(json.dumps(tokens))


def with_key(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def test_the_checkpoint_may_say_it(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path, CONFIGS["qwen3"], 5).model
    as_module(tmp_path, true_token_id=YES, false_token_id=None)
    logits = logits_behind(model, text(9))
    for written, score in ((None, logits[YES]), ("no yes", logits[YES] - logits[NO])):
        if written:
            write_words(tmp_path)
            with_key(tmp_path, classifier_from_token=written.split())
        engine = EncoderEngine(tmp_path)
        try:
            np.testing.assert_allclose(engine.tensor(scores_request(1, text(9))), [[score]], **CLOSE)
        finally:
            engine.close()
    config = EngineConfig(gpt_model_path=str(tmp_path), score_tokens="none")
    assert not read_config(config).pooled, "it writes text for who wants that"  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("options", "changes", "sentence"),
    [
        ({"score_tokens": "no,maybe"}, {}, "tokenizer.json has no token 'maybe'"),
        ({"score_tokens": "no,yes,1"}, {}, "score_tokens must be auto, none, or tokens of the vocabulary"),
        ({"score_tokens": "no,no"}, {}, "score_tokens names the token 'no' twice"),
        ({"score_tokens": "no,"}, {}, "score_tokens must be auto, none, or tokens"),
        ({"score_tokens": "no,yes", "model_impl": "transformers"}, {}, "set score_tokens to none"),
        ({"score_tokens": "no,yes"}, {"vocab_size": 6}, "a token of score_tokens is outside the vocabulary of 6"),
        ({"score_tokens": "no,yes", "max_loras": 1}, {}, "max_loras is set, and Qwen3ForCausalLM gives scores"),
    ],
)
def test_what_cannot_be_is_refused_by_its_key(
    tmp_path: Path, options: dict[str, Any], changes: dict[str, Any], sentence: str
) -> None:
    write_checkpoint(tmp_path, CONFIGS["qwen3"], 5)
    write_words(tmp_path)
    with_key(tmp_path, **changes)
    with pytest.raises(ConfigurationError, match=sentence):
        EncoderEngine(tmp_path, **options)


def test_caps_of_logits_have_no_difference(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, CONFIGS["gemma2"], 5)
    as_module(tmp_path, true_token_id=YES, false_token_id=NO)
    with pytest.raises(ConfigurationError, match="are not computed where logits have a bias or a cap"):
        EncoderEngine(tmp_path)


@needs_compiler
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_bit_depends_on_neighbours_nor_on_the_cache(tmp_path: Path, dtype: str) -> None:
    model = write_checkpoint(tmp_path, COMPILED_CONFIGS["qwen3-wide"], 5).model
    write_words(tmp_path)
    engine = EncoderEngine(tmp_path, score_tokens="no,yes", cpu_compile="true", dtype=dtype, max_num_tokens=32)
    try:
        for length in (1, 17, 40, 90):
            request = scores_request(1, text(length))
            alone = engine.tensor(request)
            if dtype == "float32":
                logits = logits_behind(model, text(length))
                np.testing.assert_allclose(alone, [[logits[YES] - logits[NO]]], rtol=1e-3, atol=1e-3)
            beside = [scores_request(2, text(9)), scores_request(3, [*text(length), 8]), scores_request(4, text(33))]
            assert engine.tensor(request, *beside).tobytes() == alone.tobytes()
            results = engine.run([*beside, request])
            assert results[1].tensors[0].array().tobytes() == alone.tobytes()  # type: ignore[union-attr]
    finally:
        engine.close()


@needs_compiler
@pytest.mark.parametrize("kind", ["tokens", "layers"])
def test_no_bit_of_a_score_depends_on_how_many_end_in_its_step(tmp_path: Path, kind: str) -> None:
    """Of a head that is one row, and of BERT's, which is two layers."""
    options = {"score_tokens": "no,yes"} if kind == "tokens" else {}
    if kind == "tokens":
        write_checkpoint(tmp_path, COMPILED_CONFIGS["qwen3-wide"], 5)
        write_words(tmp_path)
    else:
        write_encoder(tmp_path, "BertForSequenceClassification", num_labels=1, vocab_size=300)
    engine = EncoderEngine(tmp_path, cpu_compile="true", dtype="float32", max_num_tokens=64, **options)
    try:
        requests = [scores_request(number, text(3, number)) for number in range(8)]
        alone = [engine.tensor(request).tobytes() for request in requests]
        together = [engine.run(requests)[number] for number in range(8)]
        assert [result.tensors[0].array().tobytes() for result in together] == alone  # type: ignore[union-attr]
    finally:
        engine.close()
