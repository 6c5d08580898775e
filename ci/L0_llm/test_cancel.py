"""Requests that end early: their client disconnects, they are stopped, or their allotted time is over.

pytest ci/L0_llm/test_cancel.py
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from raw_stream import RawStream
from server_metrics import OUTCOMES, Metrics, wait_for_rest, wait_until_settled
from server_process import ServerProcess
from waiting import until

from inflight_client import Client, CompletionStream, DeadlineExceeded

ENDLESS = {"max_tokens": 1800, "end_id": -1}
RAW_ENDLESS = {"text_input": "Once", "stream": True, "exclude_input_in_output": True, **ENDLESS}


@pytest.fixture(scope="module")
def one_at_a_time() -> Iterator[ServerProcess]:
    with ServerProcess(parameters={"max_batch_size": "1"}) as running:
        yield running


def outcome(server: ServerProcess, kind: str) -> float:
    return Metrics(server).of(OUTCOMES, outcome=kind)


def test_clients_that_leave_free_their_memory(server: ServerProcess, client: Client) -> None:
    before = wait_until_settled(server).of(OUTCOMES, outcome="cancelled")
    streams = [client.stream(f"Story {number}:", **ENDLESS) for number in range(24)]  # type: ignore[arg-type]
    with ThreadPoolExecutor(len(streams)) as threads:
        list(threads.map(next, streams))
    until(lambda: not Metrics(server).is_at_rest, "the requests are seen")
    for stream in streams:
        stream.close()
    wait_for_rest(server)
    until(lambda: outcome(server, "cancelled") == before + len(streams), "each is counted as cancelled")


def test_who_leaves_the_queue_is_never_served(one_at_a_time: ServerProcess) -> None:
    """One client leaves while it waits, and the request of another is stopped while it waits."""
    with RawStream(one_at_a_time.grpc_url) as running, RawStream(one_at_a_time.grpc_url) as waiting:
        served = running.send(RAW_ENDLESS)
        running.take()
        leaving = RawStream(one_at_a_time.grpc_url)
        for stream, request_id in ((leaving, "leaving"), (waiting, "stopped")):
            queued = stream.send(RAW_ENDLESS, request_id=request_id)
            # Requests of one stream arrive in order: once this one is refused, the one before it waits.
            assert stream.ask({"max_tokens": 1}).error
            assert not queued.responses
        leaving.close(cancel=True)
        assert not running.ask({"stop": True}, request_id="stopped").error
        sentence = "request Id stopped has been stopped. Request is ignored. [CANCELLED]"
        assert waiting.collect(queued).error == sentence
        until(lambda: outcome(one_at_a_time, "cancelled") == 2, "both are counted as cancelled")
        assert not served.num_finals, "nobody else has had a turn yet"
        running.collect(served)
        assert len(served.token_ids) == ENDLESS["max_tokens"] and not served.error
        assert len(running.ask({**RAW_ENDLESS, "max_tokens": 3}).token_ids) == 3
    wait_for_rest(one_at_a_time)


def drain(stream: CompletionStream) -> int:
    for _ in stream:
        pass
    return stream.completion.num_output_tokens


def test_another_client_stops_a_request_by_its_id(server: ServerProcess, client: Client) -> None:
    stream = client.stream("Once upon a time", request_id="4711", **ENDLESS)  # type: ignore[arg-type]
    neighbour = client.stream("Once upon a time", request_id="4712", max_tokens=200, end_id=-1)
    first = next(stream)
    with Client(server.grpc_url, timeout=120) as other:
        other.stop("4711")
    rest = list(stream)
    assert rest[-1].finish_reason == "cancelled"
    assert 0 < stream.completion.num_output_tokens < ENDLESS["max_tokens"]
    assert stream.completion.text.startswith(first.text)
    assert drain(neighbour) == 200
    wait_for_rest(server)


def test_a_deadline_ends_the_request_on_the_server_too(server: ServerProcess, client: Client) -> None:
    with pytest.raises(DeadlineExceeded):
        for number in range(100):
            client.generate(f"Take your time, {number}", timeout=0.3, **ENDLESS)  # type: ignore[arg-type]
    wait_for_rest(server)


def test_a_request_whose_allotted_time_is_up_keeps_what_it_has(server: ServerProcess) -> None:
    """Some time ends between the first token and the 1,800th, 10 minutes do not; both by Triton's own parameter and by
    ours."""
    with RawStream(server.grpc_url) as stream:
        for allot in (lambda ms: {"timeout": 1000 * ms}, lambda ms: {"parameters": {"allotted_time_ms": ms}}):
            before = wait_until_settled(server).of(OUTCOMES, outcome="timed_out")
            for number in itertools.count(1):
                answer = stream.ask(RAW_ENDLESS, **allot(100 * 2**number))
                if not answer.error:
                    break
                assert "waited longer than the time it was allotted" in answer.error, "no token was computed by then"
            assert answer.finish_reason == "timeout"
            assert 0 < len(answer.token_ids) < ENDLESS["max_tokens"]
            until(lambda count=before + number: outcome(server, "timed_out") == count, "counted as timed out")
        plenty = stream.ask({**RAW_ENDLESS, "max_tokens": 20}, timeout=600_000_000)
        assert plenty.finish_reason == "length" and len(plenty.token_ids) == 20
    wait_for_rest(server)


def test_a_request_whose_allotted_time_is_up_while_it_waits_is_counted_so(one_at_a_time: ServerProcess) -> None:
    with RawStream(one_at_a_time.grpc_url) as running, RawStream(one_at_a_time.grpc_url) as waiting:
        served = running.send(RAW_ENDLESS)
        running.take()
        late = waiting.ask(RAW_ENDLESS, parameters={"allotted_time_ms": 1})
        assert "waited longer than the time it was allotted" in late.error
        assert not served.num_finals, "nobody else has had a turn yet"
        until(lambda: outcome(one_at_a_time, "timed_out") == 1, "counted as timed out")
    wait_for_rest(one_at_a_time)
