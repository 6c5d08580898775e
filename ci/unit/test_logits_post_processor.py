"""Which logits post-processors an engine's configuration names, and what is wrong with others."""

from __future__ import annotations

import logit_functions
import pytest

from inflight.config import EngineConfig
from inflight.errors import ConfigurationError
from inflight.logits_post_processor import LogitsPostProcessorConfig


def test_functions_are_imported_by_their_places() -> None:
    config = EngineConfig(
        logits_post_processors="mine=logit_functions:favour, other = logit_functions:differ",
        logits_post_processor_batched="logit_functions:favour_all",
    )
    found = LogitsPostProcessorConfig.load(config)
    assert found.names == ["mine", "other", "batched"] and found.replicate
    assert found.processor_map["mine"] is logit_functions.favour
    assert found.processor_batched is logit_functions.favour_all
    assert LogitsPostProcessorConfig.load(EngineConfig()).names == []


def test_ranks_that_call_nothing_import_nothing() -> None:
    config = EngineConfig(logits_post_processors="mine=no_such_module:f", logits_post_processor_replicate=False)
    assert LogitsPostProcessorConfig.load(config, is_caller=False).names == ["mine"]
    with pytest.raises(ConfigurationError, match="no_such_module:f cannot be imported: ModuleNotFoundError"):
        LogitsPostProcessorConfig.load(config, is_caller=True)


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"logits_post_processors": "mine"}, "must be name=module:attribute, ..., got 'mine'"),
        ({"logits_post_processors": "mine=logit_functions"}, "is given as module:attribute, got 'logit_functions'"),
        ({"logits_post_processors": "a=logit_functions:nothing"}, "cannot be imported: AttributeError"),
        ({"logits_post_processors": "a=logit_functions:RANK"}, "a is not a function, but 0"),
        ({"logits_post_processors": "batched=logit_functions:favour"}, "the name batched is given twice, or to"),
        ({"logits_post_processors": "a=m:f,a=m:g"}, "the name a is given twice"),
        ({"logits_post_processor_batched": "logit_functions:RANK"}, "batched is not a function, but 0"),
    ],
)
def test_a_wrong_place_is_one_sentence(keys: dict[str, str], sentence: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        LogitsPostProcessorConfig.load(EngineConfig.from_parameters(keys))
    assert sentence in str(caught.value)
