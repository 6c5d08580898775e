"""The parameters of a model that uses another model's engine."""

from __future__ import annotations

import pytest

from inflight.errors import ConfigurationError
from inflight.server.dialect_model import DialectModel
from inflight.server.tensors.dialects import LLM, VLLM_MODEL


def test_the_models_name_or_a_parameter_chooses_the_dialect() -> None:
    assert DialectModel.from_parameters({"engine": "llm"}, "vllm_model").dialect is VLLM_MODEL
    named = DialectModel.from_parameters({"engine": "mine", "dialect": "llm"}, "anything")
    assert (named.engine, named.dialect) == ("mine", LLM)


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
    ],
)
def test_wrong_parameters_are_told_in_words(parameters: dict[str, str], sentence: str) -> None:
    with pytest.raises(ConfigurationError, match=sentence):
        DialectModel.from_parameters({"engine": "llm", **parameters}, "mine")
