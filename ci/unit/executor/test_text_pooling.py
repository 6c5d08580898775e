"""Vectors and scores for programs of the library: those of transformers' networks, and those of the HTTP server.

pytest ci/unit/executor/test_text_pooling.py
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import played_encoder
import pytest
import torch
from encoder_checkpoints import TinyEncoder, token_ids, write_encoder
from fake_tokenizer import byte_tokenizer, byte_tokenizer_with
from openai_server import PlayedEngine, Running, checkpoint_folder, openai_server, say
from tiny_checkpoints import SIZES, write_checkpoint
from transformers import Qwen3Config

from inflight.asking.pair_template import PairTemplate, find_pair_template
from inflight.config import EngineConfig
from inflight.errors import ConfigurationError, InvalidRequest
from inflight.executor.generation_executor import GenerationExecutor
from inflight.executor.in_process import InProcessExecutor
from inflight.runtime.model_runner import ModelRunner
from inflight.text.tokenizer import Tokenizer

PROMPTS = {"prompts": {"query": "dd ", "passage": "ca "}, "default_prompt_name": "passage"}
TEXTS = ["ab", "abcd", "c", "ab"]


def in_process(
    folder: Path, tokenizer: Tokenizer | None = None, pair_template: PairTemplate | None = None, **options: Any
) -> GenerationExecutor:
    sizes = {"max_batch_size": 2, "max_num_tokens": 64, "tokens_per_block": 4, "num_threads": 1}
    config = EngineConfig(gpt_model_path=str(folder), device="cpu", cpu_compile="false", **sizes, **options)
    engine = InProcessExecutor(config, ModelRunner.load)
    return GenerationExecutor(engine, tokenizer, checkpoint=folder, pair_template=pair_template)


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> TinyEncoder:
    return write_encoder(tmp_path_factory.mktemp("bert"), "BertModel")


def test_vectors_are_the_means_of_transformers_states(encoder: TinyEncoder) -> None:
    """More texts than the engine's queue takes at once."""
    rows = [token_ids(length, seed) for seed, length in enumerate((3, 9, 1, 14, 9, 2))]
    with in_process(encoder.folder, max_queue_size=2) as executor:
        found = executor.embed(rows)
        short = executor.embed(rows[:1], dimensions=8)
    for row, vector in zip(rows, found, strict=True):
        mean = encoder.states(row).mean(axis=0)
        assert vector.dtype == np.float32
        np.testing.assert_allclose(vector, mean / np.linalg.norm(mean), rtol=1e-4, atol=1e-4)
    first = encoder.states(rows[0]).mean(axis=0)[:8]
    np.testing.assert_allclose(short[0], first / np.linalg.norm(first), rtol=1e-4, atol=1e-4)


def test_scores_are_the_sigmoids_of_transformers(tmp_path: Path) -> None:
    encoder = write_encoder(tmp_path, "BertForSequenceClassification", num_labels=1, vocab_size=300, type_vocab_size=2)
    with in_process(tmp_path, played_encoder.tokenizer()) as executor:
        scores = executor.score("ab", ["cd", "d"])
        plain = executor.score("ab", "cd", use_activation=False)
    expected = [float(encoder.scores(list(b"ab" + text), 2)[0]) for text in (b"cd", b"d")]
    assert scores == pytest.approx([1 / (1 + math.exp(-score)) for score in expected], abs=1e-4)
    assert plain == pytest.approx(expected[:1], abs=1e-4)


def test_texts_are_joined_by_the_template_of_a_language_model(tmp_path: Path) -> None:
    encoder = write_encoder(tmp_path, "BertForSequenceClassification", num_labels=1, vocab_size=300)
    template = PairTemplate(lambda pair: f"{pair.second}?{pair.first}")
    with in_process(tmp_path, played_encoder.tokenizer(), pair_template=template) as executor:
        found = executor.score("ab", "cd", use_activation=False)
    assert found == pytest.approx([float(encoder.scores(list(b"cd?ab"))[0])], abs=1e-4)


