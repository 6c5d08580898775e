"""A killed rank: streams pause and go on with the tokens that they would have had, and every request is counted.
A stub or an engine that hangs is detected, and a busy one is not mistaken for it.

pytest ci/L0_backend/test_recovery.py
"""

from __future__ import annotations

import os
import signal

import numpy as np
import pytest
from raw_stream import RawStream
from server_metrics import OUTCOMES, RELAUNCHING, Metrics
from server_process import ServerProcess
from waiting import until

from inflight.executor.executor import attach_executor
from inflight.executor.launchers.attached import find_engine
from inflight.executor.wire.address import EngineAddress
from inflight.executor.wire.launch import SOCKET

pytestmark = pytest.mark.long

PROMPT = {"text_input": "Once upon a time", "max_tokens": 20, "end_id": -1}
PATIENT = {"worker_heartbeat_timeout_ms": "600000"}
"""With which ranks that a test has stopped are not replaced."""
ENDLESS = {**PROMPT, "max_tokens": 1500, "stream": True}


def new_rank(server: ServerProcess, old: int) -> int:
    """The one that has been launched in place of `old`."""
    found: list[int] = []

    def is_there() -> bool:
        found[:] = server.ranks
        return len(found) == 1 and old not in found

    until(is_there, "a rank is launched again")
    return found[0]


def stopped_loading_rank(server: ServerProcess, old: int) -> int:
    """The same, suspended before it serves."""
    while True:
        new = new_rank(server, old)
        os.kill(new, signal.SIGSTOP)
        # The leader listens once all ranks have loaded the model.
        if not list(server.ready_endpoints.run_directory.glob(f"engine-*/{SOCKET}")):
            return new
        os.kill(new, signal.SIGKILL)  # this process was late
        old = new


def test_streams_go_on_when_a_rank_is_killed_and_every_request_is_counted() -> None:
    """In float32, in which a replay's rounding changes no token."""
    sampled = [{**ENDLESS, "max_tokens": 600, "temperature": 1.0, "seed": np.array([s], np.uint64)} for s in (1, 2)]
    with ServerProcess(parameters={"dtype": "float32"}) as server, RawStream(server.grpc_url) as stream:
        alone = [stream.ask(inputs).token_ids for inputs in sampled]
        for number in (1, 2):
            (rank,) = server.ranks
            others = [RawStream(server.grpc_url) for _ in sampled]
            running = [other.send(inputs) for other, inputs in zip(others, sampled, strict=True)]
            for other in others:
                other.take()
            os.kill(rank, signal.SIGKILL)
            late = stream.send(sampled[0])  # waits for the ranks
            for other, answer, tokens in zip(others, running, alone, strict=True):
                other.collect(answer)
                assert answer.error == "" and answer.num_finals == 1 and answer.token_ids == tokens
                other.close()
            stream.collect(late)
            assert late.token_ids == alone[0]
            until(lambda number=number: outcomes(server) == {"completed": 2.0 + 3.0 * number}, "all are counted")
            until(lambda number=number: Metrics(server).of("inflight_engine_pauses_total") == number, "so is the pause")
            assert Metrics(server).of("inflight_request_replays_total") >= number
        assert stream.ask({**PROMPT, "max_tokens": 0}).error


def test_where_streams_may_not_go_on_each_ends_with_one_error() -> None:
    with ServerProcess(parameters={"journal_max_tokens": "0"}) as server:
        with RawStream(server.grpc_url) as stream:
            before = stream.ask(PROMPT).token_ids
        (rank,) = server.ranks
        others = [RawStream(server.grpc_url) for _ in range(3)]
        running = [other.send(ENDLESS) for other in others]
        for other in others:
            other.take()
        os.kill(rank, signal.SIGKILL)
        for other, answer in zip(others, running, strict=True):
            other.collect(answer)
            assert "journal_max_tokens" in answer.error and answer.num_finals == 1
            other.close()
        with RawStream(server.grpc_url) as stream:
            assert stream.ask(PROMPT).token_ids == before
        until(lambda: outcomes(server) == {"completed": 2.0, "unavailable": 3.0}, "all are counted")


def test_a_stub_that_hangs_is_started_again() -> None:
    """Every health check still says ready."""
    with ServerProcess(canary_period=5.0) as server:
        with RawStream(server.grpc_url) as stream:
            before = stream.ask(PROMPT).token_ids
        (stub,) = server.stub_pids
        os.kill(stub, signal.SIGSTOP)
        until(lambda: "starting it again" in server.told, "found out")
        until(lambda: "serving again" in server.told, "started again")
        assert stub not in server.stub_pids
        with RawStream(server.grpc_url) as stream:
            assert stream.ask(PROMPT).token_ids == before


def test_ranks_that_load_for_longer_than_a_canary_waits_are_not_interrupted() -> None:
    """The new rank is suspended while it loads, which takes as long as the test likes."""
    with ServerProcess(canary_period=3.0, parameters=PATIENT) as server, RawStream(server.grpc_url) as stream:
        before = stream.ask(PROMPT).token_ids
        (old,) = server.ranks
        os.kill(old, signal.SIGKILL)
        new = stopped_loading_rank(server, old)
        waiting = stream.send(PROMPT)
        until(lambda: Metrics(server).of(RELAUNCHING) > 9 or "again" in server.told, "canaries had gone unanswered")
        assert "again" not in server.told
        os.kill(new, signal.SIGCONT)
        stream.collect(waiting)
        assert waiting.token_ids == before and waiting.num_finals == 1
        assert "again" not in server.told


def test_who_asks_for_the_engines_health_is_told_the_truth() -> None:
    """By the gauge, and by a front that did not launch the ranks, as those of the OpenAI server and of dialect models.
    The new rank is suspended while it loads."""
    with ServerProcess(parameters=PATIENT) as server:
        run_directory = server.ready_endpoints.run_directory
        config = find_engine(EngineAddress.of("llm", run_directory), 0.0)
        with attach_executor(config, "llm", run_directory=run_directory) as guest:
            (old,) = server.ranks
            for number in (1, 2):
                until(lambda: Metrics(server).of("inflight_engine_ready") == 1, "the gauge shows that it serves")
                assert guest.is_ready()
                os.kill(old, signal.SIGKILL)
                new = stopped_loading_rank(server, old)
                until(lambda: not guest.is_ready(), f"the front knows of loss {number}")
                until(lambda: Metrics(server).of("inflight_engine_ready") == 0, f"the gauge shows loss {number}")
                os.kill(new, signal.SIGCONT)
                until(guest.is_ready, f"the front finds the ranks of launch {number}")
                old = new


def test_an_idle_server_is_tried_and_a_busy_one_left_alone() -> None:
    """While one request occupies the only row for longer than a period, none ends, but the engine makes steps."""
    with ServerProcess(canary_period=3.0, parameters={"max_batch_size": "1"}) as server:
        until(lambda: outcomes(server).get("completed", 0) >= 1, "a canary is answered")
        with RawStream(server.grpc_url) as stream:
            answers = [stream.send(ENDLESS) for _ in range(2)]
            stream.collect(*answers)
            assert [answer.error for answer in answers] == [""] * 2
        assert "again" not in server.told


def outcomes(server: ServerProcess) -> dict[str, float]:
    """Number of requests by outcome, without zeros."""
    counts = Metrics(server).by_label(OUTCOMES, "outcome")
    return {outcome: count for outcome, count in counts.items() if count}
