"""Two replicas in processes of their own: one dies, and the other serves on; other fronts find both."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import fake_rank
import pytest
import scripted_leader
from calls import Caller, until
from fake_network import VOCAB_SIZE, expected_output
from scripted_leader import Order
from scripted_ranks import PATIENCE, fetch, launched, pid_of, submit

from inflight import backoff
from inflight.config import EngineConfig
from inflight.errors import ConfigurationError, EngineUnavailable
from inflight.executor.executor import attach_executor, find_engine_config
from inflight.executor.front.remote import RemoteFront
from inflight.executor.launchers.processes import ProcessLauncher
from inflight.executor.launchers.uniproc import UniProc
from inflight.executor.wire.address import EngineAddress
from inflight.request import Request
from inflight.result import Response

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("run_directory")]

CONFIG = EngineConfig(max_batch_size=8, max_num_tokens=64, data_parallel_size=2)
POISON = VOCAB_SIZE - 1
LONG = 10_000
"""Tokens of a request that does not end by itself: the longer it is, the longer a fake rank takes for one."""


def launchers(*program: str) -> list[ProcessLauncher]:
    return [
        ProcessLauncher(CONFIG.of_replica(replica), UniProc(program), EngineAddress.of("llm", replica=replica))
        for replica in range(2)
    ]


@pytest.fixture
def front(monkeypatch: pytest.MonkeyPatch) -> Iterator[RemoteFront]:
    """An engine `llm` whose ranks have everything but a network."""
    monkeypatch.setattr(backoff, "LONGEST", 0.0)
    monkeypatch.setenv(fake_rank.POISON, str(POISON))
    with RemoteFront(CONFIG, *launchers(fake_rank.__file__)) as front:
        yield front


def rank_of(front: RemoteFront, replica: int) -> int:
    (pid,) = front._connections[replica].pids()
    return pid


def rank_has_gone(old: set[int], replica: int, front: RemoteFront) -> bool:
    return front.ready_replicas()[replica] and not old & set(front._connections[replica].pids())


def streams(caller: Caller, count: int = 4, max_tokens: int = LONG) -> list[int]:
    """Long requests that have begun, half of them on each replica."""
    ids = caller.send(*(caller.request([number], max_tokens, streaming=True) for number in range(1, count + 1)))
    for request_id in ids:
        caller.wait_for_tokens(request_id)
    return ids


def check(caller: Caller, ids: list[int]) -> None:
    """Each of them goes on, and gets what it gets alone."""
    for request_id in ids:
        caller.cancel_when_it_goes_on(request_id)


def wait_until_all_ready(front: RemoteFront) -> None:
    with front._changed:
        assert front._changed.wait_for(lambda: all(front.ready_replicas()), PATIENCE)


@pytest.mark.parametrize("replica", [0, 1])
def test_streams_go_on_at_the_other_replica_while_the_dead_one_is_relaunched(front: RemoteFront, replica: int) -> None:
    caller = Caller(front)
    ids = streams(caller)
    pid = rank_of(front, replica)
    os.kill(pid, signal.SIGKILL)
    until(lambda: front.num_replays() > 0, "its streams are sent to the other one")
    check(caller, ids)
    assert front.num_replays() <= len(ids) and front.num_losses() == 1
    wait_until_all_ready(front)
    assert rank_of(front, replica) != pid
    caller.serve(*(caller.request([number], 20) for number in range(8)))


def test_a_request_that_ranks_die_of_kills_one_replica_only(front: RemoteFront) -> None:
    caller = Caller(front)
    ids = streams(caller, max_tokens=1500)
    # Ranks die at the end of its prompt, many steps after they have told that they began it.
    other = caller.send(caller.request([POISON] * 1000, 5, streaming=True))[0]
    caller.wait(other)
    error = caller.finals[other]
    assert error.error_code == "UNAVAILABLE" and "3 times in a row" in error.error_msg
    caller.wait(*ids)
    for request_id in ids:
        assert caller.tokens[request_id] == expected_output(caller.requests[request_id], fake_rank.MAX_SEQ_LEN)
    assert 3 <= front.num_losses() <= 4, "the first ranks may die before they have told what they began"
    wait_until_all_ready(front)


def test_ranks_are_replaced_one_replica_after_the_other_and_no_stream_is_lost(front: RemoteFront) -> None:
    caller = Caller(front)
    ids, old = streams(caller), set(front.engine_pids())
    for replica in (0, 1):
        front.replace_ranks(replica)
        until(lambda replica=replica: rank_has_gone(old, replica, front), "new ranks are launched")
        wait_until_all_ready(front)
    check(caller, ids)
    assert not old & set(front.engine_pids())
    assert (front.num_losses(), front.num_pauses()) == (0, 0)
    with attach_executor(EngineConfig(), "llm") as guest, pytest.raises(EngineUnavailable, match="only the front that"):
        guest.replace_ranks(0)


def test_another_front_finds_both_replicas_and_survives_each(front: RemoteFront) -> None:
    assert find_engine_config("llm", 0.0).data_parallel_size == 2
    with attach_executor(EngineConfig(), "llm") as guest:
        assert guest.num_replicas == 2
        wait_until_all_ready(guest)
        caller = Caller(guest)
        for replica in (0, 1):
            ids, before = streams(caller), guest.num_replays()
            os.kill(rank_of(front, replica), signal.SIGKILL)
            until(lambda before=before: guest.num_replays() > before, "its streams are sent to the other one")
            check(caller, ids)
            wait_until_all_ready(front)
            wait_until_all_ready(guest)
        assert guest.num_replays() <= 8, "streams that were on the replica, and had not ended"


def test_another_front_routes_by_what_the_engine_s_cache_shares(front: RemoteFront) -> None:
    """Not by its own configuration."""
    prompt = Request(request_id=1, input_token_ids=list(range(100)), max_tokens=1)
    for config in (EngineConfig(tokens_per_block=64), EngineConfig(enable_kv_cache_reuse=False)):
        guest = attach_executor(config, "llm")
        assert guest._replicas.prefix(prompt) == front._replicas.prefix(prompt)
        assert len(front._replicas.prefix(prompt)) == 99 // CONFIG.for_device("cpu").tokens_per_block


def test_another_front_needs_one_replica_only(front: RemoteFront) -> None:
    EngineAddress.of("llm").link.unlink()
    assert find_engine_config("llm", 0.0).data_parallel_size == 2
    with attach_executor(EngineConfig(), "llm") as guest:
        assert guest.ready_replicas() == [False, True]
        caller = Caller(guest)
        caller.serve(*(caller.request([number], 20) for number in range(4)))


def test_a_front_whose_number_one_replica_knows_already_takes_another_for_all(
    front: RemoteFront, monkeypatch: pytest.MonkeyPatch
) -> None:
    with attach_executor(EngineConfig(), "llm") as guest:
        before = guest.front_id
        guest.redraw_id(before)
        assert guest.front_id != before
        caller = Caller(guest)
        caller.serve(*(caller.request([number], 20) for number in range(4)))
        # The number that was given up is free for others.
        with attach_executor(EngineConfig(), "llm") as other:
            other._ids.front_id = before
            caller = Caller(other)
            caller.serve(*(caller.request([number], 20) for number in range(4)))


# -- scripted leaders --------------------------------------------------------------------------------------------------


@pytest.fixture
def scripted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RemoteFront]:
    monkeypatch.setattr(backoff, "LONGEST", 0.0)
    front = RemoteFront(CONFIG, *launchers(scripted_leader.__file__, "serve", str(tmp_path)))
    yield front
    front.shutdown()
    assert launched(tmp_path) == []


def test_requests_in_flight_end_once_when_all_replicas_are_shut_down(scripted: RemoteFront) -> None:
    scripted.start()
    held = [submit(scripted, Order.HOLD) for _ in range(4)]
    assert len({pid_of(response) for response in fetch(scripted, 4)}) == 2
    scripted.shutdown()
    ended: list[Response] = scripted.await_responses(timeout=0)
    assert sorted(response.request_id for response in ended) == sorted(held)
    assert {response.error_code for response in ended} == {"UNAVAILABLE"}


def test_a_replica_that_does_not_come_up_fails_the_start_of_all(tmp_path: Path) -> None:
    good, _ = launchers(scripted_leader.__file__, "serve", str(tmp_path))
    bad = ProcessLauncher(CONFIG, UniProc((scripted_leader.__file__, "fail", str(tmp_path))))
    front = RemoteFront(CONFIG, good, bad)
    with pytest.raises(ConfigurationError, match=scripted_leader.FAILURE):
        front.start()
    assert launched(tmp_path) == []


def test_a_replica_that_stays_away_is_tried_again_while_the_other_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although nobody keeps trying when the engine is down: its owner starts it anew."""
    monkeypatch.setattr(backoff, "LONGEST", 0.0)
    deaths = threading.Semaphore(0)
    good, _ = launchers(scripted_leader.__file__, "serve", str(tmp_path / "good"))
    _, bad = launchers(scripted_leader.__file__, "serve once", str(tmp_path / "bad"))
    for folder in ("good", "bad"):
        (tmp_path / folder).mkdir()
    options = {"keep_trying": False, "on_engine_death": lambda reason: deaths.release()}
    with RemoteFront(CONFIG, good, bad, **options) as front:  # type: ignore[arg-type]
        os.kill(rank_of(front, 1), signal.SIGKILL)
        for _ in range(4):
            assert deaths.acquire(timeout=PATIENCE)
        assert front.is_ready() and not front.is_down() and not front.is_relaunching()
        until(lambda: len(list((tmp_path / "bad").iterdir())) > 4, "it is tried again and again")
        submit(front, Order.ANSWER)
        fetch(front, 2)
    assert launched(tmp_path / "good") == launched(tmp_path / "bad") == []
