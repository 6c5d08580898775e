"""Speculation: which sequences have drafters, and which drafter is followed."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import structs

from inflight.batch_manager.sequence import Sequence
from inflight.batch_manager.speculation.speculation import Speculation
from inflight.guided_decoding import GuidedDecodingParams, GuideType
from inflight.request import Request
from inflight.sampling_config import SamplingConfig
from inflight.speculative_decoding import ExternalDraftTokensConfig, NGramDecodingConfig

OFF = NGramDecodingConfig(max_draft_len=0)


@pytest.mark.parametrize(
    "sampling",
    [
        {"top_p_decay": 0.9},
        {"top_p_min": 0.5, "top_p": 0.2},
        {"beam_width": 2},
    ],
)
def test_what_follows_every_token_is_not_guessed(sampling: dict[str, Any]) -> None:
    request = Request(input_token_ids=[1], max_tokens=4, sampling_config=SamplingConfig(**sampling))
    assert Speculation.wanted_by(request, NGramDecodingConfig()) is None


def test_a_request_decides_over_the_engines_default() -> None:
    request = Request(input_token_ids=[1], max_tokens=4)
    assert Speculation.wanted_by(request, OFF) is None
    assert Speculation.wanted_by(request, NGramDecodingConfig()) is not None
    assert Speculation.wanted_by(structs.replace(request, ngram_config=OFF), NGramDecodingConfig()) is None
    assert Speculation.wanted_by(structs.replace(request, ngram_config=NGramDecodingConfig()), OFF) is not None
    processed = structs.replace(request, logits_post_processor_name="favour")
    assert Sequence(processed, max_seq_len=9, ngram_config=NGramDecodingConfig()).speculation is None


def test_given_tokens_come_before_those_of_the_text_until_one_is_wrong() -> None:
    given = ExternalDraftTokensConfig(tokens=[7, 8, 9])
    request = Request(input_token_ids=[1, 2, 1, 2], max_tokens=8, external_draft_tokens_config=given)
    speculation = Speculation.wanted_by(request, NGramDecodingConfig(max_matching_ngram_size=2))
    assert speculation is not None
    assert speculation.propose([1, 2, 1, 2, 7], 0, 64) == [8, 9]
    assert speculation.propose([1, 2, 1, 2, 7], 1, 64) == [9]
    assert speculation.propose([1, 2, 1, 2, 7, 1, 2], 0, 64) == [7, 1, 2, 7], "8 was given and 1 came: looked up"


def test_forced_tokens_come_behind_given_ones_and_before_those_of_the_text() -> None:
    request = Request(
        input_token_ids=[1, 2, 1, 2],
        max_tokens=8,
        guided_decoding_params=GuidedDecodingParams(guide_type=GuideType.JSON),
        external_draft_tokens_config=ExternalDraftTokensConfig(tokens=[7, 8, 9]),
    )
    speculation = Speculation.wanted_by(request, NGramDecodingConfig(max_matching_ngram_size=2))
    assert speculation is not None
    speculation.note_forced([5, 6, 1, 2], 5)
    assert speculation.propose([1, 2, 1, 2, 7], 0, 64) == [8, 9]
    assert speculation.propose([1, 2, 1, 2, 7, 5], 1, 64) == [1, 2]
    assert speculation.propose([1, 2, 1, 2, 7, 5, 6, 1, 2], 0, 64) == [7, 5, 6, 1], "all forced ones have come"
