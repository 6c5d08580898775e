"""`python -m ci.bench.ranks`: broadcasts and sums in each way there is, then one rank against two with its cores.

The engines are one rank of two threads under each launcher, two ranks of one thread and two pipeline stages, with
layers in C++, and two ranks with layers in torch. All of them run at once; round by round each gets the same requests
in turn, those of `make bench`. Prints tables and one line of JSON, and keeps a result file.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from ci.bench.checkpoint import Shape, make_checkpoint
from ci.bench.engines import Inflight, engine_parameters
from ci.bench.report import machine, result_path
from ci.bench.workload import CASES, Job, batch_jobs, prompt
from inflight.config import EngineConfig
from inflight.executor.executor import Executor
from inflight.mpi_launcher import find_launcher, launcher_environment, launcher_options
from inflight.python_command import find_python, worker_environment
from inflight.run_directory import RUN_DIRECTORY

ROOT = Path(__file__).resolve().parents[3]
TOKENIZER = ROOT / "model_repository" / "llm" / "1" / "checkpoint"
SEED = 20
SIZES = (1, 2, 3, 4)
"""Ranks among which messages are broadcast."""
Rates = dict[str, dict[str, list[float]]]
"""Case -> engine -> tokens per second of each round."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7, help="counted rounds")
    parser.add_argument("--requests", type=int, default=32, help="of case (b)")
    parser.add_argument("--only-broadcasts", action="store_true", help="measure nothing else")
    parser.add_argument("--no-torch", action="store_true", help="leave layers in torch out")
    parser.add_argument("--checkpoint", type=Path, default=ROOT / "build" / "bench-144m", help="made if missing")
    parser.add_argument("--results", type=Path, default=ROOT / "ci" / "bench" / "results")
    options = parser.parse_args()

    broadcasts = {size: time_broadcasts(size) for size in SIZES}
    for size, ways in broadcasts.items():
        print(f"us a broadcast to {size} ranks" + "".join(f"{int(length):>12,}" for length in ways["mpi"]) + " bytes")
        for way, row in ways.items():
            print(f"{way:26}" + "".join(f"{micros:12.1f}" for micros in row.values()))
    if options.only_broadcasts:
        print(f"kept in {keep({'broadcast_us': broadcasts}, {}, options)}")
        return 0
    sums = time_collectives()
    print(f"{'us a sum of kB':24}" + "".join(f"{kilobytes:>9}" for kilobytes in sums["gloo"]))
    for way, row in sums.items():
        print(f"{way:24}" + "".join(f"{micros:9.1f}" for micros in row.values()))
    checkpoint = make_checkpoint(options.checkpoint, TOKENIZER, Shape(num_heads=12, num_kv_heads=4))
    rates = measure_engines(checkpoint, options.rounds, options.requests, with_torch=not options.no_torch)
    summary = {"broadcast_us": broadcasts, "sum_us": sums, "tokens_per_second": summarise(rates)}
    for case, engines in summary["tokens_per_second"].items():
        print(f"{case}: " + ", ".join(f"{name} {found['rate']} ({found['ratio']})" for name, found in engines.items()))
    print(f"kept in {keep(summary, rates, options)}")
    print(json.dumps(summary))
    return 0


def time_broadcasts(size: int) -> dict[str, dict[str, float]]:
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder, socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
        listener.close()
        return run_ranks("broadcasts", size, folder, port)


def time_collectives() -> dict[str, dict[str, float]]:
    return run_ranks("collectives", 2)


def run_ranks(program: str, size: int, *arguments: str) -> dict[str, dict[str, float]]:
    """What the leader prints."""
    launcher = find_launcher(find_python(), one_host=True)
    module = f"ci.bench.ranks.{program}"
    command = [str(launcher), *launcher_options(launcher), "-n", str(size), sys.executable, "-m", module, *arguments]
    environment = launcher_environment(worker_environment(os.environ), one_host=True)
    done = subprocess.run(command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, dict[str, float]] = json.loads(done.stdout)
    return found


def measure_engines(checkpoint: Path, num_rounds: int, num_requests: int, with_torch: bool) -> Rates:
    two = {"tensor_parallel_size": "2", "num_threads": "1"}
    rng = random.Random(SEED)
    with contextlib.ExitStack() as stack:
        os.environ[RUN_DIRECTORY] = stack.enter_context(tempfile.TemporaryDirectory(prefix="run-"))

        def start(cpu_compile: str, **parameters: str) -> Inflight:
            options = {**engine_parameters(checkpoint), "cpu_compile": cpu_compile, **parameters}
            return Inflight(stack.enter_context(Executor(config=EngineConfig.from_parameters(options))))

        engines = {
            "one rank": start("true"),
            "one rank, mpi": start("true", executor="mpi"),
            "one rank, multiproc": start("true", executor="multiproc"),
            "two ranks": start("true", **two),
            "two ranks, multiproc": start("true", executor="multiproc", **two),
            "two stages": start("true", pipeline_parallel_size="2", num_threads="1"),
        }
        if with_torch:
            engines["two ranks, torch"] = start("false", **two)
        rates: Rates = {case.name: {name: [] for name in engines} for case in CASES}
        for number in range(num_rounds + 1):
            single, long = Job(prompt(rng, 128), 128), Job(prompt(rng, 1024), 1)
            jobs = batch_jobs(rng, random.Random(SEED), num_requests)
            for name, engine in engines.items():
                found = {"decode": engine.decode(single), "prefill": engine.prefill(long), "batch": engine.batch(jobs)}
                print(f"round {number or 'of warming up'}, {name}: {found}", file=sys.stderr, flush=True)
                if number:
                    for case, rate in found.items():
                        rates[case][name].append(rate)
        return rates


def summarise(rates: Rates) -> dict[str, dict[str, dict[str, float]]]:
    """Medians of the rates, and of the rounds' ratios to one rank."""
    return {
        case: {
            name: {
                "rate": round(median(row), 1),
                "ratio": round(median(a / b for a, b in zip(row, engines["one rank"], strict=True)), 3),
            }
            for name, row in engines.items()
        }
        for case, engines in rates.items()
    }


def keep(summary: dict[str, Any], rates: Rates, options: argparse.Namespace) -> Path:
    found = {**machine(), "checkpoint": options.checkpoint.name}
    path: Path = result_path(options.results, "ranks", found)
    rounds = {
        case: {name: [round(rate, 1) for rate in row] for name, row in each.items()} for case, each in rates.items()
    }
    path.write_text(json.dumps({"machine": found, "summary": summary, "rounds": rounds}, indent=1) + "\n")
    return path


if __name__ == "__main__":
    sys.exit(main())
