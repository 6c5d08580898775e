"""The leader's queue."""

from __future__ import annotations

import pytest
from harness import make_request
from hypothesis import given
from hypothesis import strategies as st

from inflight.executor.rank.leader.request_queue import RequestQueue


def test_higher_priority_goes_first_and_equals_in_order_of_arrival() -> None:
    queue = RequestQueue()
    for request_id, priority in ((1, 0.5), (2, 0.1), (3, 0.9), (4, 0.5), (5, 0.9)):
        queue.push(make_request(request_id, 2, priority=priority))
    assert [queue.pop().request_id for _ in range(5)] == [3, 5, 1, 4, 2]
    assert len(queue) == 0


def test_a_discarded_request_never_comes_out() -> None:
    queue = RequestQueue()
    for request_id in (1, 2, 3):
        queue.push(make_request(request_id, 2))
    assert queue.discard(2)
    assert not queue.discard(2)
    assert not queue.discard(7)
    assert 2 not in queue and len(queue) == 2
    assert [queue.pop().request_id for _ in range(2)] == [1, 3]
    with pytest.raises(IndexError):
        queue.pop()


def test_an_id_that_was_discarded_may_come_again_and_takes_its_new_place() -> None:
    queue = RequestQueue()
    queue.push(make_request(1, 2, max_tokens=3))
    queue.discard(1)
    queue.push(make_request(2, 2))
    queue.push(make_request(1, 2, max_tokens=4))
    assert [(r.request_id, r.max_tokens) for r in (queue.pop(), queue.pop())] == [(2, 5), (1, 4)]


@given(
    st.lists(st.tuples(st.sampled_from(["push", "pop", "discard"]), st.integers(0, 200), st.sampled_from([0.2, 0.5])))
)
def test_it_behaves_as_a_sorted_list(actions: list[tuple[str, int, float]]) -> None:
    queue, model = RequestQueue(), []
    for arrival, (action, request_id, priority) in enumerate(actions):
        waiting = [entry[2] for entry in model]
        if action == "push" and request_id not in waiting:
            queue.push(make_request(request_id, 2, priority=priority))
            model.append((-priority, arrival, request_id))
        elif action == "pop" and model:
            model.sort()
            assert queue.pop().request_id == model.pop(0)[2]
        elif action == "discard":
            assert queue.discard(request_id) == (request_id in waiting)
            model = [entry for entry in model if entry[2] != request_id]
        assert len(queue) == len(model)


def test_fronts_take_turns_whatever_their_numbers() -> None:
    queue = RequestQueue()
    for request_id in range(1, 10_001):
        queue.push(make_request(request_id, 1), "many")
    queue.push(make_request(20_001, 1), "few")
    queue.push(make_request(20_002, 1), "few")
    assert [queue.pop().request_id for _ in range(6)] == [1, 20_001, 2, 20_002, 3, 4]
    queue.push(make_request(20_003, 1), "few")
    assert [queue.pop().request_id for _ in range(3)] == [5, 20_003, 6]
    assert len(queue) == 10_003 - 9


def test_tenants_of_a_front_take_turns_with_each_other_and_with_other_fronts() -> None:
    queue = RequestQueue()
    for request_id in range(1, 10_001):
        queue.push(make_request(request_id, 1, tenant=1), "front")
    queue.push(make_request(20_001, 1, tenant=2), "front")
    queue.push(make_request(30_001, 1), "other front")
    queue.push(make_request(20_002, 1, tenant=2), "front")
    assert [queue.pop().request_id for _ in range(6)] == [1, 20_001, 30_001, 2, 20_002, 3]


def test_a_tenants_number_means_nothing_beyond_its_front() -> None:
    queue = RequestQueue()
    for request_id, front in ((1, "a"), (2, "a"), (3, "b")):
        queue.push(make_request(request_id, 1, tenant=7), front)
    assert [queue.pop().request_id for _ in range(3)] == [1, 3, 2]


def test_priority_holds_across_tenants() -> None:
    queue = RequestQueue()
    for request_id, priority, tenant in ((1, 0.5, 1), (2, 0.9, 1), (3, 0.5, 2), (4, 0.9, 1), (5, 1.0, 2)):
        queue.push(make_request(request_id, 1, priority=priority, tenant=tenant), "front")
    assert [queue.pop().request_id for _ in range(5)] == [5, 2, 4, 1, 3]


def test_priority_holds_across_fronts() -> None:
    queue = RequestQueue()
    for request_id, priority, front in ((1, 0.5, "a"), (2, 0.9, "a"), (3, 0.5, "b"), (4, 0.9, "a"), (5, 1.0, "b")):
        queue.push(make_request(request_id, 1, priority=priority), front)
    assert [queue.pop().request_id for _ in range(5)] == [5, 2, 4, 1, 3]


def test_the_head_stays_whoever_comes_behind_it() -> None:
    queue = RequestQueue()
    queue.push(make_request(1, 1), "a")
    queue.push(make_request(2, 1), "b")
    head = queue.head()
    queue.push(make_request(3, 1), "c")
    queue.discard(2)
    assert queue.head() is head and queue.pop() is head


def test_levels_that_come_and_go_leave_nothing_behind() -> None:
    queue = RequestQueue()
    queue.push(make_request(1, 1, priority=1.0))
    for number in range(2, 2000):
        queue.push(make_request(number, 1, priority=number / 4000))
        queue.discard(number)
    assert len(queue._priorities) < 100 and queue.pop().request_id == 1
    with pytest.raises(IndexError):
        queue.head()
