"""An engine of an encoder: texts are packed whole, nothing is sampled, and a vector depends on its text alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from compiled_network import needs_compiler
from encoder_checkpoints import (
    MAX_POSITIONS,
    EncoderEngine,
    TinyEncoder,
    scores_request,
    states_request,
    token_ids,
    vector_request,
    write_encoder,
)
from msgspec import structs

from inflight.errors import ConfigurationError, InvalidRequest
from inflight.guided_decoding import GuidedDecodingParams, GuideType
from inflight.output_config import SCORES, AdditionalModelOutput, OutputConfig
from inflight.request import Request
from inflight.result import FinishReason, Result
from inflight.sampling_config import SamplingConfig
from inflight.scheduler_output import HIDDEN_STATES


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> TinyEncoder:
    return write_encoder(tmp_path_factory.mktemp("encoder"), "BertForSequenceClassification")


@pytest.fixture(scope="module")
def engine(encoder: TinyEncoder) -> Iterator[EncoderEngine]:
    engine = EncoderEngine(encoder.folder)
    yield engine
    engine.close()


def test_texts_are_packed_whole_and_end_with_their_step(engine: EncoderEngine) -> None:
    """64 tokens a step, 8 rows: those that do not fit wait, and nobody behind the first that waits goes before it."""
    texts = [token_ids(length) for length in (30, 30, 20, 4, MAX_POSITIONS, 16)]
    results = engine.run([vector_request(number, text) for number, text in enumerate(texts, 1)])
    assert engine.steps == [60, 24, 64]
    for result in results.values():
        assert isinstance(result, Result)
        assert (result.output_token_ids, result.finish_reason) == ([], FinishReason.LENGTH)
        assert result.is_final and result.is_sequence_final


def test_more_texts_than_rows_take_turns(engine: EncoderEngine) -> None:
    results = engine.run([vector_request(number, token_ids(3, number)) for number in range(1, 41)])
    assert len(results) == 40
    assert all(isinstance(result, Result) for result in results.values())
    engine.manager._scheduler.check()


@pytest.mark.parametrize("pooling", ["mean", "weighted_mean", "cls", "last", "max"])
def test_vectors_are_made_of_the_states(engine: EncoderEngine, encoder: TinyEncoder, pooling: Any) -> None:
    text = token_ids(9)
    states, weights = encoder.states(text), np.arange(1, 10)[:, None]
    expected = {
        "mean": states.mean(0),
        "weighted_mean": (states * weights).sum(0) / weights.sum(),
        "cls": states[0],
        "last": states[-1],
        "max": states.max(0),
    }[pooling]
    found = engine.tensor(vector_request(1, text, pooling), vector_request(2, token_ids(5)))
    np.testing.assert_allclose(found, expected[None], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("first", [1, 4, 8])
def test_vectors_are_made_of_the_states_from_a_token_on(
    engine: EncoderEngine, encoder: TinyEncoder, first: int
) -> None:
    """Weights stay those of the places in the whole text."""
    text = token_ids(9)
    states, weights = encoder.states(text)[first:], np.arange(1, 10)[first:, None]
    for pooling, expected in (
        ("mean", states.mean(0)),
        ("weighted_mean", (states * weights).sum(0) / weights.sum()),
        ("max", states.max(0)),
    ):
        found = engine.tensor(vector_request(1, text, pooling, first=first), vector_request(2, token_ids(5)))
        np.testing.assert_allclose(found, expected[None], rtol=1e-4, atol=1e-4)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "name",
    [f"{family}ForSequenceClassification" for family in ("Bert", "ModernBert", "MPNet", "NomicBert", "EuroBert")],
)
def test_no_bit_depends_on_neighbours(name: str, dtype: str, tmp_path: Path) -> None:
    write_encoder(tmp_path, name)
    engine = EncoderEngine(tmp_path, cpu_compile="true", dtype=dtype)
    try:
        for length in (1, 2, 17, 40):
            text = token_ids(length)
            for make in (states_request, scores_request):
                request = make(1, text, second_text_start=length // 2)
                alone = engine.tensor(request)
                beside = [make(2, token_ids(9)), make(3, token_ids(1)), make(4, token_ids(5), second_text_start=2)]
                assert engine.tensor(request, *beside).tobytes() == alone.tobytes()
                results = engine.run([*beside, request])
                assert results[1].tensors[0].array().tobytes() == alone.tobytes()  # type: ignore[union-attr]
    finally:
        engine.close()


ASKED = OutputConfig(additional_model_outputs=[AdditionalModelOutput(name=SCORES)])
JSON = GuidedDecodingParams(guide_type=GuideType.JSON)
WITHOUT_TOKENS = OutputConfig(
    additional_model_outputs=[AdditionalModelOutput(name=HIDDEN_STATES, pooling="mean", first=4)]
)
OF_TOKENS = OutputConfig(additional_model_outputs=[AdditionalModelOutput(name=HIDDEN_STATES)])


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"max_tokens": 1}, "max_tokens is about generated tokens, and this engine gives scores of prompts"),
        ({"num_return_sequences": 2}, "num_return_sequences is about generated tokens"),
        ({"sampling_config": SamplingConfig(beam_width=2)}, "beam_width is about generated tokens"),
        ({"stop_words": [[5]]}, "stop_words is about generated tokens"),
        ({"bad_words": [[5]]}, "bad_words is about generated tokens"),
        (
            {"guided_decoding_params": GuidedDecodingParams(guide_type=GuideType.JSON)},
            "guided_decoding_guide_type is",
        ),
        ({"logits_post_processor_name": "any"}, "logits_post_processor_name is about generated tokens"),
        ({"output_config": structs.replace(ASKED, return_log_probs=True)}, "return_log_probs is about generated"),
        ({"output_config": structs.replace(ASKED, return_context_logits=True)}, "return_context_logits is about"),
        ({"output_config": OutputConfig()}, "the request asks for none: name one of scores, hidden_states"),
        ({"output_config": OF_TOKENS}, "asks for 'hidden_states' of generated tokens, and there are none"),
        ({"output_config": WITHOUT_TOKENS}, "must be one of the prompt's 4, got 4: the text has none behind"),
        ({"second_text_start": 4}, "second_text_start must be a place in the prompt of 4 tokens, got 4"),
        ({"input_token_ids": [1] * (MAX_POSITIONS + 1)}, "more than max_input_len 48"),
        ({"input_token_ids": [1, 96]}, "token id 96 is outside the vocabulary"),
    ],
)
def test_what_means_nothing_is_refused_and_neighbours_get_theirs(
    engine: EncoderEngine, changes: dict[str, Any], sentence: str
) -> None:
    good = scores_request(2, token_ids(4))
    bad: Request = structs.replace(scores_request(1, token_ids(4)), **changes)
    results = engine.run([bad, good])
    assert sentence in str(results[1])
    assert isinstance(results[2], Result)
    with pytest.raises(InvalidRequest):
        engine.runner.limits.validate(bad)


def test_a_decoder_is_not_asked_for_pairs(engine: EncoderEngine) -> None:
    limits = structs.replace(engine.runner.limits, pooled="", max_input_len=8)
    request = Request(input_token_ids=[1, 2], max_tokens=1, second_text_start=1)
    with pytest.raises(InvalidRequest, match="second_text_start is for encoders"):
        limits.validate(request)
    with pytest.raises(InvalidRequest, match="max_tokens must be between 1"):
        limits.validate(structs.replace(request, second_text_start=0, max_tokens=0))


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size"),
        ({"speculative_model_dir": "/any"}, "speculative_model_dir"),
        ({"max_loras": 2}, "max_loras"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype"),
        ({"kv_cache_host_memory_bytes": 2**20}, "kv_cache_host_memory_bytes"),
    ],
)
def test_keys_that_concern_generation_are_refused_by_name(
    encoder: TinyEncoder, options: dict[str, Any], key: str
) -> None:
    with pytest.raises(ConfigurationError, match=f"{key} is set, and BertForSequenceClassification gives scores"):
        EncoderEngine(encoder.folder, **options)
