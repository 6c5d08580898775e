"""The front half of every executor: the journal, and exactly one final response for each accepted request."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from list_front import LATER, ListFront, submit, token

from inflight.errors import DuplicateRequest, EngineUnavailable, InvalidRequest, QueueFull
from inflight.executor.front.engine_state import EngineState
from inflight.executor.wire.messages import FRONT_ID_SHIFT, MAX_FRONT_ID
from inflight.output_config import OutputConfig
from inflight.request import Request
from inflight.result import FinishReason, Response, Result
from inflight.sampling_config import SamplingConfig


def test_ids_carry_the_fronts_number_and_never_repeat(front: ListFront) -> None:
    before = [front.next_request_id() for _ in range(3)]
    front.lose()
    front.recover()
    after = [front.next_request_id() for _ in range(3)]
    assert len({*before, *after}) == 6
    (front_id,) = {id_ >> FRONT_ID_SHIFT for id_ in before + after}
    assert 1 <= front_id <= MAX_FRONT_ID


def test_responses_of_a_request_end_with_its_final_one(front: ListFront) -> None:
    request_id = submit(front)
    front.say(token(request_id), token(request_id, FinishReason.LENGTH))
    front.say(token(request_id), token(request_id, FinishReason.LENGTH))
    responses = front.await_responses(timeout=0)
    assert [response.is_final for response in responses] == [False, True]
    assert front.await_responses(timeout=0) == []
    assert front.num_requests_in_flight() == 0


def test_responses_to_unknown_requests_are_dropped(front: ListFront) -> None:
    front.say(token(12345), Response(request_id=9, error_msg="no", error_code="INTERNAL"))
    assert front.await_responses(timeout=0) == []


def test_a_second_request_with_a_live_id_is_refused_and_the_first_goes_on(front: ListFront) -> None:
    request_id = submit(front)
    with pytest.raises(DuplicateRequest):
        front.enqueue_request(Request(request_id=request_id, input_token_ids=[1], max_tokens=1))
    assert front.sent == [request_id]
    front.say(token(request_id, FinishReason.LENGTH))
    assert [response.has_error for response in front.await_responses(timeout=0)] == [False]


def test_an_id_may_be_used_again_after_its_end(front: ListFront) -> None:
    request_id = submit(front)
    front.say(token(request_id, FinishReason.LENGTH))
    front.enqueue_request(Request(request_id=request_id, input_token_ids=[1], max_tokens=1))
    assert front.num_requests_in_flight() == 1


def test_invalid_requests_reach_nobody(front: ListFront) -> None:
    with pytest.raises(InvalidRequest, match="outside the vocabulary"):
        submit(front, prompt=(100,))
    assert front.sent == []
    assert front.num_requests_in_flight() == 0


@pytest.mark.parametrize(
    "fields",
    [
        {"cache_salt": None},
        {"streaming": 1},
        {"input_token_ids": [1.5]},
        {"num_return_sequences": 1.5},
        {"request_id": 2**64},
        {"sampling_config": SamplingConfig(min_tokens=2**70)},
        {"output_config": OutputConfig(return_log_probs=None)},  # type: ignore[arg-type]
    ],
)
def test_a_field_of_a_wrong_type_is_refused_as_no_leader_would_answer_it(
    front: ListFront, fields: dict[str, Any]
) -> None:
    with pytest.raises(InvalidRequest, match="wrong type"):
        front.enqueue_request(Request(**{"input_token_ids": [1], "max_tokens": 2, **fields}))
    assert front.sent == []
    assert front.num_requests_in_flight() == 0


def test_a_full_engine_refuses_at_once_and_takes_again_after_an_end() -> None:
    front = ListFront(max_in_flight=2)
    front.start()
    first, _ = submit(front), submit(front)
    with pytest.raises(QueueFull, match="Exceeds maximum queue size"):
        submit(front)
    front.say(token(first, FinishReason.LENGTH))
    submit(front)
    assert front.num_requests_in_flight() == 2


def test_ranks_that_are_lost_for_good_give_every_request_in_flight_one_error(front: ListFront) -> None:
    ids = [submit(front) for _ in range(5)]
    front.say(token(ids[0]), token(ids[1], FinishReason.LENGTH))
    front.lose()
    front.lose(EngineState.DOWN)
    front.lose(EngineState.DOWN)
    front.say(*(token(id_, FinishReason.LENGTH) for id_ in ids))
    finals = [response for response in front.await_responses(timeout=0) if response.is_final]
    assert sorted(response.request_id for response in finals) == ids
    assert [response.error_code for response in finals if response.request_id != ids[1]] == ["UNAVAILABLE"] * 4
    assert not front.is_ready()


def test_while_the_ranks_are_brought_back_requests_wait(front: ListFront) -> None:
    front.lose()
    first, second = submit(front), submit(front)
    assert front.sent == [] and not front.is_ready()
    front.cancel_request(first)
    assert front.cancelled == []
    (refusal,) = front.await_responses(timeout=0)
    assert (refusal.request_id, refusal.error_code) == (first, "CANCELLED")
    front.recover()
    assert front.sent == [second]
    front.say(token(second, FinishReason.LENGTH))
    assert [response.request_id for response in front.await_responses(timeout=0)] == [second]


def test_those_that_wait_for_ranks_that_do_not_come_back_fail(front: ListFront) -> None:
    front.lose()
    waiting = submit(front)
    front.lose(EngineState.DOWN)
    assert front.is_down() and front.sent == []
    assert [response.request_id for response in front.await_responses(timeout=0)] == [waiting]


def test_while_the_ranks_are_down_requests_are_refused(front: ListFront) -> None:
    front.lose(EngineState.DOWN)
    with pytest.raises(EngineUnavailable):
        submit(front)
    front.recover(LATER)
    with pytest.raises(InvalidRequest):
        submit(front, prompt=tuple(range(10)))
    submit(front)
    assert front.is_ready()


def test_nothing_is_served_before_the_start() -> None:
    front = ListFront()
    assert not front.is_ready()
    with pytest.raises(EngineUnavailable):
        submit(front)


def test_only_requests_in_flight_are_cancelled(front: ListFront) -> None:
    live, done = submit(front), submit(front)
    front.say(token(done, FinishReason.LENGTH))
    for request_id in (live, done, 4711):
        front.cancel_request(request_id)
    assert front.cancelled == [live]


def test_sequences_are_cancelled_only_where_ranks_compute_them(front: ListFront) -> None:
    live, done = submit(front), submit(front)
    front.say(token(done, FinishReason.LENGTH))
    for request_id in (live, done, 4711):
        front.cancel_sequence(request_id, 1)
    front.lose()
    front.cancel_sequence(submit(front), 0)
    assert front.cancelled_sequences == [(live, 1)] and front.cancelled == []


def test_a_request_without_an_id_is_given_one(front: ListFront) -> None:
    first, second = front.enqueue_requests([Request(input_token_ids=[1], max_tokens=1) for _ in range(2)])
    assert front.sent == [first, second] and first != second
    assert front.enqueue_request(Request(request_id=7, input_token_ids=[1], max_tokens=1)) == 7


def test_several_requests_are_sent_all_or_none() -> None:
    front = ListFront(max_in_flight=2)
    front.start()
    good = Request(request_id=1, input_token_ids=[1], max_tokens=1)
    others = {
        InvalidRequest: [Request(request_id=2, input_token_ids=[], max_tokens=1)],
        DuplicateRequest: [good],
        QueueFull: [Request(request_id=number, input_token_ids=[1], max_tokens=1) for number in (2, 3)],
    }
    for error, requests in others.items():
        with pytest.raises(error):
            front.enqueue_requests([good, *requests])
        assert front.sent == [] and front.num_requests_in_flight() == 0
    assert front.enqueue_requests([]) == []


def test_each_response_repeats_the_clients_id(front: ListFront) -> None:
    ids = [
        front.enqueue_request(Request(input_token_ids=[1], max_tokens=9, client_id=client_id))
        for client_id in ("a", "", "c")
    ]
    front.say(*map(token, ids), token(ids[0], FinishReason.LENGTH))
    front.lose(EngineState.DOWN)
    heard = [(response.request_id, response.client_id) for response in front.await_responses()]
    assert sorted(heard) == sorted(
        [(ids[0], "a"), (ids[0], "a"), (ids[1], ""), (ids[1], ""), (ids[2], "c"), (ids[2], "c")]
    )


def test_all_generated_tokens_come_with_each_response_if_asked(front: ListFront) -> None:
    request = Request(
        input_token_ids=[1], max_tokens=9, streaming=True, return_all_generated_tokens=True, num_return_sequences=1
    )
    request_id = front.enqueue_request(request)

    def say(tokens: list[int], sequence_index: int, is_final: bool = False) -> None:
        result = Result(
            output_token_ids=tokens,
            log_probs=[-float(token) for token in tokens],
            sequence_index=sequence_index,
            is_final=is_final,
        )
        front.say(Response(request_id=request_id, result=result))

    say([1], 0)
    say([7], 1)
    say([2, 3], 0)
    say([4], 0, is_final=True)
    results = [response.result for response in front.await_responses()]
    assert [result.output_token_ids for result in results] == [[1], [7], [1, 2, 3], [1, 2, 3, 4]]
    assert [result.log_probs for result in results] == [[-1.0], [-7.0], [-1.0, -2.0, -3.0], [-1.0, -2.0, -3.0, -4.0]]


def test_a_front_is_a_context_manager() -> None:
    with ListFront() as front:
        assert front.is_ready() and front.can_enqueue_requests() and not front.is_participant()
        submit(front)
    assert not front.can_enqueue_requests()
    assert [response.error_code for response in front.await_responses()] == ["UNAVAILABLE"]


def test_shutdown_wakes_whoever_waits_and_answers_what_is_in_flight(front: ListFront) -> None:
    got: list[Response] = []
    ended = threading.Event()

    def fetch() -> None:
        while responses := front.await_responses():
            got.extend(responses)
        ended.set()

    thread = threading.Thread(target=fetch)
    thread.start()
    request_id = submit(front)
    front.shutdown()
    assert ended.wait(30)
    thread.join()
    assert [(response.request_id, response.error_code) for response in got] == [(request_id, "UNAVAILABLE")]
    with pytest.raises(EngineUnavailable, match="shut down"):
        submit(front)


def test_requests_that_race_with_the_loss_of_the_ranks_are_refused_or_answered_never_both(front: ListFront) -> None:
    accepted: list[int] = []
    barrier = threading.Barrier(5)

    def hammer() -> None:
        barrier.wait(30)
        for _ in range(300):
            try:
                accepted.append(submit(front))
            except EngineUnavailable:
                continue

    threads = [threading.Thread(target=hammer) for _ in range(4)]
    for thread in threads:
        thread.start()
    barrier.wait(30)
    for _ in range(200):
        front.lose(EngineState.DOWN)
        front.recover()
    for thread in threads:
        thread.join()
    front.lose(EngineState.DOWN)
    answered = [response.request_id for response in front.await_responses(timeout=0)]
    assert sorted(answered) == sorted(accepted)
