"""What becomes of a request when ranks die: what new ranks are told, what its client hears, and when it ends."""

from __future__ import annotations

import time
from typing import Any

import pytest
from list_front import LIMITS, ListFront
from msgspec import structs

from inflight.config import EngineConfig
from inflight.executor.front.engine_state import EngineState
from inflight.lora import LoraConfig, LoRARequest
from inflight.replay import DeliveredSequence, Replay
from inflight.request import Request
from inflight.request_limits import RequestLimits
from inflight.result import FinishReason, PerfMetrics, Response, Result
from inflight.sampling_config import SamplingConfig

WIDE: RequestLimits = structs.replace(LIMITS, max_batch_size=4, num_adapter_slots=2)


def start(**bounds: int) -> ListFront:
    front = ListFront(config=EngineConfig(**bounds))  # type: ignore[arg-type]
    front.recover(WIDE)
    return front


def submit(front: ListFront, **fields: Any) -> int:
    return front.enqueue_request(Request(**{"input_token_ids": [1], "max_tokens": 9, "streaming": True, **fields}))


def say(front: ListFront, request_id: int, tokens: list[int], index: int = 0, **fields: Any) -> None:
    result = Result(output_token_ids=tokens, sequence_index=index, **fields)
    front.say(Response(request_id=request_id, result=result))


def die(front: ListFront) -> None:
    """The ranks are lost, and others take their place."""
    front.lose()
    front.recover(WIDE)


def heard(front: ListFront) -> list[Response]:
    return front.await_responses(timeout=0)


def results(front: ListFront) -> list[Result]:
    return [response.result for response in heard(front) if response.result is not None]


def replay_of(front: ListFront, request_id: int) -> Replay:
    replay = front.messages[request_id].replay
    assert replay is not None
    return replay


def test_new_ranks_are_told_what_was_delivered_of_each_sequence() -> None:
    front = start()
    request_id = submit(front, num_return_sequences=3)
    say(front, request_id, [5, 6], cum_log_prob=-1.5, decoding_iter=1)
    say(front, request_id, [7], cum_log_prob=-2.0, decoding_iter=2)
    say(front, request_id, [8], index=2, decoding_iter=1, is_sequence_final=True, finish_reason=FinishReason.END_ID)
    front.lose()
    front.recover(WIDE)
    assert replay_of(front, request_id).sequences == [
        DeliveredSequence(token_ids=[5, 6, 7], cum_log_prob=-2.0, num_iterations=2),
        DeliveredSequence(),
        DeliveredSequence(token_ids=[8], num_iterations=1, is_finished=True),
    ]
    say(front, request_id, [9], decoding_iter=3)
    die(front)
    assert replay_of(front, request_id).sequences[0].token_ids == [5, 6, 7, 9]
    assert [result.output_token_ids for result in results(front)] == [[5, 6], [7], [8], [9]]


def test_what_no_rank_had_read_is_sent_again_whole_and_in_order() -> None:
    """Also what arrived meanwhile, behind it."""
    front = start()
    first, second = submit(front, priority=0.2), submit(front, priority=0.9)
    front.lose()
    third = submit(front)
    front.lose()
    assert front.sent == []
    front.recover(WIDE)
    assert front.sent == [first, second, third]
    assert [front.messages[id_].replay for id_ in (first, second, third)] == [Replay()] * 3
    assert [front.messages[id_].priority for id_ in (first, second)] == [0.2, 0.9]
    assert (front.num_pauses(), front.num_replays()) == (2, 2)


def test_all_tokens_are_repeated_across_the_death_for_who_wants_that() -> None:
    front = start()
    request_id = submit(front, return_all_generated_tokens=True)
    say(front, request_id, [5], log_probs=[-1.0])
    die(front)
    say(front, request_id, [6], log_probs=[-2.0])
    assert [(r.output_token_ids, r.log_probs) for r in results(front)] == [([5], [-1.0]), ([5, 6], [-1.0, -2.0])]


def test_a_beam_search_begins_anew_and_its_client_hears_nothing_twice() -> None:
    front = start()
    request_id = submit(front, sampling_config=SamplingConfig(beam_width=2), num_return_sequences=2)
    for number in (1, 2):
        for index in (0, 1):
            say(front, request_id, [5] * number, index, decoding_iter=number)
    heard(front)
    die(front)
    assert replay_of(front, request_id) == Replay()
    for number in (1, 2, 3):
        for index in (0, 1):
            say(front, request_id, [5] * number, index, decoding_iter=number)
    assert [result.decoding_iter for result in results(front)] == [3, 3]


def test_a_replayed_beam_search_that_is_cancelled_early_keeps_what_its_client_had() -> None:
    front = start()
    request_id = submit(front, sampling_config=SamplingConfig(beam_width=2))
    say(front, request_id, [5, 6, 7], decoding_iter=3)
    heard(front)
    die(front)
    end = {"finish_reason": FinishReason.CANCELLED, "is_final": True, "is_sequence_final": True}
    say(front, request_id, [5], decoding_iter=1, **end)
    (result,) = results(front)
    assert result.output_token_ids == [5, 6, 7] and result.finish_reason is FinishReason.CANCELLED


