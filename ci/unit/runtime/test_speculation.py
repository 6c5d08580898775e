"""Drafts change no token: the same requests on a real network, with drafts and without.

Right, half right and wrong drafts of the request, prompt lookup and lookahead decoding; greedy and random, with every
option of sampling that allows drafts; prompts in chunks, shared prefixes, pauses, several sequences; padded as on a
GPU.

Run: pytest ci/unit/runtime/test_speculation.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from model_driver import launch
from msgspec import structs
from network_engine import MAX_SEQ_LEN, Engine
from tiny_checkpoints import make_checkpoint, make_prompt

from inflight.config import SchedulerPolicy
from inflight.models.config import ModelConfig
from inflight.output_config import OutputConfig
from inflight.request import Request
from inflight.result import PerfMetrics, Result, join_tensors
from inflight.runtime import step_sizes
from inflight.sampling_config import SamplingConfig
from inflight.scheduler_output import NewSequence, RowWork, SchedulerOutput
from inflight.speculative_decoding import ExternalDraftTokensConfig, LookaheadDecodingConfig, NGramDecodingConfig

pytestmark = pytest.mark.slow

LOOKUP = NGramDecodingConfig(max_draft_len=8, max_matching_ngram_size=2)
NO_LOOKUP = NGramDecodingConfig(max_draft_len=0)
VOCAB_SIZE = 128


@pytest.fixture(scope="module", params=["qwen3", "qwen3_5"], ids=["keys and values", "states of sequences"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"), request.param).folder


def make_request(number: int, prompt: list[int], max_tokens: int, **options: Any) -> Request:
    sampling = SamplingConfig(**options.pop("sampling", {}))
    return Request(
        request_id=number, input_token_ids=prompt, max_tokens=max_tokens, sampling_config=sampling, **options
    )


RANDOM = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.01, "seed": 5}
PENALISED = {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.2}
ALL_TENSORS = OutputConfig(
    return_log_probs=True, num_log_probs=3, return_context_logits=True, return_generation_logits=True
)
REQUESTS = [
    make_request(1, make_prompt(9, seed=1), 40),
    make_request(2, make_prompt(21, seed=2), 30, sampling=RANDOM),
    make_request(3, make_prompt(7, seed=3), 25, output_config=OutputConfig(return_log_probs=True)),
    make_request(4, make_prompt(13, seed=4), 30, sampling={"no_repeat_ngram_size": 2}, bad_words=[[5], [9, 12]]),
    make_request(5, make_prompt(11, seed=5), 30, end_ids=list(range(0, 128, 5)), sampling={"min_tokens": 9}),
    make_request(6, make_prompt(5, seed=6), 30, sampling={**RANDOM, "logit_bias": {3: 2.0, 7: -5.0}}),
    make_request(7, make_prompt(17, seed=7), 20, output_config=ALL_TENSORS, sampling=RANDOM),
    make_request(8, make_prompt(8, seed=8) * 3, 38, streaming=True),
    make_request(9, make_prompt(21, seed=2), 20, sampling={**RANDOM, "seed": 6}, num_return_sequences=3),
    make_request(11, make_prompt(15, seed=11), 40, sampling=PENALISED),
    make_request(12, make_prompt(6, seed=12), 40, sampling={**RANDOM, **PENALISED, "logit_bias": {3: 30.0, 7: 30.0}}),
    make_request(10, make_prompt(6, seed=10), 50, sampling={"logit_bias": {3: 90.0, 7: 90.0}}),  # only these two tokens
]


def serve(
    folder: Path, requests: list[Request], *, num_blocks: int = 200, policy: str = "guaranteed_no_evict"
) -> dict[tuple[int, int], list[Result]]:
    engine = Engine(folder, policy=SchedulerPolicy(policy), num_blocks=num_blocks, max_num_tokens=24, max_batch_size=12)
    engine.serve(requests)
    engine.runner.close()
    assert engine.kv_cache.num_free_blocks == num_blocks
    return engine.results


def tokens_of(results: list[Result]) -> list[int]:
    return [token for result in results for token in result.output_token_ids]


def metrics_of(results: dict[tuple[int, int], list[Result]], number: int) -> PerfMetrics:
    found = [
        each.request_perf_metrics for (request_id, _), all_ in results.items() if request_id == number for each in all_
    ]
    return next(metrics for metrics in found if metrics is not None)


@pytest.fixture(scope="module")
def plain(folder: Path) -> dict[tuple[int, int], list[Result]]:
    """Each request alone, without drafts."""
    return {key: results for request in REQUESTS for key, results in serve(folder, [request]).items()}


def with_drafts(request: Request, kind: str, plain: dict[tuple[int, int], list[Result]]) -> Request:
    """`kind`: how many of the given drafts are right, or another source of them."""
    if kind == "lookahead":
        return structs.replace(request, lookahead_config=LookaheadDecodingConfig())
    if kind == "lookup":
        return structs.replace(request, ngram_config=LOOKUP)
    tokens = tokens_of(plain[request.request_id, 0])
    num_right = {"right": len(tokens), "half right": len(tokens) // 2, "wrong": 1}[kind]
    drafts = [*tokens[:num_right], *((token + 1) % VOCAB_SIZE for token in tokens[num_right:])]
    return structs.replace(request, external_draft_tokens_config=ExternalDraftTokensConfig(tokens=drafts))


def check_equal(found: dict[tuple[int, int], list[Result]], plain: dict[tuple[int, int], list[Result]]) -> None:
    assert found.keys() == plain.keys()
    for key, expected in plain.items():
        results = found[key]
        assert tokens_of(results) == tokens_of(expected), key
        assert results[-1].finish_reason is expected[-1].finish_reason
        log_probs = [value for result in results for value in result.log_probs]
        assert log_probs == pytest.approx([value for result in expected for value in result.log_probs], abs=1e-4)
        tensors, wanted = join_tensors(results), join_tensors(expected)
        assert tensors.keys() == wanted.keys()
        for name, array in tensors.items():
            np.testing.assert_allclose(array, wanted[name], atol=1e-4, err_msg=name)


@pytest.mark.parametrize("kind", ["right", "half right", "wrong", "lookup", "lookahead"])
@pytest.mark.parametrize("memory", ["ample", "short"])
def test_drafts_change_nothing_but_the_number_of_steps(
    folder: Path, plain: dict[tuple[int, int], list[Result]], kind: str, memory: str
) -> None:
    requests = [with_drafts(request, kind, plain) for request in REQUESTS]
    if memory == "ample":
        found = serve(folder, requests)
    else:
        found = serve(folder, requests, num_blocks=44, policy="max_utilization")
    check_equal(found, plain)


def test_some_requests_with_drafts_beside_others_without(
    folder: Path, plain: dict[tuple[int, int], list[Result]]
) -> None:
    kinds = [
        "right",
        "none",
        "half right",
        "lookup",
        "none",
        "lookahead",
        "right",
        "none",
        "none",
        "wrong",
        "lookahead",
    ]
    requests = [
        request if kind == "none" else with_drafts(request, kind, plain)
        for request, kind in zip(REQUESTS, [*kinds, "lookup"], strict=True)
    ]
    check_equal(serve(folder, requests), plain)


def test_padded_as_on_a_gpu(
    folder: Path, plain: dict[tuple[int, int], list[Result]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_sizes, "PADDED_DEVICES", {"cpu"})
    check_equal(serve(folder, [with_drafts(request, "half right", plain) for request in REQUESTS]), plain)


def test_right_drafts_save_steps_and_are_reported(folder: Path, plain: dict[tuple[int, int], list[Result]]) -> None:
    """A request alone: the batch has room for eleven drafts a step."""
    request = REQUESTS[0]
    found = serve(folder, [with_drafts(request, "right", plain)])
    final, metrics = found[1, 0][-1], metrics_of(found, 1)
    assert metrics.total_draft_tokens == metrics.total_accepted_draft_tokens > 30 and metrics.acceptance_rate == 1.0
    assert final.decoding_iter == 40 - metrics.total_accepted_draft_tokens
    nothing = metrics_of(plain, 1)
    assert nothing.total_draft_tokens == 0 and nothing.acceptance_rate == 0.0


def test_text_that_repeats_itself_is_looked_up(folder: Path, plain: dict[tuple[int, int], list[Result]]) -> None:
    found = serve(folder, [with_drafts(REQUESTS[-1], "lookup", plain)])
    check_equal(found, {(10, 0): plain[10, 0]})
    num_accepted = metrics_of(found, 10).total_accepted_draft_tokens
    # The text of the network with states repeats itself less.
    assert num_accepted > (10 if ModelConfig.load(folder).architecture == "Qwen3ForCausalLM" else 5)
    assert found[10, 0][-1].decoding_iter == 50 - num_accepted


def test_what_the_model_guesses_is_accepted(folder: Path, plain: dict[tuple[int, int], list[Result]]) -> None:
    found = serve(folder, [with_drafts(REQUESTS[-1], "lookahead", plain)])
    check_equal(found, {(10, 0): plain[10, 0]})
    metrics = metrics_of(found, 10)
    assert 0 < metrics.total_accepted_draft_tokens < metrics.total_draft_tokens


def test_cached_prefixes_hold_accepted_tokens_only(folder: Path, plain: dict[tuple[int, int], list[Result]]) -> None:
    """A second request continues the first's text, whose blocks were written with wrong drafts in between."""
    first = with_drafts(REQUESTS[0], "half right", plain)
    prompt = [*first.input_token_ids, *tokens_of(plain[1, 0])]
    second = make_request(20, prompt, 12)
    assert len(prompt) + 12 < MAX_SEQ_LEN
    engine = Engine(folder, policy=SchedulerPolicy.GUARANTEED_NO_EVICT, num_blocks=100, max_num_tokens=24)
    engine.serve([first])
    engine.serve([second])
    engine.runner.close()
    metrics = metrics_of(engine.results, 20)
    assert metrics.kv_cache_reused_blocks == (len(prompt) - 1) // 4
    assert engine.tokens(20) == tokens_of(serve(folder, [second])[20, 0])


