"""This engine, without a server, as a worker: CHECKPOINT FORMAT, a format being DTYPE[+QUANTIZATION[+ACTIVATIONS]]."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

from protocol import CONCURRENCY, MAX_TOKENS, THREADS, Job, Run, serve

from ci.bench import workload
from ci.bench.engines import Inflight, engine_parameters
from inflight.config import EngineConfig


def load() -> Run:
    checkpoint, form = sys.argv[1:]
    dtype, *others = form.split("+")
    quantization, activations = [*others, *("none", "auto")[len(others) :]]
    parameters = engine_parameters(Path(checkpoint), CONCURRENCY, THREADS)
    assert parameters["max_seq_len"] == str(MAX_TOKENS)
    own = {
        "dtype": dtype,
        "quantization": quantization,
        "cpu_activations": activations,
        "cpu_compile": os.environ.get("BENCH_CPU_COMPILE", "true"),
    }
    engine = Inflight(EngineConfig.from_parameters(parameters | own))

    def run(jobs: list[Job]) -> Iterator[int]:
        return engine.run((workload.Job(job.prompt, job.max_tokens) for job in jobs), CONCURRENCY)

    return run


if __name__ == "__main__":
    serve(load)