def test_latencies_count_from_the_acceptance_and_the_first_token() -> None:
    front = start()
    before = time.monotonic_ns()
    request_id = submit(front)
    say(front, request_id, [5])
    after = time.monotonic_ns()
    die(front)
    later = PerfMetrics(arrival_time_ns=after, first_token_time_ns=after, last_token_time_ns=after + 9)
    say(front, request_id, [6], is_final=True, is_sequence_final=True, request_perf_metrics=later)
    metrics = results(front)[-1].request_perf_metrics
    assert metrics is not None and metrics.last_token_time_ns == after + 9
    assert before - 1000 <= metrics.arrival_time_ns <= metrics.first_scheduled_time_ns
    assert metrics.first_scheduled_time_ns <= metrics.first_token_time_ns <= after


# -- cancelled, overdue ------------------------------------------------------------------------------------------------


def finals(front: ListFront) -> list[tuple[int, FinishReason, bool]]:
    """(sequence, reason, whether it is the request's last result) of each sequence that ended."""
    return [(r.sequence_index, r.finish_reason, r.is_final) for r in results(front) if r.is_sequence_final]


CANCELLED = FinishReason.CANCELLED


@pytest.mark.parametrize("when", ["during the pause", "before the death", "in the new queue"])
def test_a_stream_that_is_cancelled_ends_with_its_tokens(when: str) -> None:
    front = start()
    request_id = submit(front, num_return_sequences=2)
    say(front, request_id, [5])
    if when == "before the death":
        front.cancel_request(request_id)
    front.lose()
    if when == "during the pause":
        front.cancel_request(request_id)
    front.recover(WIDE)
    if when == "in the new queue":
        # A leader answers so for a request that it has not started.
        front.say(Response(request_id=request_id, error_msg="stopped", error_code="CANCELLED", outcome="cancelled"))
    assert finals(front) == [(0, CANCELLED, False), (1, CANCELLED, True)]
    assert front.num_requests_in_flight() == 0 and (when == "in the new queue") == bool(front.sent)


@pytest.mark.parametrize("before", [True, False], ids=["before the death", "during the pause"])
def test_a_sequence_that_is_cancelled_ends_and_the_others_go_on(before: bool) -> None:
    front = start()
    request_id = submit(front, num_return_sequences=2)
    say(front, request_id, [5])
    if before:
        front.cancel_sequence(request_id, 0)
    front.lose()
    if not before:
        front.cancel_sequence(request_id, 0)
    assert finals(front) == [(0, CANCELLED, False)]
    front.recover(WIDE)
    assert [each.is_finished for each in replay_of(front, request_id).sequences] == [True, False]
    front.lose()
    front.cancel_sequence(request_id, 1)
    assert finals(front) == [(1, CANCELLED, True)]


def test_the_allotted_time_runs_on_during_the_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    front = start()
    before = time.monotonic()
    short, long, queued = (submit(front, allotted_time_ms=time_ms) for time_ms in (1000, 900_000, 1000))
    say(front, short, [5])
    say(front, long, [5])
    heard(front)
    front.lose()
    now = time.monotonic() + 2
    monkeypatch.setattr(time, "monotonic", lambda: now)
    front._end_overdue()
    started, waiting = heard(front)
    assert started.request_id == short and started.result is not None
    assert started.result.finish_reason is FinishReason.TIMED_OUT and started.is_final
    assert (waiting.request_id, waiting.outcome) == (queued, "timed_out")
    front.recover(WIDE)
    most = 900_000 - 2000
    least = most - 1000 * (now - 2 - before) - 1  # if it was accepted at once
    assert front.sent == [long] and least <= front.messages[long].allotted_time_ms <= most


# -- bounds ------------------------------------------------------------------------------------------------------------


def test_what_ranks_die_of_becomes_a_suspect_and_then_ends() -> None:
    """Those that new ranks had not begun, and those that had news in between, are not blamed."""
    front = start()
    poison, queued, lucky = (submit(front) for _ in range(3))
    for number in (1, 2, 3):
        front._note_started([poison, lucky])
        say(front, lucky, [number])
        front.lose()
        if number < 3:
            front.recover(WIDE)
            suspects = [id_ for id_ in (poison, queued, lucky) if replay_of(front, id_).is_suspect]
            assert suspects == ([poison] if number == 2 else [])
    (error,) = [response for response in heard(front) if response.is_final]
    assert (error.request_id, error.error_code) == (poison, "UNAVAILABLE")
    assert "3 times in a row" in error.error_msg and "journal_max_deaths" in error.error_msg
    assert front.num_requests_in_flight() == 2


