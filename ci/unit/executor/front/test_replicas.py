"""An engine of several replicas behind one front: who gets a request, and what becomes of it when its replica dies.

pytest ci/unit/executor/front/test_replicas.py
"""

from __future__ import annotations

from typing import Any

import pytest
from list_front import LIMITS, ListFront
from msgspec import structs

from inflight.batch_manager_stats import BatchManagerStats
from inflight.config import EngineConfig
from inflight.errors import EngineUnavailable, QueueFull
from inflight.executor.front.engine_state import EngineState
from inflight.executor.rank.leader.request_book import RequestBook
from inflight.lora import LoraConfig, LoRARequest
from inflight.request import Request
from inflight.request_limits import RequestLimits
from inflight.result import FinishReason, Response, Result

WIDE: RequestLimits = structs.replace(LIMITS, max_seq_len=64, max_input_len=63, max_batch_size=4, num_adapter_slots=2)


def start(num_replicas: int = 2, max_in_flight: int = 0, **options: Any) -> ListFront:
    front = ListFront(max_in_flight, EngineConfig(tokens_per_block=4, **options), num_replicas)
    for replica in range(num_replicas):
        front.recover(WIDE, replica)
    return front


def submit(front: ListFront, prompt: list[int] | None = None, **fields: Any) -> int:
    return front.enqueue_request(Request(input_token_ids=prompt or [1], max_tokens=9, streaming=True, **fields))


def say(front: ListFront, request_id: int, tokens: list[int], **fields: Any) -> None:
    front.say(Response(request_id=request_id, result=Result(output_token_ids=tokens, **fields)))


def end(front: ListFront, request_id: int) -> None:
    say(front, request_id, [9], is_final=True, is_sequence_final=True, finish_reason=FinishReason.LENGTH)


def finals(front: ListFront) -> list[Response]:
    return [response for response in front.await_responses(timeout=0) if response.is_final]


def test_requests_are_shared_and_a_conversation_comes_back_to_its_replica() -> None:
    front = start()
    talks = [[number] * 12 for number in (1, 2, 3, 4)]
    places = {}
    for talk in talks:
        request_id = submit(front, talk)
        places[talk[0]] = front.replica_of[request_id]
    assert sorted(places.values()) == [0, 0, 1, 1]
    for request_id in list(front.messages):
        end(front, request_id)
    for talk in reversed(talks):
        request_id = submit(front, [*talk, 9, 5, 6])
        assert front.replica_of[request_id] == places[talk[0]]
        end(front, request_id)


def test_streams_of_a_dead_replica_go_on_at_once_and_those_of_others_notice_nothing() -> None:
    front = start()
    first, second, queued = (submit(front, [number] * 5) for number in (1, 2, 3))
    assert [front.replica_of[id_] for id_ in (first, second, queued)] == [0, 1, 0]
    for request_id in (first, second):
        front._note_started([request_id])
        say(front, request_id, [5, 6])
    front.lose(replica=0)
    assert front.is_ready() and not front.is_relaunching() and front.ready_replicas() == [False, True]
    assert front.sent == [second, first, queued]
    replay = front.messages[first].replay
    assert replay is not None and replay.sequences[0].token_ids == [5, 6] and not replay.is_suspect
    assert front.messages[second].replay is None
    assert (front.num_replays(), front.num_pauses(), front.num_losses()) == (2, 0, 1)
    assert front.replica_of[submit(front)] == 1
    front.recover(WIDE, 0)
    assert front.replica_of[submit(front)] == 0, "it has the least to do"


def test_a_request_goes_on_wherever_it_is_cancelled() -> None:
    front = start()
    requests = [submit(front) for _ in range(2)]
    say(front, requests[0], [5])
    front.lose(replica=0)
    front.cancel_request(requests[0])
    assert front.cancelled == [requests[0]] and front.num_requests_in_flight() == 2


def test_all_wait_when_no_replica_serves_and_the_first_that_is_back_gets_them() -> None:
    front = start()
    requests = [submit(front) for _ in range(4)]
    for replica in (0, 1):
        front.lose(replica=replica)
    assert front.is_relaunching() and front.num_pauses() == 1
    later = submit(front)
    assert front.sent == []
    front.recover(WIDE, 1)
    assert front.sent == [*requests, later] and {front.replica_of[id_] for id_ in front.sent} == {1}


