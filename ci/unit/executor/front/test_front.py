"""The front half of every executor: the journal, and exactly one final response for each accepted request."""

from __future__ import annotations

import threading

import pytest

from inflight.errors import DuplicateRequest, EngineUnavailable, InvalidRequest, QueueFull
from inflight.executor.front.front import EngineState, Front
from inflight.executor.wire.messages import FRONT_ID_SHIFT, MAX_FRONT_ID
from inflight.request import Request, RequestLimits
from inflight.result import FinishReason, Response, Result

LIMITS = RequestLimits(vocab_size=100, max_seq_len=16, max_input_len=15, kv_cache_tokens=160)
LATER = RequestLimits(vocab_size=100, max_seq_len=8, max_input_len=7, kv_cache_tokens=80)


class ListFront(Front):
    """Sends into lists."""

    def __init__(self, max_in_flight: int = 0) -> None:
        super().__init__()
        self.max_in_flight = max_in_flight
        self.sent: list[object] = []
        self.cancelled: list[int] = []

    def start(self) -> None:
        self._engine_ready(LIMITS, "cpu", self.max_in_flight)

    def lose(self, state: EngineState = EngineState.RELAUNCHING) -> None:
        self._engine_lost(state, "the ranks died")

    def recover(self, limits: RequestLimits = LIMITS) -> None:
        self._engine_ready(limits, "cpu", self.max_in_flight)

    def say(self, *responses: Response) -> None:
        self._deliver(responses)

    def shutdown(self) -> None:
        self._engine_lost(EngineState.CLOSED, "the engine was shut down")

    def _encode(self, request: Request) -> object:
        return request.request_id

    def _send_request(self, request_id: int, encoded: object) -> None:
        self.sent.append(encoded)

    def _send_cancel(self, request_id: int) -> None:
        self.cancelled.append(request_id)

    def _drop_unsent(self) -> None:
        self.sent.clear()

    def _wake(self) -> None:
        pass


@pytest.fixture
def front() -> ListFront:
    front = ListFront()
    front.start()
    return front


def submit(front: ListFront, prompt: tuple[int, ...] = (1, 2), max_tokens: int = 4) -> int:
    request_id = front.next_request_id()
    front.enqueue_request(Request(request_id=request_id, input_token_ids=list(prompt), max_tokens=max_tokens))
    return request_id


def token(request_id: int, finish: FinishReason = FinishReason.NOT_FINISHED) -> Response:
    final = finish is not FinishReason.NOT_FINISHED
    return Response(request_id=request_id, result=Result(output_token_ids=[5], finish_reason=finish, is_final=final))


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
    front.say(token(12345), Response(request_id=9, error="no", error_code="INTERNAL"))
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


def test_a_full_engine_refuses_at_once_and_takes_again_after_an_end() -> None:
    front = ListFront(max_in_flight=2)
    front.start()
    first, _ = submit(front), submit(front)
    with pytest.raises(QueueFull, match="Exceeds maximum queue size"):
        submit(front)
    front.say(token(first, FinishReason.LENGTH))
    submit(front)
    assert front.num_requests_in_flight() == 2


def test_lost_ranks_give_every_request_in_flight_one_error(front: ListFront) -> None:
    ids = [submit(front) for _ in range(5)]
    front.say(token(ids[0]), token(ids[1], FinishReason.LENGTH))
    front.lose()
    front.lose()
    front.say(*(token(id_, FinishReason.LENGTH) for id_ in ids))
    finals = [response for response in front.await_responses(timeout=0) if response.is_final]
    assert sorted(response.request_id for response in finals) == ids
    assert [response.error_code for response in finals if response.request_id != ids[1]] == ["UNAVAILABLE"] * 4
    assert not front.is_ready()


def test_while_the_ranks_are_brought_back_requests_wait(front: ListFront) -> None:
    front.lose()
    first, second = submit(front), submit(front)
    assert front.sent == [first, second] and not front.is_ready()
    front.cancel_request(first)
    assert front.cancelled == []
    (refusal,) = front.await_responses(timeout=0)
    assert (refusal.request_id, refusal.error_code) == (first, "CANCELLED")
    front.recover()
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


def test_the_newest_statistics_are_told_once(front: ListFront) -> None:
    assert front.get_latest_iteration_stats() is None
    front._report_stats("1", 7)
    front._report_stats("2", 3)
    assert front.get_latest_iteration_stats() == "2"
    assert front.get_latest_iteration_stats() is None
    assert front.num_requests_queued() == 3
    front.lose()
    assert front.num_requests_queued() == 0


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
