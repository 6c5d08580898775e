"""How many drafts the draft model is asked for, and what it has to catch up with."""

from __future__ import annotations

import pytest
from msgspec import structs

from inflight.batch_manager.speculation.model_drafts import ModelDrafts
from inflight.batch_manager.speculation.payoff import FIRST_REST
from inflight.batch_manager.speculation.speculation import Speculation
from inflight.prompt_tuning import EmbeddingTable, PromptTuningConfig
from inflight.request import Request
from inflight.sampling_config import SamplingConfig
from inflight.scheduler_output import DRAFTED
from inflight.speculative_decoding import (
    NO_DRAFT_MODEL,
    DraftTargetDecodingConfig,
    ExternalDraftTokensConfig,
    NGramDecodingConfig,
    SpeculativeDecodingConfig,
)

BY_MODEL = DraftTargetDecodingConfig(max_draft_len=8)
ENGINES = SpeculativeDecodingConfig(draft_target=BY_MODEL)
REQUEST = Request(input_token_ids=[1, 2, 1, 2], max_tokens=8)


def test_accepted_drafts_make_more_of_them() -> None:
    drafter = ModelDrafts(BY_MODEL)
    assert drafter.propose([1] * 9, 1, 64) == [DRAFTED] * 2
    drafter.account(2, 2, 12, 1)
    assert drafter.propose([1] * 12, 0, 64) == [DRAFTED] * 4
    drafter.account(4, 4, 17, 1)
    assert drafter.propose([1] * 17, 0, 64) == [DRAFTED] * 8
    assert drafter.propose([1] * 17, 0, 3) == [DRAFTED] * 3, "as many as there is room for"


@pytest.mark.parametrize(("num_accepted", "num_seen"), [(0, 10), (3, 13), (4, 13)])
def test_it_has_seen_all_but_the_last_token_and_the_last_draft(num_accepted: int, num_seen: int) -> None:
    """Of 10 tokens the last was computed with four drafts behind it, the last of which the draft model only put out."""
    drafter = ModelDrafts(BY_MODEL)
    drafter.account(4, num_accepted, 11 + num_accepted, 1)
    assert drafter.num_seen == num_seen


@pytest.mark.parametrize(("num_running", "num_accepted", "rests"), [(1, 1, False), (1, 0, True), (9, 1, True)])
def test_it_rests_where_it_does_not_pay(num_running: int, num_accepted: int, rests: bool) -> None:
    """One of two drafts pays for a sequence alone, not for one that loses a step beside others."""
    drafter = ModelDrafts(DraftTargetDecodingConfig(max_draft_len=2))
    length = 10
    for _ in range(8):
        if not drafter.propose([1] * length, 0, 64):
            break
        length += 1 + num_accepted
        drafter.account(2, num_accepted, length, num_running)
    assert (drafter.propose([1] * length, 0, 64) == []) == rests
    assert drafter.propose([1] * (length + 2 * FIRST_REST), 0, 64)


def test_beside_many_sequences_not_even_right_drafts_pay() -> None:
    drafter = ModelDrafts(DraftTargetDecodingConfig(max_draft_len=4))
    drafter.account(2, 2, 13, 8)
    assert drafter.propose([1] * 13, 0, 64)
    drafter.account(4, 4, 18, 16)
    assert not drafter.propose([1] * 18, 0, 64)


def test_a_token_that_the_host_does_not_know_cannot_be_caught_up_with() -> None:
    assert ModelDrafts(BY_MODEL).propose([1] * 9, 2, 64) == []


def test_a_request_decides_over_the_engines_default() -> None:
    assert Speculation.wanted_by(REQUEST) is None
    assert Speculation.wanted_by(REQUEST, ENGINES) is not None
    assert Speculation.wanted_by(structs.replace(REQUEST, draft_target_config=BY_MODEL)) is not None
    off = structs.replace(REQUEST, draft_target_config=NO_DRAFT_MODEL)
    assert Speculation.wanted_by(off, ENGINES) is None
    decaying = structs.replace(REQUEST, sampling_config=SamplingConfig(top_p_decay=0.9))
    assert Speculation.wanted_by(decaying, ENGINES) is None


def test_prompts_with_embeddings_have_none() -> None:
    table = EmbeddingTable(dtype="float32", shape=(1, 1), data=bytes(4))
    request = structs.replace(REQUEST, prompt_tuning_config=PromptTuningConfig(embedding_table=table))
    assert Speculation.wanted_by(request, ENGINES) is None


def test_it_is_asked_where_the_other_sources_know_nothing() -> None:
    given = ExternalDraftTokensConfig(tokens=[7, 8])
    request = structs.replace(REQUEST, external_draft_tokens_config=given, draft_target_config=BY_MODEL)
    speculation = Speculation.wanted_by(
        request, SpeculativeDecodingConfig(ngram=NGramDecodingConfig(max_matching_ngram_size=2))
    )
    assert speculation is not None
    assert speculation.propose([1, 2, 1, 2], 0, 2) == [7, 8]
    assert speculation.propose([1, 2, 1, 2, 1], 0, 2) == [2, 1], "looked up"
    assert speculation.propose([1, 2, 1, 2, 9], 0, 2) == [DRAFTED] * 2
    speculation.account(2, 1, 7, 1)
    assert speculation.num_seen == 6