def test_the_first_that_is_back_takes_all_that_was_accepted_however_full_it_is() -> None:
    front = start(max_in_flight=1)
    for replica in (0, 1):
        front.lose(replica=replica)
    requests = [submit(front) for _ in range(2)]
    with pytest.raises(QueueFull):
        submit(front)
    front.recover(WIDE, 1)
    leader = RequestBook(max_in_flight=1)
    for request_id in requests:
        leader.submit(b"front", front.messages[request_id])
    assert leader.num_in_flight == 2 and leader.collect_responses() == {}


# -- what replicas die of ----------------------------------------------------------------------------------------------


def test_what_a_replica_dies_of_at_once_never_reaches_another() -> None:
    """It waits for the replica that died, and is alone there the third time; who had a token goes on elsewhere."""
    front = start(3)
    stream, other, third, poison = (submit(front) for _ in range(4))
    assert [front.replica_of[id_] for id_ in (stream, other, third, poison)] == [0, 1, 2, 0]
    front._note_started([stream, poison])
    say(front, stream, [5])
    front.lose(replica=0)
    assert front.replica_of[stream] in (1, 2)
    for death in (1, 2):
        assert poison not in front.sent, "the healthy ones do not get it"
        front.recover(WIDE, 0)
        assert front.replica_of[poison] == 0
        replay = front.messages[poison].replay
        assert replay is not None and replay.is_suspect == (death == 2)
        front._note_started([poison])
        front.lose(replica=0)
    (error,) = finals(front)
    assert error.request_id == poison and "3 times in a row" in error.error_msg
    assert front.ready_replicas() == [False, True, True] and front.num_requests_in_flight() == 3


def test_who_has_lived_through_a_step_goes_on_elsewhere_though_nobody_has_seen_its_tokens() -> None:
    """A request that is not streamed: two heartbeats since it has begun say so."""
    front = start()
    request_id = front.enqueue_request(Request(input_token_ids=[1], max_tokens=9))
    front._note_heartbeat(0)
    front._note_started([request_id])
    front._note_heartbeat(0)
    front._note_heartbeat(1)
    front.lose(replica=0)
    assert request_id not in front.sent
    front.recover(WIDE, 0)
    front._note_started([request_id])
    for _ in range(2):
        front._note_heartbeat(0)
    front.lose(replica=0)
    assert front.replica_of[request_id] == 1


def test_what_runs_on_ranks_that_are_replaced_is_not_blamed() -> None:
    front = start(journal_max_replays=1)
    request_id = submit(front)
    for replica in (0, 1) * 4:
        front._note_started([request_id])
        front._replica_lost(EngineState.RELAUNCHING, "replaced", replica, planned=True)
        front.recover(WIDE, replica)
        replay = front.messages[request_id].replay
        assert front.replica_of[request_id] == 1 - replica and replay is not None and not replay.is_suspect
    assert (front.num_losses(), front.num_replays()) == (0, 8)
    front.lose(replica=front.replica_of[request_id])
    assert not finals(front), "only deaths count"


def test_what_is_too_long_to_go_on_is_told_that_its_ranks_were_replaced() -> None:
    front = start(journal_max_tokens=1)
    submit(front, [1, 2])
    front._replica_lost(EngineState.RELAUNCHING, "replaced", 0, planned=True)
    (error,) = finals(front)
    assert "ranks were replaced" in error.error_msg and "died" not in error.error_msg


def test_what_replicas_die_of_later_costs_two_of_them_at_most() -> None:
    front = start(3)
    poison = submit(front)
    front._note_started([poison])
    say(front, poison, [5])
    front.lose(replica=0)
    second = front.replica_of[poison]
    assert second != 0
    front._note_started([poison])
    front.lose(replica=second)
    assert poison not in front.sent and front.is_ready()
    front.recover(WIDE, second)
    replay = front.messages[poison].replay
    assert front.replica_of[poison] == second and replay is not None and replay.is_suspect


def test_a_suspect_runs_alone_elsewhere_if_its_replica_cannot_be_brought_back() -> None:
    front = start()
    suspect = submit(front)
    front._note_started([suspect])
    front.lose(replica=0)
    assert suspect not in front.sent
    front.lose(EngineState.DOWN, replica=0)
    replay = front.messages[suspect].replay
    assert front.replica_of[suspect] == 1 and replay is not None and replay.is_suspect
    assert front.is_ready() and not front.is_down()
    say(front, suspect, [5])
    front.lose(EngineState.RELAUNCHING, replica=1)
    front.lose(EngineState.DOWN, replica=1)
    assert front.is_down() and [error.error_code for error in finals(front)] == ["UNAVAILABLE"]
    with pytest.raises(EngineUnavailable):
        submit(front)