def test_a_reranker_gives_the_chances_of_yes(tmp_path: Path) -> None:
    """As the model card of Qwen3-Reranker has it with transformers: from text to number, here and over HTTP."""
    config = Qwen3Config(**{**SIZES, "vocab_size": 300, "head_dim": 16, "max_position_embeddings": 1024})
    model = write_checkpoint(tmp_path, config, 5).model
    tokenizer = byte_tokenizer_with("<|im_start|>", "<|im_end|>", "<think>", "</think>")
    (tmp_path / "tokenizer.json").write_text(tokenizer._backend.to_str())
    no, yes = (tokenizer._backend.token_to_id(letter) for letter in "ny")

    def chance(question: str, document: str) -> float:
        task = "Judge whether the Document meets the requirements based on the Query and the Instruct provided."
        asked = "<Instruct>: Given a web search query, retrieve relevant passages that answer the query"
        text = (
            f'<|im_start|>system\n{task} Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
        )
        text += f"{asked}\n<Query>: {question}\n<Document>: {document}<|im_end|>\n<|im_start|>assistant\n"
        ids = tokenizer._backend.encode(text + "<think>\n\n</think>\n\n", add_special_tokens=False).ids
        with torch.inference_mode():
            logits = model(torch.tensor([ids])).logits[0, -1]
        return torch.softmax(logits[[no, yes]], 0)[1].item()

    expected = [chance("what?", text) for text in TEXTS[:3]]
    assert len(set(expected)) == 3
    sizes = {"max_batch_size": 2, "max_num_tokens": 64, "tokens_per_block": 4, "num_threads": 1, "score_tokens": "n,y"}
    options = EngineConfig(gpt_model_path=str(tmp_path), device="cpu", cpu_compile="false", **sizes)
    template = find_pair_template(options)
    with (
        InProcessExecutor(options, ModelRunner.load) as engine,
        openai_server(engine, tmp_path, config=options, tokenizer=tokenizer) as url,
    ):
        answer = Running(url, engine).post("/v1/rerank", {"query": "what?", "documents": TEXTS[:3]}).json()  # type: ignore[arg-type]
    found = {each["index"]: each["relevance_score"] for each in answer["results"]}
    assert [found[place] for place in range(3)] == pytest.approx(expected, abs=1e-5)
    engine = InProcessExecutor(options, ModelRunner.load)
    with GenerationExecutor(engine, tokenizer, checkpoint=tmp_path, pair_template=template) as executor:
        assert executor.score("what?", TEXTS[:3]) == pytest.approx(expected, abs=1e-5)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (checkpoint_folder(tmp_path) / "config_sentence_transformers.json").write_text(json.dumps(PROMPTS))
    return tmp_path


@pytest.fixture(params=["vectors", "scores"])
def pair(request: pytest.FixtureRequest, folder: Path) -> Iterator[tuple[GenerationExecutor, Running]]:
    """The library and a server over equal engines, of vectors or of scores."""

    def engine() -> PlayedEngine:
        of_vectors = {"pooled": "vectors", "num_labels": 0, "model_outputs": ["hidden_states"]}
        return played_encoder.engine(**(of_vectors if request.param == "vectors" else {}))

    tokenizer, served = played_encoder.tokenizer(), engine()
    with (
        openai_server(served, folder, tokenizer=tokenizer) as url,
        GenerationExecutor(engine(), tokenizer, checkpoint=folder) as executor,
    ):
        yield executor, Running(url, served)


@pytest.mark.parametrize(
    "options",
    [{}, {"dimensions": 2}, {"prompt_name": "query"}, {"input_type": "search_query"}],
)
def test_vectors_are_those_of_the_server(pair: tuple[GenerationExecutor, Running], options: dict[str, Any]) -> None:
    executor, server = pair
    answer = server.post("/v1/embeddings", {"input": TEXTS, **options}).json()
    found = executor.embed(TEXTS, **options)
    assert [vector.tolist() for vector in found] == [each["embedding"] for each in answer["data"]]


@pytest.mark.parametrize(("query", "documents"), [("ab", TEXTS), ("ab", "c"), (["ab", "c"], ["abd", "ca"])])
def test_scores_are_those_of_the_server(
    pair: tuple[GenerationExecutor, Running], query: str | list[str], documents: str | list[str]
) -> None:
    executor, server = pair
    for options in ({}, {"use_activation": False}):
        answer = server.post("/score", {"text_1": query, "text_2": documents, **options}).json()
        found = executor.score(query, documents, **options)
        assert found == [each["score"] for each in answer["data"]]


def test_what_is_wrong_is_said_in_the_librarys_words(folder: Path, tmp_path: Path) -> None:
    encoder, tokenizer = played_encoder.engine(), played_encoder.tokenizer()
    with GenerationExecutor(encoder, tokenizer, checkpoint=folder) as executor:
        for wrong, sentence in [
            (lambda: executor.embed(["a", ""]), "texts is empty: give at least one character or token"),
            (lambda: executor.embed("a", dimensions=5), "dimensions must be between 1 and 4, which this model has"),
            (lambda: executor.embed("a", prompt_name="x"), "prompt_name is x, and this model has no such prompt"),
            (lambda: executor.score("a", []), "there are 1 queries and 0 documents: give one of each at least"),
            (lambda: executor.score(["a", "b"], ["c"] * 3), "there are 2 queries and 3 documents"),
            (lambda: executor.score("a", ""), "documents holds an empty text: give at least one character"),
        ]:
            with pytest.raises(InvalidRequest, match=sentence):
                wrong()
        assert not encoder.requests
    with (
        GenerationExecutor(played_encoder.engine(), tokenizer) as executor,
        pytest.raises(InvalidRequest, match="stands in the checkpoint: give `checkpoint`"),
    ):
        executor.embed("a")
    (folder / "config.json").write_text('{"sentence_transformers": {"activation_fn": "x.Tanh"}}')
    with (
        GenerationExecutor(played_encoder.engine(), tokenizer, checkpoint=folder) as executor,
        pytest.raises(ConfigurationError, match="Tanh of scores"),
    ):
        executor.score("a", "b")


def test_a_model_that_writes_has_no_vectors_where_its_network_offers_none(tmp_path: Path) -> None:
    with (
        GenerationExecutor(PlayedEngine(say()), byte_tokenizer(), checkpoint=checkpoint_folder(tmp_path)) as executor,
        pytest.raises(InvalidRequest, match="this model has no embeddings"),
    ):
        executor.embed("a")
