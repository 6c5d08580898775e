"""`python -m ci.bench.replicas`: one replica with two threads against two with one each, on the same two cores.

Case (b) of `make bench` in rounds that take turns; both engines are up all the time, and an idle one costs nothing.
Prints a table and one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import random
from contextlib import ExitStack, closing
from pathlib import Path
from statistics import median

from ci.bench.checkpoint import make_checkpoint
from ci.bench.engines import Inflight, engine_parameters
from ci.bench.workload import batch_jobs
from inflight.config import EngineConfig
from inflight.executor.executor import Executor

ROOT = Path(__file__).resolve().parents[2]
WAYS = {
    "1 replica, 2 threads": {"data_parallel_size": "1", "num_threads": "2"},
    "2 replicas, 1 thread": {"data_parallel_size": "2", "num_threads": "1"},
}
"""The first is what the others are compared with."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="counted rounds")
    parser.add_argument("--jobs", type=int, default=32, help="requests of a round")
    parser.add_argument("--checkpoint", type=Path, default=ROOT / "build" / "bench-135m", help="made if missing")
    options = parser.parse_args()
    checkpoint = make_checkpoint(options.checkpoint, ROOT / "model_repository" / "llm" / "1" / "checkpoint")
    rates = measure(checkpoint, options.rounds, options.jobs)
    first = rates[next(iter(WAYS))]
    summary = {
        name: {
            "rate": round(median(row), 1),
            "ratio": round(median(rate / one for rate, one in zip(row, first, strict=True)), 3),
        }
        for name, row in rates.items()
    }
    for name, found in summary.items():
        print(f"{name:24}{found['rate']:9.1f} tokens/s{found['ratio']:9.3f}")
    print(json.dumps({"tokens_per_second": summary, "rounds": rates}))
    return 0


def measure(checkpoint: Path, num_rounds: int, num_jobs: int) -> dict[str, list[float]]:
    """Output tokens per second of each round."""
    rng = random.Random(30)
    rates: dict[str, list[float]] = {name: [] for name in WAYS}
    with ExitStack() as stack:
        engines = {}
        for name, parameters in WAYS.items():
            config = EngineConfig.from_parameters({**engine_parameters(checkpoint), **parameters})
            engines[name] = stack.enter_context(closing(Inflight(Executor(config=config))))
        for number in range(1 + num_rounds):  # the first is not counted
            for name, engine in engines.items():
                rate = engine.batch(batch_jobs(rng, random.Random(7), num_jobs))
                print(f"round {number}, {name}: {rate:.1f}", flush=True)
                if number:
                    rates[name].append(rate)
    return rates


if __name__ == "__main__":
    raise SystemExit(main())
