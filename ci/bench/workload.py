"""The workload of every engine: the three cases, and lists of requests that are new in each round."""

from __future__ import annotations

import random
from dataclasses import dataclass

from ci.bench.checkpoint import VOCAB_SIZE

CONCURRENCY = 16
"""Requests at a time in case (b), and the size of a static batch."""


@dataclass(frozen=True, slots=True)
class Job:
    """One request: a prompt that was not sent before, and the number of tokens to generate."""

    prompt: list[int]
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    text: str
    goal: float
    """Ratio to transformers that must be reached."""
    stretch: float
    """Ratio to transformers that the best C++ engines for CPUs reach."""


CASES = (
    Case("decode", "(a) batch 1, 128 in, 128 out: decode tokens/s", 2.7, 4.0),
    Case("batch", "(b) 32 requests, 32-256 in, 16-256 out, 16 at a time: output tokens/s", 3.0, 4.5),
    Case("prefill", "(c) prefill of 1,024: tokens/s", 1.7, 2.3),
)


def prompt(rng: random.Random, num_tokens: int) -> list[int]:
    return [rng.randrange(VOCAB_SIZE) for _ in range(num_tokens)]


def batch_jobs(rng: random.Random, lengths: random.Random, num_jobs: int = 32) -> list[Job]:
    """Case (b): lengths from `lengths`, equal in every round; tokens from `rng`, never twice."""
    sizes = [(lengths.randint(32, 256), lengths.randint(16, 256)) for _ in range(num_jobs)]
    return [Job(prompt(rng, num_in), num_out) for num_in, num_out in sizes]