def test_rejected_tokens_are_not_taken_from_who_has_the_row_next(folder: Path) -> None:
    """A sequence ends while its drafts are verified, and another takes its row before the host has seen the result."""
    engine = Engine(folder, policy=SchedulerPolicy.GUARANTEED_NO_EVICT, num_blocks=40, max_num_tokens=24)
    runner, sampling = engine.runner, SamplingConfig(frequency_penalty=50.0)

    def place(prompt: list[int], first_block: int) -> SchedulerOutput:
        new = NewSequence(
            row=0,
            token_ids=prompt,
            num_prompt_tokens=len(prompt),
            block_ids=list(range(first_block, first_block + 8)),
            sampling_config=sampling,
        )
        return SchedulerOutput(
            new_sequences=[new], rows=[RowWork(row=0, start=0, num_tokens=len(prompt), token_ids=prompt)]
        )

    def decode(start: int) -> list[int]:
        work = RowWork(row=0, start=start, num_tokens=1)
        return runner.collect(launch(runner, SchedulerOutput(new_sequences=[], rows=[work]))).token_ids[0]

    first, second = make_prompt(9, seed=1), make_prompt(7, seed=2)
    token = runner.collect(launch(runner, place(second, 0))).token_ids[0]
    expected = [token, decode(7), decode(8)]
    token = runner.collect(launch(runner, place(first, 8))).token_ids[0]
    work = RowWork(row=0, start=9, num_tokens=4, token_ids=[*token, 1, 2, 3], num_sampled=4, is_chosen=True)
    verifying = launch(runner, SchedulerOutput(new_sequences=[], rows=[work]))
    replacing = launch(runner, place(second, 16))
    assert len(runner.collect(verifying).token_ids[0]) == 1, "the drafts were meant to be wrong"
    assert [runner.collect(replacing).token_ids[0], decode(7), decode(8)] == expected
    runner.close()


