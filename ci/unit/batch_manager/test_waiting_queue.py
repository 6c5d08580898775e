"""Sequences wait in their order, and a long queue is no work for anybody but those who join and leave it."""

from __future__ import annotations

import random

import pytest
from harness import Harness, make_request

from inflight.batch_manager.sequence import Order, Sequence, SequenceStatus
from inflight.batch_manager.waiting_queue import WaitingQueue


def make_sequence(order: Order) -> Sequence:
    sequence = Sequence(make_request(order[2], 3), max_seq_len=64)
    sequence.order = order
    return sequence


def finish(queue: WaitingQueue, sequence: Sequence) -> None:
    queue.discard(sequence)
    sequence.status = SequenceStatus.FINISHED


def test_the_smallest_order_is_the_head() -> None:
    orders = [(1, -0.5, 3), (1, -0.9, 4), (0, 0.0, 9), (1, -0.5, 2)]
    queue = WaitingQueue()
    for order in orders:
        queue.push(make_sequence(order))
    assert [queue.pop().order for _ in orders] == sorted(orders)
    assert len(queue) == 0 and not queue


def test_what_was_finished_while_it_waited_is_never_seen() -> None:
    rng = random.Random(1)
    queue = WaitingQueue()
    sequences = [make_sequence((1, rng.choice([0.0, -0.5]), number)) for number in range(500)]
    for sequence in sequences:
        queue.push(sequence)
    rng.shuffle(sequences)
    kept = sequences[:20]
    for sequence in sequences[20:]:
        finish(queue, sequence)
    assert len(queue) == 20 and set(queue) == set(kept)
    assert len(queue._heap) <= 64, "what was finished does not stay for ever"
    assert [queue.pop() for _ in range(20)] == sorted(kept, key=lambda sequence: sequence.order)


def test_paused_sequences_are_counted() -> None:
    queue = WaitingQueue()
    paused = [make_sequence((0, 0.0, number)) for number in range(3)]
    for sequence in paused:
        sequence.status = SequenceStatus.PAUSED
        queue.push(sequence)
    queue.push(make_sequence((1, 0.0, 7)))
    assert queue.num_paused == 3
    queue.pop()
    finish(queue, paused[2])
    assert queue.num_paused == 1 and len(queue) == 2


def test_no_step_stop_or_statistic_goes_through_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = Harness(max_batch_size=2)
    requests = [make_request(i, 4, 3) for i in range(200)]
    monkeypatch.setattr(harness, "_get_inference_requests", lambda count: [])
    monkeypatch.setattr(
        WaitingQueue, "__iter__", lambda queue: pytest.fail("somebody looked at every waiting sequence")
    )
    for request in requests:
        harness.requests[request.request_id] = request
        harness.manager._accept(request)
    for stopped in (150, 3, 77):
        harness.stops = {stopped}
        harness.manager.step()
    while harness.manager.num_active_requests:
        harness.manager.step()
    assert all(harness.num_finals(request.request_id) == 1 for request in requests)
    assert harness.tokens(199) == harness.expected(199)
