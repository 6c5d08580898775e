"""Drafts with logits or a threshold decide about tokens, and nothing but the request decides about them.

The same requests on a real network alone, in a batch without a place for a draft, beside others, in chunks, after
pauses; with all options of sampling; and the distribution of what is sampled.

Run: pytest ci/unit/runtime/test_weighed_drafts.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs
from network_engine import Engine
from replays import replay_after
from tiny_checkpoints import make_checkpoint, make_prompt

from inflight.config import SchedulerPolicy
from inflight.output_config import OutputConfig
from inflight.request import Request
from inflight.result import Result, join_tensors
from inflight.runtime import step_sizes
from inflight.sampling_config import SamplingConfig
from inflight.speculative_decoding import ExternalDraftTokensConfig, LookaheadDecodingConfig

pytestmark = pytest.mark.slow

VOCAB_SIZE = 203
RANDOM = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.01}
PENALISED = {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.2}
Results = dict[tuple[int, int], list[Result]]


@pytest.fixture(scope="module", params=["qwen3", "qwen3_5"], ids=["keys and values", "states of sequences"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"), request.param).folder


def make_request(
    number: int, num_drafts: int, threshold: float | None = None, *, logits: bool = True, **options: Any
) -> Request:
    """With drafts that its own logits make likely, so that some of them are accepted."""
    rng = np.random.default_rng(number)
    tokens = rng.integers(VOCAB_SIZE, size=num_drafts).tolist()
    data = rng.normal(size=(num_drafts, VOCAB_SIZE)).astype("<f4").tobytes() if logits else b""
    given = ExternalDraftTokensConfig(tokens=tokens, logits=data, acceptance_threshold=threshold)
    sampling = SamplingConfig(**{"seed": 5, **options.pop("sampling", {})})
    return Request(
        request_id=number,
        input_token_ids=make_prompt(5 + number, seed=number),
        max_tokens=16,
        sampling_config=sampling,
        external_draft_tokens_config=given,
        **options,
    )


REQUESTS = [
    make_request(1, 12, sampling={"temperature": 1.0}),
    make_request(2, 30, sampling=RANDOM),
    make_request(3, 8, 0.3, sampling=RANDOM),
    make_request(4, 12, 1e-4, logits=False),
    make_request(5, 12, 1e-3, sampling={**RANDOM, **PENALISED}, output_config=OutputConfig(return_log_probs=True)),
    make_request(6, 12, 1e-3, logits=False, sampling={**PENALISED, "no_repeat_ngram_size": 1}),
    make_request(7, 12, 1e-4, sampling={"temperature": 1.3, "typical_p": 0.9}, end_ids=list(range(0, 128, 5))),
    make_request(8, 12, 1e-3, sampling={**RANDOM, "seed": 6}, num_return_sequences=3),
    make_request(9, 12, 1e-9, bad_words=[[5], [9, 12]], sampling={"min_tokens": 9}, end_ids=list(range(0, 128, 3))),
    make_request(10, 12, 1e-3, sampling=RANDOM, lookahead_config=LookaheadDecodingConfig(), streaming=True),
]


def serve(
    folder: Path,
    requests: list[Request],
    *,
    num_blocks: int = 200,
    policy: str = "guaranteed_no_evict",
    max_batch_size: int = 12,
    max_num_tokens: int = 24,
    one_by_one: bool = False,
) -> Results:
    engine = Engine(
        folder,
        policy=SchedulerPolicy(policy),
        num_blocks=num_blocks,
        max_num_tokens=max_num_tokens,
        max_batch_size=max_batch_size,
    )
    for batch in [[request] for request in requests] if one_by_one else [requests]:
        engine.serve(batch)
    engine.runner.close()
    assert engine.kv_cache.num_free_blocks == num_blocks
    return engine.results


def tokens_of(results: list[Result]) -> list[int]:
    return [token for result in results for token in result.output_token_ids]


@pytest.fixture(scope="module")
def alone(folder: Path) -> Results:
    """Each request alone, with room for all drafts."""
    return serve(folder, REQUESTS, one_by_one=True)


def check_equal(found: Results, expected: Results) -> None:
    assert found.keys() == expected.keys()
    for key, results in expected.items():
        assert tokens_of(found[key]) == tokens_of(results), key
        assert found[key][-1].finish_reason is results[-1].finish_reason
        log_probs = [value for result in found[key] for value in result.log_probs]
        assert log_probs == pytest.approx([value for result in results for value in result.log_probs], abs=1e-4)


def num_accepted(request: Request, tokens: list[int]) -> int:
    assert request.external_draft_tokens_config is not None
    drafts = request.external_draft_tokens_config.tokens
    pairs = zip(tokens, drafts, strict=False)
    return next((index for index, (token, draft) in enumerate(pairs) if token != draft), min(len(tokens), len(drafts)))


def test_drafts_decide(folder: Path, alone: Results) -> None:
    """Some are accepted that would not have been sampled, and some are not."""
    counts = [num_accepted(request, tokens_of(alone[request.request_id, 0])) for request in REQUESTS]
    assert any(0 < count < 8 for count in counts) and max(counts) >= 3
    without = [structs.replace(request, external_draft_tokens_config=None) for request in REQUESTS]
    plain = serve(folder, without)
    assert sum(tokens_of(plain[key]) != tokens_of(results) for key, results in alone.items()) >= 4


@pytest.mark.parametrize(
    "engine",
    [
        {},
        {"num_blocks": 44, "policy": "max_utilization"},
        {"max_batch_size": 3, "max_num_tokens": 10},
    ],
    ids=["together", "paused", "in turns and in chunks"],
)
def test_tokens_depend_on_the_request_alone(folder: Path, alone: Results, engine: dict[str, Any]) -> None:
    check_equal(serve(folder, REQUESTS, **engine), alone)


def test_a_batch_without_a_place_for_drafts_weighs_them_too(folder: Path, alone: Results) -> None:
    single = [request for request in REQUESTS if request.num_return_sequences == 1]
    found = serve(folder, single, max_batch_size=1, one_by_one=True)
    check_equal(found, {(request.request_id, 0): alone[request.request_id, 0] for request in single})
    for results in found.values():
        metrics = results[-1].request_perf_metrics
        assert metrics is not None and metrics.total_draft_tokens == 0


def test_ranks_that_take_over_go_on_with_the_same_tokens(folder: Path, alone: Results) -> None:
    expected: dict[int, list[int]] = {}
    replayed: list[Request] = []
    for request in REQUESTS:
        tokens = tokens_of(alone[request.request_id, 0])
        for num_delivered in (1, 2, 5) if request.num_return_sequences == 1 else ():
            if num_delivered < len(tokens):
                number = 100 * request.request_id + num_delivered
                expected[number] = tokens[num_delivered:]
                replay = replay_after(tokens[:num_delivered])
                replayed.append(structs.replace(request, request_id=number, replay=replay))
    found = serve(folder, replayed)
    assert {number: tokens_of(found[number, 0]) for number in expected} == expected


def test_padded_as_on_a_gpu(folder: Path, alone: Results, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_sizes, "PADDED_DEVICES", {"cpu"})
    check_equal(serve(folder, REQUESTS), alone)


def test_logits_make_no_difference_to_greedy_output(folder: Path) -> None:
    request = make_request(1, 12)
    plain = serve(folder, [structs.replace(request, external_draft_tokens_config=None)])[1, 0]
    right = ExternalDraftTokensConfig(tokens=tokens_of(plain)[:12], logits=bytes(4 * 12 * VOCAB_SIZE))
    other = structs.replace(request, request_id=2, external_draft_tokens_config=right)
    found = serve(folder, [request, other], one_by_one=True)
    assert tokens_of(found[1, 0]) == tokens_of(found[2, 0]) == tokens_of(plain)
    metrics = found[2, 0][-1].request_perf_metrics
    assert metrics is not None and metrics.total_accepted_draft_tokens == metrics.total_draft_tokens > 8


def test_one_likeliest_token_is_greedy_output(folder: Path) -> None:
    """top_k 1 leaves the drafts no choice, whatever their logits say."""
    request = make_request(1, 12, sampling={"temperature": 1.0, "top_k": 1})
    plain = structs.replace(request, request_id=2, external_draft_tokens_config=None)
    found = serve(folder, [request, plain])
    assert tokens_of(found[1, 0]) == tokens_of(found[2, 0])


def test_sampled_output_keeps_its_distribution(folder: Path) -> None:
    """Chi-square over 480 seeds, of the first two tokens: the drafts are sampled from other logits than the model's."""
    prompt, sampling = make_prompt(9, seed=1), {"temperature": 1.5, "top_k": 5}
    rng = np.random.default_rng(3)
    engine = Engine(
        folder, policy=SchedulerPolicy.GUARANTEED_NO_EVICT, num_blocks=100, max_num_tokens=24, max_batch_size=12
    )

    def model_probs(number: int, text: list[int]) -> np.ndarray:
        output = OutputConfig(return_generation_logits=True)
        engine.serve([Request(request_id=number, input_token_ids=text, max_tokens=1, output_config=output)])
        return softmax(join_tensors(engine.results[number, 0])["generation_logits"][0])

    def softmax(logits: np.ndarray) -> np.ndarray:
        kept = np.where(logits >= np.sort(logits)[-5], logits.astype(np.float64), -np.inf) / 1.5
        weights = np.exp(kept - kept.max())
        return weights / weights.sum()

    first_probs = model_probs(1000, prompt)
    likely = np.argsort(first_probs)[-5:]
    # The drafts' distribution has other weights, and a token that the model never samples.
    draft_logits = np.full((2, VOCAB_SIZE), -20.0, np.float32)
    draft_logits[:, [*likely[1:], 3]] = rng.normal(size=(2, 5)).astype(np.float32)
    requests: list[Request] = []
    for number in range(1, 481):
        tokens = [int(rng.choice(VOCAB_SIZE, p=softmax(row))) for row in draft_logits]
        requests.append(
            Request(
                request_id=number,
                input_token_ids=prompt,
                max_tokens=2,
                sampling_config=SamplingConfig(**{**sampling, "seed": 77 * number}),
                external_draft_tokens_config=ExternalDraftTokensConfig(tokens=tokens, logits=draft_logits.tobytes()),
            )
        )
    for start in range(0, len(requests), 12):
        engine.serve(requests[start : start + 12])
    texts = [tokens_of(engine.results[number, 0]) for number in range(1, 481)]
    check_distribution([text[0] for text in texts], first_probs)
    commonest = int(np.argmax(first_probs))
    seconds = [text[1] for text in texts if text[0] == commonest]
    check_distribution(seconds, model_probs(1001, [*prompt, commonest]))
    engine.runner.close()


def check_distribution(tokens: list[int], probs: np.ndarray) -> None:
    assert all(probs[token] > 0 for token in tokens)
    expected = len(tokens) * probs[probs > 0]
    observed = np.array([tokens.count(token) for token in np.flatnonzero(probs)])
    assert ((observed - expected) ** 2 / expected).sum() < 18.5, "as in all but 0.1 % of fair draws among five"