def test_sampled_tokens_behind_accepted_drafts_have_their_distribution(folder: Path) -> None:
    """Chi-square over many seeds, of the third token: biases force the first two, which are drafted, with a third."""
    prompt, forced = make_prompt(9, seed=1), [7, 8]
    sampling = {"temperature": 1.5, "top_k": 6, "logit_bias": {7: 600.0, 8: 300.0}, "no_repeat_ngram_size": 1}
    draft = ExternalDraftTokensConfig(tokens=[*forced, 9])
    engine = Engine(
        folder, policy=SchedulerPolicy.GUARANTEED_NO_EVICT, num_blocks=100, max_num_tokens=24, max_batch_size=12
    )
    for number in range(1, 121):
        seeded = {**sampling, "seed": 1000 * number}
        request = make_request(
            number, prompt, 3, sampling=seeded, num_return_sequences=4, external_draft_tokens_config=draft
        )
        engine.serve([request])
        assert metrics_of(engine.results, number).total_accepted_draft_tokens >= 4
    engine.runner.close()
    texts = [tokens_of(results) for results in engine.results.values()]
    assert len(texts) == 480 and all(text[:2] == forced for text in texts)

    output = OutputConfig(return_generation_logits=True)
    probe = serve(folder, [make_request(1, [*prompt, *forced], 1, output_config=output)])
    logits = join_tensors(probe[1, 0])["generation_logits"][0].astype(np.float64)
    logits[[*prompt, *forced]] = -np.inf
    likeliest = np.argsort(logits)[-6:]
    weights = np.exp((logits[likeliest] - logits.max()) / 1.5)
    expected = len(texts) * weights / weights.sum()
    thirds = [text[2] for text in texts]
    assert set(thirds) <= set(likeliest.tolist())
    observed = np.array([thirds.count(token) for token in likeliest.tolist()])
    assert ((observed - expected) ** 2 / expected).sum() < 20.5, "as in all but 0.1 % of fair draws among six"
