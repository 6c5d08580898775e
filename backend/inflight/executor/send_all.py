"""Many requests at once, more than the engine's queue takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from inflight.errors import QueueFull
from inflight.executor.front.generation_result import GenerationResult


def send_all(
    sends: Sequence[Callable[[], GenerationResult]], advance: Callable[[], None] = lambda: None
) -> list[GenerationResult]:
    """Call all and wait for what they return; while the queue is full, for the earlier ones first. `advance` is called
    for each. If one fails its error is raised, and the others are aborted."""
    results: list[GenerationResult] = []
    num_done = 0
    try:
        for send in sends:
            while (result := _unless_full(send, raise_if_full=num_done == len(results))) is None:
                results[num_done].result()
                num_done += 1
                advance()
            results.append(result)
        for result in results[num_done:]:
            result.result()
            num_done += 1
            advance()
    except BaseException:
        for result in results[num_done:]:
            result.abort()
        raise
    return results


def _unless_full(send: Callable[[], GenerationResult], *, raise_if_full: bool) -> GenerationResult | None:
    """What `send` returns; None if the queue is full. Raises QueueFull if nobody's end could be waited for."""
    try:
        return send()
    except QueueFull:
        if raise_if_full:
            raise
        return None
