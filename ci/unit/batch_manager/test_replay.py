"""A request whose client has some tokens already goes on as if nothing had been; the client gets only new tokens."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from fake_network import log_prob_of
from harness import Harness, make_request
from replays import replay_after

from inflight.config import SchedulerPolicy
from inflight.errors import InvalidRequest
from inflight.replay import DeliveredSequence, Replay
from inflight.request import Request
from inflight.result import FinishReason, Result


def replayed(request: Request, output: list[int], cut: int) -> Request:
    generated = output[:cut]
    log_prob = sum(map(log_prob_of, generated)) if request.output_config.return_log_probs else 0.0
    return msgspec.structs.replace(request, replay=replay_after(generated, cum_log_prob=log_prob))


def undisturbed(request: Request) -> tuple[list[int], Result]:
    harness = Harness(max_seq_len=40)
    harness.serve(request)
    return harness.tokens(request.request_id), harness.final(request.request_id)


def last_tokens(request: Request, start: int, stop: int) -> list[int]:
    return undisturbed(request)[0][start:stop]


def cases() -> dict[str, Request]:
    plain = make_request(1, 6, 12)
    word = last_tokens(plain, 3, 6)
    return {
        "length": plain,
        "sampled": make_request(1, 6, 12, seed=7),
        "log probs": make_request(1, 6, 12, log_probs=True),
        "max_seq_len": make_request(1, 33, 30),
        "end": make_request(1, 6, 12, end_ids=last_tokens(plain, 5, 6)),
        "min_tokens": make_request(1, 6, 12, end_ids=last_tokens(plain, 1, 5), min_tokens=7),
        "stop word": make_request(1, 6, 12, stop_words=[word]),
        "stop word after min_tokens": make_request(1, 6, 12, stop_words=[word], min_tokens=5),
    }


@pytest.mark.parametrize("name", cases())
@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize("chunked", [True, False])
def test_the_continuation_is_the_undisturbed_one(name: str, streaming: bool, chunked: bool) -> None:
    request = msgspec.structs.replace(cases()[name], streaming=streaming)
    output, final = undisturbed(request)
    for cut in range(1, len(output)):
        harness = Harness(max_seq_len=40, max_num_tokens=34, enable_chunked_context=chunked)
        harness.submit(make_request(2, 9, 14), replayed(request, output, cut))
        harness.run_until_idle()
        assert harness.tokens(1) == output[cut:]
        assert harness.reason(1) is final.finish_reason
        assert harness.final(1).cum_log_prob == pytest.approx(final.cum_log_prob)
        log_probs = [value for result in harness.results(1) for value in result.log_probs]
        assert log_probs == ([log_prob_of(token) for token in output[cut:]] if name == "log probs" else [])
        assert harness.tokens(2) == harness.expected(2)


def test_the_ends_of_the_cases_differ() -> None:
    reasons = {name: undisturbed(request)[1].finish_reason for name, request in cases().items()}
    assert reasons["end"] is FinishReason.END_ID and reasons["stop word"] is FinishReason.STOP_WORDS
    assert reasons["length"] is reasons["max_seq_len"] is FinishReason.LENGTH


@pytest.mark.parametrize(("cut", "num_cached"), [(0, 4), (3, 0)])
def test_what_was_cached_for_a_client_that_has_tokens_was_told_it_with_these(cut: int, num_cached: int) -> None:
    request = make_request(1, 6, 12)
    harness = Harness(max_seq_len=40)
    harness.serve(make_request(2, request.input_token_ids, 1))
    harness.serve(replayed(request, undisturbed(request)[0], cut))
    assert harness.results(1)[0].num_cached_tokens == num_cached


def test_a_replayed_request_may_be_paused() -> None:
    harness = Harness(policy=SchedulerPolicy.MAX_UTILIZATION, num_blocks=6, max_num_tokens=64)
    requests = [make_request(1, 8, 14), make_request(2, 8, 12)]
    outputs = {request.request_id: undisturbed(request)[0] for request in requests}
    harness.submit(*(replayed(request, outputs[request.request_id], 3) for request in requests))
    num_paused = 0
    while harness.queue or harness.manager.num_active_requests or not harness.responses:
        harness.step()
        num_paused += harness.scheduler.num_paused
    assert num_paused > 0
    assert {request_id: harness.tokens(request_id) for request_id in (1, 2)} == {i: outputs[i][3:] for i in (1, 2)}


@pytest.mark.parametrize("chunked", [True, False])
def test_each_sequence_goes_on_from_its_own_place_and_what_has_ended_is_not_computed(chunked: bool) -> None:
    request = make_request(1, 9, 12, seed=7, num_return_sequences=3, streaming=True, log_probs=True)
    whole = Harness(max_seq_len=40)
    whole.serve(request)
    outputs = [whole.tokens(1, index) for index in range(3)]
    assert len({tuple(output) for output in outputs}) == 3
    for cuts in ((0, 5, 12), (12, 0, 3), (3, 12, 12), (0, 0, 1)):
        delivered = [
            DeliveredSequence(
                token_ids=output[:cut],
                cum_log_prob=sum(map(log_prob_of, output[:cut])),
                num_iterations=cut,
                is_finished=cut == 12,
            )
            for output, cut in zip(outputs, cuts, strict=True)
        ]
        harness = Harness(max_seq_len=40, max_num_tokens=16, enable_chunked_context=chunked)
        harness.submit(make_request(2, 9, 14), msgspec.structs.replace(request, replay=Replay(sequences=delivered)))
        harness.run_until_idle()
        assert [harness.tokens(1, index) for index in range(3)] == [
            output[cut:] for output, cut in zip(outputs, cuts, strict=True)
        ]
        for index, cut in enumerate(cuts):
            results = harness.results(1, index)
            assert len(results) == 12 - cut
            if not results:
                continue
            result = results[-1]
            assert result.is_sequence_final and result.decoding_iter == 12
            assert result.cum_log_prob == pytest.approx(sum(map(log_prob_of, outputs[index])))
        assert harness.num_finals(1) == 1 and harness.tokens(2) == harness.expected(2)


@pytest.mark.parametrize("name", ["length", "end", "stop word"])
def test_a_request_that_was_complete_ends_without_a_new_token(name: str) -> None:
    request = cases()[name]
    output, final = undisturbed(request)
    harness = Harness(max_seq_len=40)
    harness.submit(replayed(request, output, len(output)), make_request(2, 5, 4))
    harness.run_until_idle()
    assert harness.tokens(1) == [] and harness.num_finals(1) == 1
    assert harness.reason(1) is final.finish_reason
    assert harness.tokens(2) == harness.expected(2)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"replay": replay_after([1] * 6)}, "replay has 6 tokens"),
        ({"replay": replay_after([97])}, "replay holds a token id outside"),
        ({"replay": replay_after([1], cum_log_prob=float("nan"))}, "must be finite"),
    ],
)
def test_tokens_that_cannot_have_been_generated_are_refused(options: dict[str, Any], words: str) -> None:
    harness = Harness()
    harness.submit(make_request(1, 4, 5, **options), make_request(2, 4, 5))
    harness.run_until_idle()
    assert isinstance(harness.error(1), InvalidRequest) and words in str(harness.error(1))
    assert harness.tokens(2) == harness.expected(2)


def test_a_request_that_is_no_replay_is_as_short_on_the_wire_as_before() -> None:
    assert b"replay" not in msgspec.msgpack.encode(make_request(1, 4, 5))
