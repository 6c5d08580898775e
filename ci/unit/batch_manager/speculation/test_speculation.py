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
from inflight.speculative_decoding import (
    NO_LOOKAHEAD,
    ExternalDraftTokensConfig,
    LookaheadDecodingConfig,
    NGramDecodingConfig,
    SpeculativeDecodingConfig,
)

OFF = NGramDecodingConfig(max_draft_len=0)
LOOKUP = SpeculativeDecodingConfig(ngram=NGramDecodingConfig())
PAIRS = SpeculativeDecodingConfig(ngram=NGramDecodingConfig(max_matching_ngram_size=2))


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
    assert Speculation.wanted_by(request, LOOKUP) is None


def test_a_request_decides_over_the_engines_default() -> None:
    request = Request(input_token_ids=[1], max_tokens=4)
    assert Speculation.wanted_by(request) is None
    assert Speculation.wanted_by(request, LOOKUP) is not None
    assert Speculation.wanted_by(structs.replace(request, ngram_config=OFF), LOOKUP) is None
    assert Speculation.wanted_by(structs.replace(request, ngram_config=NGramDecodingConfig())) is not None
    processed = structs.replace(request, logits_post_processor_name="favour")
    assert Sequence(processed, max_seq_len=9, speculative_decoding=LOOKUP).speculation is None


def test_given_tokens_come_before_those_of_the_text_until_one_is_wrong() -> None:
    given = ExternalDraftTokensConfig(tokens=[7, 8, 9])
    request = Request(input_token_ids=[1, 2, 1, 2], max_tokens=8, external_draft_tokens_config=given)
    speculation = Speculation.wanted_by(request, PAIRS)
    assert speculation is not None
    assert speculation.propose([1, 2, 1, 2, 7], 0, 64) == [8, 9]
    assert speculation.propose([1, 2, 1, 2, 7], 1, 64) == [9]
    assert speculation.propose([1, 2, 1, 2, 7, 1, 2], 0, 64) == [7, 1], "8 was given and 1 came: looked up"


def test_the_model_guesses_where_nothing_is_given_or_found() -> None:
    request = Request(
        input_token_ids=[1, 2, 1, 2], max_tokens=8, lookahead_config=LookaheadDecodingConfig(max_window_size=3)
    )
    speculation = Speculation.wanted_by(request, PAIRS)
    assert speculation is not None
    assert speculation.propose([1, 2, 1, 2], 0, 64) == [1, 2], "looked up"
    speculation.account(2, 0, 5)
    speculation.learn([1, 2, 1, 2, 7], 1, [3, 4, 5])
    assert len(speculation.propose([1, 2, 1, 2, 7], 0, 64)) == 3
    speculation.learn([1, 2, 1, 2, 7, 8], 1, [3, 4])
    assert speculation.propose([1, 2, 1, 2, 7, 8], 0, 2) == [3, 4]


def test_lookahead_of_the_engine_holds_for_requests_that_say_nothing() -> None:
    request, lookahead = Request(input_token_ids=[1], max_tokens=4), LookaheadDecodingConfig()
    engines = SpeculativeDecodingConfig(lookahead=lookahead)
    assert Speculation.wanted_by(request, engines) is not None
    assert Speculation.wanted_by(structs.replace(request, lookahead_config=NO_LOOKAHEAD), engines) is None
    assert Speculation.wanted_by(structs.replace(request, lookahead_config=lookahead)) is not None


def test_forced_tokens_come_behind_given_ones_and_before_those_of_the_text() -> None:
    request = Request(
        input_token_ids=[1, 2, 1, 2],
        max_tokens=8,
        guided_decoding_params=GuidedDecodingParams(guide_type=GuideType.JSON),
        external_draft_tokens_config=ExternalDraftTokensConfig(tokens=[7, 8, 9]),
    )
    speculation = Speculation.wanted_by(request, PAIRS)
    assert speculation is not None
    speculation.note_forced([5, 6, 1, 2], 5)
    assert speculation.propose([1, 2, 1, 2, 7], 0, 64) == [8, 9]
    assert speculation.propose([1, 2, 1, 2, 7, 5], 1, 64) == [1, 2]
    assert speculation.propose([1, 2, 1, 2, 7, 5, 6, 1, 2], 0, 64) == [7, 5], "all forced ones have come"
