"""The parameters of a model that uses another model's engine."""

from __future__ import annotations

import pytest

from inflight.errors import ConfigurationError
from inflight.server.dialect_model import DialectModel
from inflight.server.tensors.dialects import EMBEDDING, LLM, VLLM_MODEL


def test_the_models_name_or_a_parameter_chooses_the_dialect() -> None:
    assert DialectModel.from_parameters({"engine": "llm"}, "vllm_model").dialect is VLLM_MODEL
    named = DialectModel.from_parameters({"engine": "mine", "dialect": "llm"}, "anything")
    assert (named.engine, named.dialect) == ("mine", LLM)


def test_a_model_of_vectors_may_say_how_they_are_made() -> None:
    named = DialectModel.from_parameters({"engine": "mine", "embedding_pooling": "cls"}, "embedding")
    assert (named.dialect, named.vector_of) == (EMBEDDING, "cls")
    assert DialectModel.from_parameters({"engine": "mine"}, "rerank").vector_of is None


def test_only_a_model_that_names_an_engine_is_one() -> None:
    assert DialectModel.is_meant({"engine": "llm"})
    assert not DialectModel.is_meant({"engine": ""}) and not DialectModel.is_meant({"max_batch_size": "4"})


@pytest.mark.parametrize(
    ("parameters", "sentence"),
    [
        ({"dialekt": "llm"}, "did you mean dialect"),
        ({"max_batch_size": "4"}, "takes only dialect besides"),
        ({"dialect": "openai"}, "dialect must be one of llm, tensorrt_llm"),
        ({}, "got 'mine'"),
        ({"dialect": "llm", "embedding_pooling": "cls"}, "takes only dialect besides"),
        ({"dialect": "rerank", "max_batch_size": "4"}, "takes only dialect and embedding_pooling besides"),
        ({"dialect": "rerank", "embedding_poling": "cls"}, "did you mean embedding_pooling"),
        ({"dialect": "rerank", "embedding_pooling": "sum"}, "embedding_pooling must be one of mean, weighted_mean"),
    ],
)
def test_wrong_parameters_are_told_in_words(parameters: dict[str, str], sentence: str) -> None:
    with pytest.raises(ConfigurationError, match=sentence):
        DialectModel.from_parameters({"engine": "llm", **parameters}, "mine")
