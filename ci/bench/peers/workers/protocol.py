"""What a worker says over stdin and stdout: a line of JSON for each list of requests, and one for its answer.

It imports nothing but the standard library, because workers run in environments that have not this repository.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

CONCURRENCY = 16
"""Requests at a time."""
THREADS = 2
MAX_TOKENS = 2048
"""Of a request, prompt and output."""


@dataclass(frozen=True)
class Job:
    prompt: list[int]
    max_tokens: int
    """Exactly as many are generated, greedily."""


Run = Callable[[list[Job]], Iterable[int]]
"""Runs requests, CONCURRENCY at a time in their order; yields how many tokens each of its steps gave."""


def serve(load: Callable[[], Run]) -> None:
    """Load an engine, say that it is ready, and run what is asked until stdin ends.

    In: {"jobs": [[prompt, max_tokens], ...]}. Out: {"first": s, "last": s, "num_tokens": n}, the seconds until the
    first and the last token of all.
    """
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what libraries print is no answer
    run = load()
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        jobs = [Job(*job) for job in json.loads(line)["jobs"]]
        print(json.dumps(_timed(run(jobs))), file=answers, flush=True)


def _timed(steps: Iterable[int]) -> dict[str, float]:
    start = time.perf_counter()
    arrivals = [(num_tokens, time.perf_counter() - start) for num_tokens in _giving(steps)]
    return {"first": arrivals[0][1], "last": arrivals[-1][1], "num_tokens": sum(number for number, _ in arrivals)}


def _giving(steps: Iterable[int]) -> Iterator[int]:
    return (num_tokens for num_tokens in steps if num_tokens)
