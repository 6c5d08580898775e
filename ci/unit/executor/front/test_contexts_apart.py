"""Replicas for prompts and replicas that generate, behind one front: what each is sent, and what clients receive."""

from __future__ import annotations

from typing import Any

import pytest
from list_front import LIMITS, ListFront
from msgspec import structs

from inflight.config import EngineConfig
from inflight.context_phase import ContextPhaseParams, RequestType
from inflight.executor.front.engine_state import EngineState
from inflight.request import Request
from inflight.request_limits import RequestLimits
from inflight.result import FinishReason, Response, Result
from inflight.sampling_config import SamplingConfig

WIDE: RequestLimits = structs.replace(LIMITS, max_seq_len=64, max_input_len=63, max_batch_size=4, max_context_tokens=40)
PARAMS = ContextPhaseParams(req_id=1, first_gen_tokens=[5], opaque_state=b"where it is")
CONTEXT, GENERATION = 0, 1


def start(num_replicas: int = 2, context_replicas: int = 1, **options: Any) -> ListFront:
    config = EngineConfig(
        **options,
        tokens_per_block=4,
        data_parallel_size=num_replicas,
        context_replicas=context_replicas,
        max_tokens_in_buffer=40,
    )
    front = ListFront(0, config, num_replicas)
    for replica in range(num_replicas):
        front.recover(WIDE, replica)
    return front


def submit(front: ListFront, streaming: bool = True, **fields: Any) -> int:
    fields = {"input_token_ids": [1, 2, 3], "max_tokens": 9, **fields}
    return front.enqueue_request(Request(streaming=streaming, **fields))


def say(front: ListFront, request_id: int, tokens: list[int], **fields: Any) -> None:
    front.say(Response(request_id=request_id, result=Result(output_token_ids=tokens, **fields)))


def end_context(
    front: ListFront, request_id: int, tokens: list[int], reason: FinishReason = FinishReason.LENGTH, **fields: Any
) -> None:
    """The last result of its context phase."""
    fields = {"is_final": True, "context_phase_params": PARAMS, **fields}
    say(front, request_id, tokens, finish_reason=reason, is_sequence_final=True, **fields)


def received(front: ListFront) -> list[Result]:
    return [response.result for response in front.await_responses(timeout=0) if response.result is not None]


def test_a_stream_begins_at_one_replica_and_goes_on_at_the_other() -> None:
    front = start()
    request_id = submit(front)
    first = front.messages[request_id]
    assert front.replica_of[request_id] == CONTEXT and first.request_type is RequestType.CONTEXT_ONLY
    end_context(front, request_id, [5])
    (result,) = received(front)
    assert result.output_token_ids == [5] and not result.is_final and not result.is_sequence_final
    assert (result.finish_reason, result.context_phase_params) == (FinishReason.NOT_FINISHED, None)
    second = front.messages[request_id]
    assert front.replica_of[request_id] == GENERATION and second.request_type is RequestType.GENERATION_ONLY
    assert second.context_phase_params == PARAMS
    assert second.replay is not None and [each.token_ids for each in second.replay.sequences] == [[5]]
    say(front, request_id, [6, 7], finish_reason=FinishReason.LENGTH, is_final=True, is_sequence_final=True)
    assert received(front)[0].output_token_ids == [6, 7]
    assert front.num_requests_in_flight() == 0
    assert (front.num_handovers(), front.num_replays()) == (1, 0)


def test_who_is_answered_at_the_end_is_answered_by_the_second() -> None:
    front = start()
    request_id = submit(front, streaming=False)
    end_context(front, request_id, [5])
    assert received(front) == []
    second = front.messages[request_id]
    assert front.replica_of[request_id] == GENERATION
    assert second.replay is not None and second.replay.sequences == [], "it samples the first token, too"


@pytest.mark.parametrize("streaming", [True, False])
def test_cached_are_the_tokens_that_the_first_replica_had(streaming: bool) -> None:
    front = start()
    request_id = submit(front, streaming=streaming)
    end_context(front, request_id, [5], num_cached_tokens=1)
    last = {"finish_reason": FinishReason.LENGTH, "is_final": True, "is_sequence_final": True}
    say(front, request_id, [6, 7], num_cached_tokens=0 if streaming else 3, **last)
    assert [result.num_cached_tokens for result in received(front)] == ([1, 0] if streaming else [1])


@pytest.mark.parametrize("streaming", [True, False])
def test_an_output_that_ends_with_its_first_token_ends_there(streaming: bool) -> None:
    front = start()
    request_id = submit(front, streaming, num_return_sequences=2)
    for index in range(2):
        fields = {"is_final": index == 1, "sequence_index": index, "context_phase_params": None}
        end_context(front, request_id, [5 + index], FinishReason.END_ID, **fields)
    results = received(front)
    assert [(result.output_token_ids, result.finish_reason) for result in results] == [
        ([5], FinishReason.END_ID),
        ([6], FinishReason.END_ID),
    ]
    assert results[-1].is_final and front.num_requests_in_flight() == 0 and front.num_handovers() == 0


def test_of_several_sequences_those_go_on_that_have_not_ended() -> None:
    front = start()
    request_id = submit(front, num_return_sequences=2)
    end_context(front, request_id, [5], FinishReason.END_ID, is_final=False, context_phase_params=None)
    end_context(front, request_id, [6], sequence_index=1)
    assert [result.is_sequence_final for result in received(front)] == [True, False]
    replay = front.messages[request_id].replay
    assert replay is not None
    assert [(each.token_ids, each.is_finished) for each in replay.sequences] == [([5], True), ([6], False)]