# -- bounds ------------------------------------------------------------------------------------------------------------


def test_the_bounds_of_replicas_add_up_and_one_that_is_full_gets_no_more() -> None:
    front = start(max_in_flight=2)
    long = [submit(front, [number] * 40) for number in (1, 2)]
    # The router alone would send all of these to the one that has fewer tokens.
    end(front, long[0])
    short = [submit(front) for _ in range(3)]
    assert sorted(front.replica_of[id_] for id_ in [long[1], *short]) == [0, 0, 1, 1]
    with pytest.raises(QueueFull):
        submit(front)
    front.lose(replica=0)
    with pytest.raises(QueueFull):
        submit(front)
    assert front.num_requests_in_flight() == 4, "those in flight are not refused"


def test_a_request_must_fit_into_every_replica() -> None:
    front = start()
    front.recover(structs.replace(WIDE, kv_cache_tokens=80), replica=1)
    assert front.limits.kv_cache_tokens == 80


# -- adapters ----------------------------------------------------------------------------------------------------------

WEIGHTS = LoraConfig(7, bytes(64), [(0, 0, 1)])


def orders(front: ListFront) -> list[tuple[int, Request]]:
    """(replica, order) of each order that nobody waits for."""
    return [
        (front.replica_of[id_], front.messages[id_])
        for id_ in front.messages
        if id_ not in front._journal and front.messages[id_].lora_order
    ]


def test_what_one_replica_is_told_of_an_adapter_the_others_are_told_as_well() -> None:
    front = start()
    first = submit(front, lora_config=WEIGHTS)
    ((replica, order),) = orders(front)
    assert (replica, order.lora_order, order.lora_config) == (1, "load", WEIGHTS)
    end(front, first)
    submit(front, [1] * 5)
    later = submit(front, lora_config=LoraConfig(7))
    assert front.replica_of[later] == 1
    assert front.messages[later].lora_config == WEIGHTS, "its own front says it again where it has not itself"
    unload = submit(front, lora_config=LoraConfig(7), lora_order="unload")
    assert [order.lora_order for _, order in orders(front)] == ["load", "unload"]
    assert {front.replica_of[unload], orders(front)[-1][0]} == {0, 1}


def test_a_request_that_only_names_an_adapter_tells_nobody_else() -> None:
    front = start()
    submit(front, lora_request=LoRARequest("tale"))
    assert orders(front) == []


# -- statistics --------------------------------------------------------------------------------------------------------


def stats(**values: int) -> str:
    given = {name: values.get(name, 0) for name in BatchManagerStats.__struct_fields__}
    return structs.replace(
        BatchManagerStats(**{**given, "timestamp": f"11-22-2026 10:00:0{values.get('second', 0)}.000000"}),
        tokens_per_kv_cache_block=16,
    ).to_json()


def test_statistics_of_replicas_add_up_and_those_of_a_dead_one_are_forgotten() -> None:
    front = start()
    assert front.get_latest_batch_manager_stats() is None
    front._report_stats(stats(iteration_counter=5, max_kv_cache_blocks=10, used_kv_cache_blocks=8), 2, replica=0)
    front._report_stats(
        stats(iteration_counter=7, max_kv_cache_blocks=30, used_kv_cache_blocks=2, second=3), 1, replica=1
    )
    text = front.get_latest_batch_manager_stats()
    assert text is not None and front.get_latest_batch_manager_stats() is None
    total = BatchManagerStats.from_json(text)
    assert (total.iteration_counter, total.max_kv_cache_blocks, total.used_kv_cache_blocks) == (12, 40, 10)
    assert total.fraction_used_kv_cache_blocks == 0.25 and total.tokens_per_kv_cache_block == 16
    assert total.timestamp.endswith("03.000000") and front.num_requests_queued() == 3
    front.lose(replica=0)
    text = front.get_latest_batch_manager_stats()
    assert text is not None and BatchManagerStats.from_json(text).iteration_counter == 7
    assert front.num_requests_queued() == 1


def test_ranks_that_compute_otherwise_than_those_before_are_named(caplog: pytest.LogCaptureFixture) -> None:
    front = start(1)
    front.lose()
    front.recover(WIDE)
    assert not caplog.messages
    front.lose()
    front.recover(WIDE, layers="native")
    assert caplog.messages == [
        "the ranks compute with layers native instead of compiled: requests that go on with them may get other tokens"
    ]
