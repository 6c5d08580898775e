"""Who awaits responses of one request, of several, or of any."""

from __future__ import annotations

import threading

import pytest
from list_front import ListFront, submit, token

from inflight.errors import InvalidRequest
from inflight.executor.front.engine_state import EngineState
from inflight.request import Request
from inflight.result import FinishReason, Response


def test_responses_can_be_awaited_for_one_request(front: ListFront) -> None:
    first, second = submit(front), submit(front)
    front.say(token(first), token(second), token(first, FinishReason.LENGTH))
    assert [front.get_num_responses_ready(id_) for id_ in (first, second, None)] == [2, 1, 3]
    assert [response.is_final for response in front.await_responses(first)] == [False, True]
    assert [front.get_num_responses_ready(id_) for id_ in (first, second, None)] == [0, 1, 1]
    assert [response.request_id for response in front.await_responses()] == [second]
    assert front.await_responses(second, timeout=0) == []


def test_a_listener_hears_all_responses_that_have_come_at_once(front: ListFront) -> None:
    heard: list[list[tuple[int, bool]]] = []
    first, second = submit(front), submit(front)
    front.say(token(first))
    front.listen(lambda responses: heard.append([(each.request_id, each.is_final) for each in responses]))
    assert heard == [[(first, False)]], "what was there already"
    front.say(token(first), token(second))
    front.say(token(second, FinishReason.LENGTH))
    front.lose()
    assert heard[1:] == [[(first, False), (second, False)], [(second, True)]]
    waiting = submit(front)
    front.cancel_request(waiting)
    assert heard[3:] == [[(waiting, True)]]
    front.lose(EngineState.DOWN)
    assert heard[4:] == [[(first, True)]]
    assert front.get_num_responses_ready() == 0


def test_an_id_is_not_awaited_twice_in_one_call(front: ListFront) -> None:
    first = submit(front)
    front.say(token(first))
    with pytest.raises(InvalidRequest, match="an id is given twice"):
        front.await_responses([first, first])
    assert len(front.await_responses(first)) == 1, "its response is still there"


@pytest.mark.parametrize(("request_id", "sentence"), [(-1, "request_id must be between 0"), (2**64, "wrong type")])
def test_an_id_that_is_no_uint64_is_refused(front: ListFront, request_id: int, sentence: str) -> None:
    with pytest.raises(InvalidRequest, match=sentence):
        front.enqueue_request(Request(request_id=request_id, input_token_ids=[1], max_tokens=1))
    assert front.sent == [] and front.num_requests_in_flight() == 0


def test_several_requests_are_awaited_until_each_has_an_answer(front: ListFront) -> None:
    ids = [submit(front) for _ in range(3)]
    front.say(token(ids[0]), token(ids[0]))
    answers: list[list[list[Response]]] = []
    thread = threading.Thread(target=lambda: answers.append(front.await_responses(ids)))
    thread.start()
    front.say(token(ids[2]))
    front.say(token(ids[1], FinishReason.LENGTH))
    thread.join(30)
    (answer,) = answers
    assert [[response.request_id for response in responses] for responses in answer] == [
        [ids[0], ids[0]],
        [ids[1]],
        [ids[2]],
    ]
    front.say(token(ids[0]))
    assert [len(responses) for responses in front.await_responses([ids[2], ids[0]], timeout=0.01)] == [0, 1]


def test_awaiting_what_will_never_come_is_an_error_at_once(front: ListFront) -> None:
    live, done = submit(front), submit(front)
    front.say(token(done, FinishReason.LENGTH))
    assert len(front.await_responses(done)) == 1
    for request_id in (done, 4711):
        (response,) = front.await_responses(request_id)
        assert response.request_id == request_id and response.is_final
        assert response.error_code == "INVALID_ARGUMENT" and "not in flight" in response.error_msg
    front.say(token(live))
    answers = front.await_responses([done, live])
    assert [[response.has_error for response in responses] for responses in answers] == [[True], [False]]


def test_whoever_awaits_one_request_hears_that_its_ranks_are_lost(front: ListFront) -> None:
    request_id = submit(front)
    answers: list[list[Response]] = []
    thread = threading.Thread(target=lambda: answers.append(front.await_responses(request_id)))
    thread.start()
    front.lose(EngineState.DOWN)
    thread.join(30)
    assert [[response.error_code for response in responses] for responses in answers] == [["UNAVAILABLE"]]
