"""Drafts, prompt lookup, lookahead decoding and the draft model: from tensors into a request."""

from __future__ import annotations

import numpy as np
import pytest
from llm_tensors import BEAMS, OK, build

from inflight.errors import InvalidRequest
from inflight.speculative_decoding import (
    DraftTargetDecodingConfig,
    ExternalDraftTokensConfig,
    LookaheadDecodingConfig,
    NGramDecodingConfig,
)


def drafts(logits: np.ndarray | None = None, threshold: float | None = None) -> dict[str, object]:
    given = {
        "draft_logits": None if logits is None else logits.astype(np.float32),
        "draft_acceptance_threshold": threshold,
    }
    return {"draft_input_ids": [3, 4], **{name: value for name, value in given.items() if value is not None}}


def lookahead(window: int, ngram: int, verification: int) -> dict[str, int]:
    sizes = {"window": window, "ngram": ngram, "verification_set": verification}
    return {f"lookahead_{name}_size": size for name, size in sizes.items()}


def test_drafts_and_prompt_lookup_reach_the_request() -> None:
    request = build({**OK, "max_draft_len": 5, "draft_input_ids": [3, 4]})
    assert request.ngram_config == NGramDecodingConfig(max_draft_len=5, max_matching_ngram_size=3)
    assert request.external_draft_tokens_config == ExternalDraftTokensConfig(tokens=[3, 4])
    request = build({**OK, "max_draft_len": 0, "max_matching_ngram_size": 2, "draft_input_ids": np.zeros(0, np.int32)})
    assert request.ngram_config == NGramDecodingConfig(max_draft_len=0, max_matching_ngram_size=2)
    assert request.external_draft_tokens_config is None
    assert build(OK).ngram_config is None and build(OK).draft_target_config is None, "the engine's own"
    request = build({**OK, "speculative_max_draft_len": 0})
    assert request.draft_target_config == DraftTargetDecodingConfig(max_draft_len=0)


def test_logits_and_threshold_of_drafts_reach_the_request() -> None:
    logits = np.arange(600, dtype=np.float32).reshape(2, 300)
    request = build({**OK, "temperature": 1.0, **drafts(logits, 0.25)})
    config = request.external_draft_tokens_config
    assert config == ExternalDraftTokensConfig(tokens=[3, 4], logits=logits.tobytes(), acceptance_threshold=0.25)
    assert request.weighed_drafts is config
    empty = build({**OK, **drafts(np.zeros((0, 0)))}).external_draft_tokens_config
    assert empty == ExternalDraftTokensConfig(tokens=[3, 4])
    greedy = build({**OK, "temperature": 0.0, **drafts(logits)})
    assert greedy.external_draft_tokens_config is not None and greedy.weighed_drafts is None, "they change nothing"


def test_lookahead_decoding_reaches_the_request() -> None:
    expected = LookaheadDecodingConfig(max_window_size=5, max_ngram_size=2, max_verification_set_size=3)
    assert build({**OK, **lookahead(5, 2, 3)}).lookahead_config == expected
    off = build({**OK, **lookahead(1, 1, 0)}).lookahead_config
    assert off is not None and off.is_off
    assert build(OK).lookahead_config is None, "the engine's own"


@pytest.mark.parametrize(
    ("inputs", "sentence"),
    [
        ({**OK, "max_draft_len": -1}, r"max_draft_len must be between 0 \(off\) and 64, got -1"),
        ({**OK, "max_draft_len": 65}, r"max_draft_len must be between 0 \(off\) and 64, got 65"),
        (
            {**OK, "speculative_max_draft_len": 65},
            "speculative_max_draft_len must be between 0 .* 64, got 65",
        ),
        (
            {**OK, "speculative_max_draft_len": 4},
            "speculative_max_draft_len needs a draft model, and this engine has",
        ),
        ({**OK, "max_matching_ngram_size": 2}, "max_matching_ngram_size needs max_draft_len"),
        ({**OK, "max_draft_len": 4, "max_matching_ngram_size": 0}, "max_matching_ngram_size must be between 1 and 16"),
        ({**OK, "max_draft_len": 4, "max_matching_ngram_size": 17}, "max_matching_ngram_size must be between 1 and 16"),
        ({**OK, "lookahead_window_size": 4}, "lookahead_window_size, lookahead_ngram_size and .* all or none"),
        ({**OK, **lookahead(0, 3, 4)}, "lookahead_window_size must be between 1 and 64, got 0"),
        ({**OK, **lookahead(4, 17, 4)}, "lookahead_ngram_size must be between 1 and 16, got 17"),
        ({**OK, **lookahead(4, 3, -1)}, "lookahead_verification_set_size must be between 0 and 64, got -1"),
        ({**OK, **lookahead(4, 1, 0)}, "lookahead_ngram_size 1 means no lookahead decoding"),
        ({**OK, "draft_input_ids": [300]}, "draft_input_ids holds a token id outside"),
        ({**OK, "draft_input_ids": [-1]}, "draft_input_ids holds a token id outside"),
        ({**OK, "draft_input_ids": [1] * 64}, "draft_input_ids has 64 entries, more than 63"),
        ({**OK, "draft_input_ids": np.zeros((2, 3), np.int32)}, "draft_input_ids must be one row"),
        ({**OK, "draft_acceptance_threshold": 0.5}, "need draft_input_ids: the drafts"),
        ({**OK, "draft_logits": np.zeros((1, 300), np.float32)}, "need draft_input_ids: the drafts"),
        ({**OK, **drafts(threshold=0.0)}, "draft_acceptance_threshold must be above 0 and at most 1, got 0.0"),
        ({**OK, **drafts(threshold=1.5)}, "draft_acceptance_threshold must be above 0 and at most 1, got 1.5"),
        ({**OK, **drafts(np.zeros((3, 300)))}, "draft_logits has 3 rows, but draft_input_ids 2 drafts"),
        ({**OK, **drafts(np.zeros((2, 299)))}, "one float32 for each of 2 drafts and 300 tokens"),
        ({**OK, **drafts(np.full((2, 300), np.nan))}, "draft_logits must hold numbers"),
        ({**OK, **drafts(np.full((2, 300), -np.inf))}, "in each row a finite one"),
        ({**OK, **drafts(np.full((2, 300), np.inf))}, "and no infinity"),
        ({**OK, "draft_input_ids": [1], "top_p_decay": 0.5}, "draft_input_ids is not supported together with"),
        ({**OK, **BEAMS, "draft_input_ids": [1]}, "draft_input_ids is not supported together with"),
        (
            {**OK, **drafts(threshold=0.5), "guided_decoding_guide_type": "json", "end_id": 2},
            "draft_logits and draft_acceptance_threshold are not supported together with guided decoding",
        ),
    ],
)
def test_what_is_refused(inputs: dict, sentence: str) -> None:
    with pytest.raises(InvalidRequest, match=sentence) as caught:
        build(inputs)
    assert caught.value.code == "INVALID_ARGUMENT"
    assert len(str(caught.value)) < 256
