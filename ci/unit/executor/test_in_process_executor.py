"""The Executor API on an engine inside this process."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator

import pytest
from calls import Caller, until
from fake_rank import MAX_SEQ_LEN, LoadedFakeRunner, load_fake_runner
from harness import make_request

from inflight.batch_manager.gpt_manager import GptManager
from inflight.batch_manager_stats import BatchManagerStats
from inflight.config import EngineConfig
from inflight.distributed.rank_group import RankGroup
from inflight.engine_description import EngineDescription
from inflight.errors import ConfigurationError, DuplicateRequest, EngineUnavailable, InvalidRequest, QueueFull
from inflight.executor.in_process import InProcessExecutor
from inflight.executor.wire.messages import FRONT_ID_SHIFT
from inflight.result import FinishReason
from inflight.stats import IterationStats

LONG = MAX_SEQ_LEN - 100
"""Tokens of a request that does not end while a test looks at it."""


@pytest.fixture
def caller() -> Iterator[Caller]:
    executor = InProcessExecutor(EngineConfig(max_batch_size=4, max_num_tokens=64, max_queue_size=2), load_fake_runner)
    executor.start()
    yield Caller(executor)
    executor.shutdown()


def test_streamed_and_whole_answers_hold_the_same_tokens(caller: Caller) -> None:
    streamed, whole = caller.request([1, 2, 3], 20, streaming=True), caller.request([1, 2, 3], 20)
    caller.serve(streamed, whole)
    assert caller.num_responses[streamed.request_id] == 20
    assert caller.num_responses[whole.request_id] == 1
    assert caller.executor.num_requests_in_flight() == 0


def test_requests_from_many_threads_get_their_own_answers() -> None:
    executor = InProcessExecutor(EngineConfig(max_batch_size=8, max_num_tokens=64), load_fake_runner)
    executor.start()
    caller = Caller(executor)
    requests = [caller.request([n], 10, streaming=n % 2 == 0) for n in range(80)]
    threads = [threading.Thread(target=caller.send, args=requests[n::4]) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    caller.wait(*(request.request_id for request in requests))
    assert len({tuple(caller.tokens[request.request_id]) for request in requests}) == 80
    executor.shutdown()


def test_ids_are_unique_and_carry_the_front(caller: Caller) -> None:
    ids = [caller.executor.next_request_id() for _ in range(100)]
    assert len(set(ids)) == 100
    assert len({request_id >> FRONT_ID_SHIFT for request_id in ids}) == 1


def test_an_active_request_is_cancelled_with_what_it_has(caller: Caller) -> None:
    (request_id,) = caller.send(caller.request(3, LONG, streaming=True))
    caller.wait_for_tokens(request_id, 3)
    caller.executor.cancel_request(request_id)
    caller.executor.cancel_request(request_id)
    (response,) = caller.wait(request_id)
    assert response.result is not None and response.result.finish_reason is FinishReason.CANCELLED
    caller.executor.cancel_request(request_id)
    caller.executor.cancel_request(12345)
    caller.serve(caller.request())


def test_a_waiting_request_is_cancelled_unserved(caller: Caller) -> None:
    running = caller.send(*(caller.request(3, LONG, streaming=True) for _ in range(4)))
    caller.wait_for_tokens(running[3])
    (waiting,) = caller.send(caller.request())
    caller.executor.cancel_request(waiting)
    (response,) = caller.wait(waiting)
    assert (response.error_code, response.error_msg) == (
        "CANCELLED",
        f"request Id {waiting} has been stopped. Request is ignored.",
    )
    for request_id in running:
        caller.executor.cancel_request(request_id)
    caller.wait(*running)


def test_priority_decides_who_leaves_the_queue_first(caller: Caller) -> None:
    running = caller.send(*(caller.request(3, LONG, streaming=True) for _ in range(4)))
    caller.wait_for_tokens(running[3])
    low, high = caller.send(
        caller.request(3, LONG, priority=0.2, streaming=True), caller.request(priority=0.8, streaming=True)
    )
    caller.executor.cancel_request(running[0])
    caller.wait_for_tokens(low)
    assert caller.order[4:] == [high, low]
    for request_id in (*running[1:], low):
        caller.executor.cancel_request(request_id)
    caller.wait(*running, low, high)


def test_the_allotted_time_ends_a_running_request(caller: Caller) -> None:
    for number in itertools.count():
        (response,) = caller.wait(*caller.send(caller.request(3, LONG, allotted_time_ms=50 * 2**number)))
        if response.result is not None:
            break
        assert "waited longer than the time it was allotted" in response.error_msg
    assert response.result.finish_reason is FinishReason.TIMED_OUT


def test_refusals_leave_nothing_in_flight(caller: Caller) -> None:
    executor = caller.executor
    with pytest.raises(InvalidRequest):
        caller.send(caller.request([]))
    running = caller.send(*(caller.request(3, LONG, streaming=True) for _ in range(6)))
    with pytest.raises(QueueFull, match="Exceeds maximum queue size"):
        caller.send(caller.request())
    for request_id in running[1:]:
        executor.cancel_request(request_id)
    caller.wait(*running[1:])
    with pytest.raises(DuplicateRequest):
        executor.enqueue_request(make_request(running[0], 3))
    assert executor.num_requests_in_flight() == 1
    executor.cancel_request(running[0])
    caller.wait(running[0])
    assert executor.num_requests_in_flight() == 0
    caller.serve(caller.request())


def test_statistics_come_once_each(caller: Caller) -> None:
    caller.serve(caller.request(3, 20))
    json = caller.executor.get_latest_batch_manager_stats()
    assert json is not None and BatchManagerStats.from_json(json).max_request_count == 4
    assert caller.executor.get_latest_batch_manager_stats() is None


def test_every_iteration_can_be_fetched_afterwards() -> None:
    config = EngineConfig(max_batch_size=2, max_num_tokens=64, request_stats_max_iterations=1000)
    with InProcessExecutor(config, load_fake_runner) as executor:
        assert executor.is_participant()
        caller = Caller(executor)
        caller.serve(*(caller.request(3, 10) for _ in range(5)))
        stats: list[IterationStats] = []
        until(lambda: stats.extend(executor.get_latest_iteration_stats()) or _is_idle(stats), "the last one came")
        assert sum(each.num_completed_requests for each in stats) == 5
        assert max(each.num_queued_requests for each in stats) > 0
        assert any(each.new_active_requests_queue_latency_ms > 0 for each in stats)
        requests = executor.get_latest_request_stats()
        assert [each.iter for each in requests] == [each.iter for each in stats]
        listed = {each.id for iteration in requests for each in iteration.request_stats}
        assert listed == set(caller.finals)
        assert executor.get_latest_iteration_stats() == []


def _is_idle(stats: list[IterationStats]) -> bool:
    return bool(stats) and stats[-1].num_active_requests == 0 and stats[-1].num_queued_requests == 0


def test_statistics_that_nobody_keeps_are_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GptManager, "request_statistics", lambda self: pytest.fail("nobody wants them"))
    config = EngineConfig(iter_stats_max_iterations=0, stats_check_period_ms=3_600_000)
    with InProcessExecutor(config, load_fake_runner) as executor:
        made: list[bool] = []
        make = GptManager.statistics
        monkeypatch.setattr(GptManager, "statistics", lambda self: made.append(True) or make(self))
        caller = Caller(executor)
        caller.serve(caller.request(3, 20))
    assert len(made) <= 2, "the newest state, when it is due and when the engine falls idle"
    assert executor.get_latest_iteration_stats() == []


def test_shutdown_answers_everybody_and_closes_the_door() -> None:
    executor = InProcessExecutor(EngineConfig(max_batch_size=2), load_fake_runner)
    executor.start()
    caller = Caller(executor)
    ids = caller.send(*(caller.request(3, LONG) for _ in range(4)))
    executor.shutdown()
    assert {response.error_code for response in caller.wait(*ids)} == {"UNAVAILABLE"}
    assert not executor.is_ready()
    with pytest.raises(EngineUnavailable):
        executor.enqueue_request(make_request(99, 3))
    assert executor.await_responses() == []
    executor.shutdown()


def test_sizes_that_are_unset_are_those_of_the_device() -> None:
    def load(config: EngineConfig, group: RankGroup) -> LoadedFakeRunner:
        runner = LoadedFakeRunner(config.for_device("cuda"))
        runner.description = EngineDescription(device="cuda")
        return runner

    executor = InProcessExecutor(EngineConfig(), load)
    executor.start()
    caller = Caller(executor)
    caller.serve(caller.request(3, 20))
    stats = executor.get_latest_iteration_stats(timeout=None)
    executor.shutdown()
    assert {(each.max_batch_size_static, each.max_num_tokens_static) for each in stats} == {(256, 8192)}


def test_a_failing_step_ends_its_requests_and_nobody_else() -> None:
    executor = InProcessExecutor(EngineConfig(), lambda config, group: LoadedFakeRunner(config, crash_step=2))
    executor.start()
    caller = Caller(executor)
    (response,) = caller.wait(*caller.send(caller.request(3, 20)))
    assert response.error_code == "INTERNAL"
    caller.serve(caller.request(3, 20))
    executor.shutdown()


def test_a_failing_loop_fails_what_is_in_flight_and_refuses_the_rest() -> None:
    class Broken(LoadedFakeRunner):
        def memory_usage(self) -> tuple[int, int, int]:
            raise RuntimeError("lost")

    executor = InProcessExecutor(EngineConfig(), lambda config, group: Broken(config))
    executor.start()
    caller = Caller(executor)
    (response,) = caller.wait(*caller.send(caller.request(3, 20)))
    assert response.error_code == "UNAVAILABLE"
    until(lambda: not executor.is_ready(), "the executor is down")
    with pytest.raises(EngineUnavailable):
        executor.enqueue_request(make_request(99, 3))
    executor.shutdown()


def test_a_failure_to_load_is_raised_by_start() -> None:
    def load(config: EngineConfig, group: RankGroup) -> LoadedFakeRunner:
        raise ConfigurationError("gpt_model_path: nothing there")

    executor = InProcessExecutor(EngineConfig(), load)
    with pytest.raises(ConfigurationError, match="nothing there"):
        executor.start()
    executor.shutdown()


def test_spare_ranks_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="spare_ranks must be 0"):
        InProcessExecutor(EngineConfig(spare_ranks=1, max_tokens_in_paged_kv_cache=4096), load_fake_runner)


def test_a_failure_to_begin_is_raised_by_start() -> None:
    def load(config: EngineConfig, group: RankGroup) -> LoadedFakeRunner:
        runner = LoadedFakeRunner(config)
        del runner.limits
        return runner

    executor = InProcessExecutor(EngineConfig(), load)
    with pytest.raises(ConfigurationError, match="could not be loaded"):
        executor.start()
    executor.shutdown()