def test_a_request_is_replayed_so_many_times_and_no_more() -> None:
    front = start(journal_max_replays=2)
    request_id = submit(front)
    for number in range(3):
        say(front, request_id, [number])
        die(front)
    *_, error = heard(front)
    assert "after 2 replays (journal_max_replays)" in error.error_msg


def test_a_request_with_more_tokens_than_the_journal_takes_fails_when_ranks_die() -> None:
    front = start(journal_max_tokens=4)
    long, short, everything = submit(front), submit(front), submit(front, return_all_generated_tokens=True)
    for _ in range(2):
        say(front, long, [5, 6])
        say(front, everything, [5, 6])
    say(front, short, [5, 6, 7])
    assert [result.output_token_ids for result in results(front)][-2:] == [[5, 6, 5, 6], [5, 6, 7]]
    front.lose()
    errors = heard(front)
    assert [error.request_id for error in errors] == [long, everything]
    assert all("more tokens than journal_max_tokens allows (4)" in error.error_msg for error in errors)


def test_ranks_that_do_not_come_back_end_what_waits() -> None:
    front = start()
    request_id = submit(front)
    say(front, request_id, [5])
    front.lose()
    front.lose(EngineState.DOWN)
    assert [response.error_code for response in heard(front) if response.is_final] == ["UNAVAILABLE"]


# -- adapters ----------------------------------------------------------------------------------------------------------

WEIGHTS = LoraConfig(7, bytes(64), [(0, 0, 1)])
FOLDER = LoRARequest("tale", 8, "/adapters/tale")


def test_new_ranks_are_told_once_where_to_load_an_adapter_from() -> None:
    front = start()
    first = submit(front, lora_config=WEIGHTS)
    say(front, first, [5], is_final=True, is_sequence_final=True)
    running, other = submit(front, lora_config=LoraConfig(7)), submit(front, lora_config=LoraConfig(7))
    assert front.messages[running].lora_config == LoraConfig(7)
    die(front)
    assert [front.messages[id_].lora_config for id_ in (running, other)] == [WEIGHTS, LoraConfig(7)]
    for id_ in (running, other):
        say(front, id_, [5], is_final=True, is_sequence_final=True)
    die(front)
    later = [submit(front, lora_config=LoraConfig(7)) for _ in range(2)]
    assert [front.messages[id_].lora_config for id_ in later] == [WEIGHTS, LoraConfig(7)]


def test_a_folder_is_told_again_by_name_and_by_number() -> None:
    front = start()
    submit(front, lora_request=FOLDER)
    by_name, by_number = submit(front, lora_request=LoRARequest("tale")), submit(front, lora_config=LoraConfig(8))
    front.lose()
    front.recover(WIDE)
    assert front.messages[by_name].lora_request == LoRARequest("tale"), "the first request, which goes on, has said it"
    assert front.messages[by_number].lora_config == LoraConfig(8)


def test_an_unloaded_adapter_is_forgotten_and_so_are_the_oldest_when_there_are_too_many_bytes() -> None:
    front = start(lora_cache_host_memory_bytes=100)
    for number in (1, 2):
        say(
            front,
            submit(front, lora_config=structs.replace(WEIGHTS, task_id=number)),
            [5],
            is_final=True,
            is_sequence_final=True,
        )
    submit(front, lora_config=LoraConfig(2), lora_order="unload")
    requests = [submit(front, lora_config=LoraConfig(number)) for number in (1, 2)]
    die(front)
    assert [front.messages[id_].lora_config for id_ in requests] == [LoraConfig(1), LoraConfig(2)]


def test_of_a_resumed_request_new_ranks_are_told_also_what_earlier_servers_delivered() -> None:
    front = start()
    had = [
        DeliveredSequence(token_ids=[7, 8], cum_log_prob=-1.0),
        DeliveredSequence(token_ids=[9], is_finished=True),
    ]
    request_id = submit(front, num_return_sequences=2, replay=Replay(sequences=had, is_resumed=True))
    assert front.messages[request_id].replay == Replay(sequences=had, is_resumed=True)
    say(front, request_id, [5], cum_log_prob=-1.5, decoding_iter=1)
    die(front)
    longer = DeliveredSequence(token_ids=[7, 8, 5], cum_log_prob=-1.5, num_iterations=1)
    assert replay_of(front, request_id) == Replay(sequences=[longer, had[1]])
    say(front, request_id, [6], is_final=True, is_sequence_final=True, finish_reason=FinishReason.LENGTH)
    assert [result.output_token_ids for result in results(front)] == [[5], [6]]


def test_a_resumed_request_ends_with_its_tokens_if_it_is_cancelled_before_ranks_begin_it() -> None:
    front = start()
    had = [DeliveredSequence(token_ids=[7])]
    request_id = submit(front, replay=Replay(sequences=had, is_resumed=True))
    front.lose()
    front.cancel_request(request_id)
    (last,) = results(front)
    assert (last.output_token_ids, last.finish_reason, last.is_final) == ([], FinishReason.CANCELLED, True)
