"""The two halves of a step: when the second one is started, and what a mask changes about that."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from harness import Harness, make_request

from inflight.batch_manager import active_request
from inflight.batch_manager.sequence import Sequence
from inflight.config import SchedulerPolicy
from inflight.errors import StepFailed
from inflight.request import Request
from inflight.scheduler_output import NO_SLOT


def log_halves(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    log: list[str] = []
    for name in ("forward", "sample", "collect"):
        half = getattr(harness.runner, name)

        def logged(argument: object, name: str = name, half: Callable[[object], object] = half) -> object:
            result = half(argument)
            log.append(f"{name} {result if name == 'forward' else argument}")
            return result

        monkeypatch.setattr(harness.runner, name, logged)
    return log


def test_a_step_is_sampled_at_once_and_before_the_step_before_is_collected(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = Harness()
    log = log_halves(harness, monkeypatch)
    harness.serve(make_request(1, 4, 3))
    assert log == [
        *("forward 0", "sample 0", "forward 1", "sample 1", "collect 0"),
        *("forward 2", "sample 2", "collect 1", "collect 2"),
    ]


def give_masks(monkeypatch: pytest.MonkeyPatch, *request_ids: int) -> None:
    def sequence(request: Request, **options: Any) -> Sequence:
        made = Sequence(request, **options)
        made.mask_slot = 0 if request.request_id in request_ids else NO_SLOT
        return made

    monkeypatch.setattr(active_request, "Sequence", sequence)


def test_a_step_whose_masks_depend_on_the_token_before_is_sampled_when_that_is_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its network runs all the same while the step before is brought to the host."""
    give_masks(monkeypatch, 1)
    harness = Harness()
    log = log_halves(harness, monkeypatch)
    harness.serve(make_request(1, 4, 3))
    assert log == [
        *("forward 0", "sample 0", "forward 1", "collect 0", "sample 1"),
        *("forward 2", "collect 1", "sample 2", "collect 2"),
    ]
    assert harness.tokens(1) == harness.expected(1)


def test_masks_of_some_hold_up_nobody_else_for_longer_than_they_live(monkeypatch: pytest.MonkeyPatch) -> None:
    give_masks(monkeypatch, 1, 4)
    harness = Harness(policy=SchedulerPolicy.MAX_UTILIZATION, num_blocks=10)
    requests = [make_request(i, 6, 4 + 3 * i, streaming=True) for i in range(1, 7)]
    harness.submit(*requests)
    for _ in range(9):
        harness.step()
    harness.stops = {4}
    harness.run_until_idle()
    for request_id in (1, 2, 3, 5, 6):
        assert harness.tokens(request_id) == harness.expected(request_id)
    late = [step.samples_late for step in harness.runner.launched]
    assert any(late) and not late[-1], "without masks nothing waits"


@pytest.mark.parametrize("step", range(7))
def test_a_step_that_fails_while_another_waits_to_be_sampled(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    give_masks(monkeypatch, 1)
    harness = Harness(runner={"fail_collect": lambda number: number == step})
    harness.serve(make_request(1, 4, 7), make_request(2, 4, 7))
    failed = [request_id for request_id in (1, 2) if isinstance(harness.responses[request_id][-1][2], StepFailed)]
    assert failed
    for request_id in (1, 2):
        assert harness.num_finals(request_id) == 1
        assert request_id in failed or harness.tokens(request_id) == harness.expected(request_id)
    monkeypatch.undo()
    harness.serve(make_request(3, 4, 7))
    assert harness.tokens(3) == harness.expected(3)
