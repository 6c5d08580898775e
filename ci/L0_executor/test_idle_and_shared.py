"""Real ranks that idle, and that several fronts use, with MPI and without it.

pytest ci/L0_executor/test_idle_and_shared.py
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import zmq
from real_engine import (
    IDLE_SHARE,
    PATIENCE,
    Engine,
    listening_addresses,
    mapped_files,
    receive_tokens,
    starting,
    wait_until_idle,
)

from inflight.executor.wire.messages import (
    FRONT_ID_SHIFT,
    MAX_FRONT_ID,
    Hello,
    Submit,
    Welcome,
    decode_from_leader,
    encode,
)
from inflight.request import Request

PROMPTS = [[10, 20, 30], list(range(40, 75)), [7], [90, 91, 90, 91, 90, 91]]
IDLE_WAKES = 20
"""A second, for all processes of an idle engine together."""
GARBAGE = (b"", b"\xc1\xc1", bytes(1_000_000), b"\x81\xa4type\xa6Submit", encode(Hello(front_id=1, pid=1))[:-1])


@pytest.fixture(scope="module", params=["mpi", "multiproc"])
def shared_ranks(request: pytest.FixtureRequest) -> Iterator[Engine]:
    """Two ranks for tests that break nothing."""
    with starting() as start:
        yield start(tensor_parallel_size="2", executor=request.param)


def test_an_idle_engine_costs_nothing(shared_ranks: Engine) -> None:
    shared_ranks.generate(PROMPTS, 4)
    pids = shared_ranks.executor.engine_pids()
    wait_until_idle(pids, IDLE_WAKES, IDLE_SHARE)
    assert shared_ranks.executor.await_responses(timeout=0) == []


def test_ranks_of_one_machine_share_no_port_and_nothing_with_a_name(shared_ranks: Engine) -> None:
    """So no other user can reach what they exchange, and nothing is left when they are killed."""
    shared_ranks.generate(PROMPTS, 4)
    pids = shared_ranks.executor.engine_pids()
    assert len(pids) >= 2
    assert not {address for pid in pids for address in listening_addresses(pid)}
    for rank in (0, 1):
        mapped = mapped_files(shared_ranks.rank_pid(rank))
        assert "/memfd:inflight-ranks (deleted)" in mapped
        assert not [name for name in mapped if name.startswith("/dev/shm/") and not name.endswith("(deleted)")]


def test_two_fronts_share_one_engine(shared_ranks: Engine) -> None:
    first_front = shared_ranks.executor.next_request_id() >> FRONT_ID_SHIFT
    second_front = first_front % MAX_FRONT_ID + 1
    with zmq.Context() as context, context.socket(zmq.DEALER) as second:
        second.setsockopt(zmq.LINGER, 0)
        second.setsockopt(zmq.RCVTIMEO, PATIENCE * 1000)
        second.connect(shared_ranks.endpoint())
        second.send(encode(Hello(front_id=second_front, pid=os.getpid())))
        welcome = decode_from_leader(second.recv())
        assert isinstance(welcome, Welcome)
        request_id = second_front << FRONT_ID_SHIFT | 1
        second.send(encode(Submit([Request(request_id=request_id, input_token_ids=PROMPTS[0], max_tokens=12)])))
        expected = shared_ranks.generate(PROMPTS[:1], 12)
        assert [receive_tokens(second, request_id)] == expected


def test_garbage_from_a_stranger_harms_nobody(shared_ranks: Engine) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.connect(shared_ranks.endpoint())
        for frame in GARBAGE * 20:
            stranger.send(frame)
            stranger.send_multipart([frame, frame])
        assert len(shared_ranks.generate(PROMPTS, 8)) == len(PROMPTS)
        stranger.setsockopt(zmq.LINGER, 0)
    assert not shared_ranks.deaths.acquire(blocking=False)
