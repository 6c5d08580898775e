"""An executor with ranks in a process of their own serves, or says why they did not start."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
from scripted_leader import FAILURE, LIMITS, MAX_IN_FLIGHT, Order
from scripted_ranks import Launcher, fetch, submit

from inflight.config import EngineConfig
from inflight.errors import ConfigurationError, InvalidRequest, QueueFull
from inflight.executor.launchers.rank_processes import Command
from inflight.executor.launchers.uniproc import UniProc
from inflight.request import Request
from inflight.result import FinishReason

pytestmark = pytest.mark.slow


# -- serving -----------------------------------------------------------------------------------------------------------


def test_requests_go_out_and_answers_come_back(launcher: Launcher) -> None:
    executor = launcher()
    executor.start()
    assert executor.is_ready()
    assert executor.limits == LIMITS
    request_id = submit(executor, Order.ANSWER)
    responses = fetch(executor, 2)
    assert [response.request_id for response in responses] == [request_id] * 2
    assert [response.is_final for response in responses] == [False, True]
    assert executor.num_requests_in_flight() == 0


def test_a_cancelled_request_ends(launcher: Launcher) -> None:
    executor = launcher()
    executor.start()
    request_id = submit(executor, Order.HOLD)
    fetch(executor, 1)
    executor.cancel_request(request_id)
    (response,) = fetch(executor, 1)
    assert response.result is not None and response.result.finish_reason is FinishReason.CANCELLED


def test_requests_are_checked_and_counted_before_they_leave(launcher: Launcher) -> None:
    executor = launcher()
    executor.start()
    with pytest.raises(InvalidRequest):
        executor.enqueue_request(Request(request_id=1, input_token_ids=[], max_tokens=1))
    for _ in range(MAX_IN_FLIGHT):
        submit(executor, Order.HOLD)
    with pytest.raises(QueueFull, match="Exceeds maximum queue size"):
        submit(executor, Order.HOLD)


def test_statistics_arrive(launcher: Launcher) -> None:
    executor = launcher()
    executor.start()
    submit(executor, Order.STATS)
    fetch(executor, 2)
    assert executor.get_latest_batch_manager_stats() == '{"Iteration Counter": 2}'
    assert executor.get_latest_batch_manager_stats() is None


def test_nonsense_from_the_leader_is_dropped(launcher: Launcher) -> None:
    executor = launcher()
    executor.start()
    request_id = submit(executor, Order.NONSENSE)
    (response,) = fetch(executor, 1)
    assert response.request_id == request_id and response.is_final
    next_id = submit(executor, Order.ANSWER)
    assert [response.request_id for response in fetch(executor, 2)] == [next_id] * 2
    assert executor.is_ready()


def test_only_this_user_can_reach_the_socket(launcher: Launcher, run_directory: Path) -> None:
    executor = launcher()
    executor.start()
    (directory,) = run_directory.iterdir()
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700


# -- starts that fail --------------------------------------------------------------------------------------------------


def test_the_ranks_own_sentence_says_why_they_did_not_start(launcher: Launcher) -> None:
    with pytest.raises(ConfigurationError, match=FAILURE):
        launcher("fail").start()


def test_ranks_that_have_only_begun_are_waited_for_later(launcher: Launcher) -> None:
    executor = launcher()
    executor.begin()
    assert len(executor.engine_pids()) == 1
    executor.start()
    submit(executor, Order.ANSWER)
    assert len(fetch(executor, 2)) == 2 and len(executor.engine_pids()) == 1
    executor = launcher("fail")
    executor.begin()
    executor._connections[0].join()  # they have failed before anybody waits for them
    with pytest.raises(ConfigurationError, match=FAILURE):
        executor.start()


def test_ranks_that_end_without_a_word_are_told_with_their_exit_code(launcher: Launcher) -> None:
    with pytest.raises(ConfigurationError, match="code 3"):
        launcher("exit").start()


def test_a_rank_that_dies_while_the_ranks_meet_is_named_and_leaves_nothing(
    launcher: Launcher, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = tmp_path_factory.mktemp("temporary")
    monkeypatch.setenv("TMPDIR", str(temporary))
    with pytest.raises(ConfigurationError, match=r"rank process \d+ has died"):
        launcher("lose a rank", EngineConfig(worker_start_timeout_ms=200_000)).start()
    assert list(temporary.iterdir()) == []


def test_ranks_that_are_never_ready_are_given_up(launcher: Launcher) -> None:
    config = EngineConfig(worker_start_timeout_ms=700)
    with pytest.raises(ConfigurationError, match=r"worker_start_timeout_ms|700|0\.7|within"):
        launcher("never ready", config).start()


def test_a_program_that_is_not_there_is_a_configuration_error(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = launcher()
    monkeypatch.setattr(UniProc, "commands", lambda self, launch: [Command(["/nonexistent/python"], {})])
    with pytest.raises(ConfigurationError):
        executor.start()


def test_a_failed_start_leaves_nothing_to_serve(launcher: Launcher) -> None:
    executor = launcher("exit")
    with pytest.raises(ConfigurationError):
        executor.start()
    assert not executor.is_ready()
    assert executor.await_responses(timeout=0) == []
