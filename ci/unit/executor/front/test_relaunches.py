"""For how long requests wait for ranks that could not be brought back at once."""

from __future__ import annotations

import math

from inflight.executor.front.relaunches import LaunchEnd, Relaunches

SERVED = LaunchEnd(reason="killed", has_served=True)
FAILED = LaunchEnd(reason="killed while it loaded")
REFUSED = LaunchEnd(reason="no such checkpoint", is_misconfigured=True)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_so_many_tries_are_allowed() -> None:
    relaunches = Relaunches(600, 3, Clock())
    relaunches.note(SERVED)
    seen = []
    for _ in range(4):
        relaunches.note(FAILED)
        seen.append(relaunches.are_given_up)
    assert seen == [False, False, True, True]


def test_tries_may_begin_for_so_long() -> None:
    clock = Clock()
    relaunches = Relaunches(600, math.inf, clock)
    clock.now = 5000.0
    relaunches.note(SERVED)
    clock.now += 599
    relaunches.note(FAILED)
    assert not relaunches.are_given_up
    clock.now += 1
    relaunches.note(FAILED)
    assert relaunches.are_given_up


def test_what_cannot_succeed_is_not_tried_again_until_it_has_served() -> None:
    relaunches = Relaunches(600, 3, Clock())
    relaunches.note(REFUSED)
    assert relaunches.are_given_up
    relaunches.note(FAILED)
    assert relaunches.are_given_up, "nobody waits any more, so nothing has changed"
    relaunches.note(SERVED)
    relaunches.note(FAILED)
    assert not relaunches.are_given_up, "counted anew"