@pytest.mark.parametrize(
    "fields",
    [
        {"max_tokens": 1},
        {"input_token_ids": [1]},
        {"input_token_ids": [1] * 41},
        {"sampling_config": SamplingConfig(beam_width=2)},
    ],
    ids=["one new token", "a prompt of one", "a prompt that is too long", "beams"],
)
def test_one_replica_computes_what_gains_nothing(fields: dict[str, Any]) -> None:
    front = start()
    request_id = submit(front, **fields)
    assert front.replica_of[request_id] == GENERATION
    assert front.messages[request_id].request_type is RequestType.CONTEXT_AND_GENERATION


@pytest.mark.parametrize(("length", "splits"), [(7, True), (8, False)])
def test_what_is_handed_over_is_not_too_long_for_the_journal(length: int, splits: bool) -> None:
    front = start(journal_max_tokens=10)
    request_id = submit(front, input_token_ids=[1] * length, num_return_sequences=3)
    assert (front.replica_of[request_id] == CONTEXT) is splits
    if splits:
        for index in range(3):
            fields = {} if index == 2 else {"is_final": False, "context_phase_params": None}
            end_context(front, request_id, [5], sequence_index=index, **fields)
        replay = front.messages[request_id].replay
        assert replay is not None and [each.token_ids for each in replay.sequences] == [[5]] * 3


def test_clients_may_split_requests_themselves() -> None:
    front = start()
    first = submit(front, request_type=RequestType.CONTEXT_ONLY)
    assert front.replica_of[first] == CONTEXT
    end_context(front, first, [5])
    (result,) = received(front)
    assert result.context_phase_params == PARAMS and result.is_final and result.finish_reason is FinishReason.LENGTH
    second = submit(front, request_type=RequestType.GENERATION_ONLY, context_phase_params=PARAMS)
    assert front.replica_of[second] == GENERATION and front.messages[second].replay is None


def test_the_death_of_the_first_before_its_answer_begins_anew_elsewhere() -> None:
    front = start(3, context_replicas=2)
    request_id = submit(front)
    died = front.replica_of[request_id]
    front.lose(replica=died)
    assert front.replica_of[request_id] == 1 - died
    assert front.messages[request_id].request_type is RequestType.CONTEXT_ONLY
    front.lose(replica=1 - died)
    assert front.replica_of[request_id] == 2
    assert front.messages[request_id].request_type is RequestType.CONTEXT_AND_GENERATION
    assert front.replica_of[submit(front)] == 2


def test_the_death_of_the_second_goes_on_with_what_was_delivered() -> None:
    front = start(3)
    request_id = submit(front)
    end_context(front, request_id, [5])
    died = front.replica_of[request_id]
    front._note_started([request_id])
    say(front, request_id, [6])
    front.lose(replica=died)
    again = front.messages[request_id]
    assert {died, front.replica_of[request_id]} == {1, 2}
    assert again.context_phase_params is None, "what the dead have fetched is not there any more"
    assert again.replay is not None and again.replay.sequences[0].token_ids == [5, 6]


def test_who_waited_for_the_ranks_that_may_have_died_of_it_goes_on_elsewhere() -> None:
    front = start()
    request_id = submit(front)
    front._note_started([request_id])
    front.lose(replica=CONTEXT)
    front.recover(WIDE, CONTEXT)
    assert front.replica_of[request_id] == CONTEXT
    assert front.messages[request_id].request_type is RequestType.CONTEXT_ONLY
    end_context(front, request_id, [5])
    assert front.replica_of[request_id] == GENERATION


def test_while_none_generates_the_others_do_all() -> None:
    front = start()
    waiting = submit(front)
    front.lose(replica=GENERATION)
    assert front.messages[submit(front)].request_type is RequestType.CONTEXT_AND_GENERATION
    end_context(front, waiting, [5])
    assert front.replica_of[waiting] == CONTEXT, "it has what it goes on from"
    assert front.messages[waiting].context_phase_params == PARAMS


def test_what_is_handed_over_waits_where_nobody_serves() -> None:
    front = start()
    request_id = submit(front)
    end_context(front, request_id, [5])
    for replica in (GENERATION, CONTEXT):
        front.lose(replica=replica)
    front.recover(WIDE, GENERATION)
    again = front.messages[request_id]
    assert front.replica_of[request_id] == GENERATION and again.context_phase_params == PARAMS
    assert again.replay is not None and again.replay.sequences[0].token_ids == [5]


@pytest.mark.parametrize("streaming", [True, False])
def test_a_cancelled_one_does_not_go_on(streaming: bool) -> None:
    front = start()
    request_id = submit(front, streaming)
    front._note_started([request_id])
    front.cancel_request(request_id)
    end_context(front, request_id, [5])
    (result,) = received(front)
    assert result.is_final and result.finish_reason is FinishReason.CANCELLED
    assert front.num_handovers() == 0 and front.num_requests_in_flight() == 0


def test_a_cancelled_sequence_does_not_go_on() -> None:
    front = start()
    request_id = submit(front, num_return_sequences=2)
    front._note_started([request_id])
    front.cancel_sequence(request_id, 0)
    end_context(front, request_id, [5], is_final=False, context_phase_params=None)
    end_context(front, request_id, [6], sequence_index=1)
    assert [(each.sequence_index, each.finish_reason) for each in received(front)] == [
        (0, FinishReason.NOT_FINISHED),
        (1, FinishReason.NOT_FINISHED),
        (0, FinishReason.CANCELLED),
    ]
    replay = front.messages[request_id].replay
    assert replay is not None and [each.is_finished for each in replay.sequences] == [True, False]


def test_shutting_down_ends_both_phases_once() -> None:
    front = start()
    first, second = submit(front), submit(front)
    end_context(front, second, [5])
    front.lose(EngineState.CLOSED)
    ended = [response for response in front.await_responses(timeout=0) if response.is_final]
    assert sorted(response.request_id for response in ended) == sorted([first, second])
