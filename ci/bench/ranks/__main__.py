"""`python -m ci.bench.ranks`: broadcasts and sums in each way there is, then one rank against two with its cores.

Engines run the default model in torch's layers, as C++ layers are for one rank. All of them run at once, and round by
round each gets the same requests in turn. Prints tables and one line of JSON, and keeps a result file.
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
import time
from pathlib import Path
from statistics import median
from typing import Any

from ci.bench.report import machine, result_path
from inflight.config import EngineConfig
from inflight.executor.executor import Executor
from inflight.executor.launchers.python_command import find_python, worker_environment
from inflight.mpi_launcher import find_launcher, launcher_environment, launcher_options
from inflight.request import Request
from inflight.run_directory import RUN_DIRECTORY

ROOT = Path(__file__).resolve().parents[3]
CHECKPOINT = ROOT / "model_repository" / "llm" / "1" / "checkpoint"
PROMPT, NEW = 16, 64
"""Tokens of each request."""
TOGETHER = (1, 8)
"""Requests at a time."""
SIZES = (1, 2, 3, 4)
"""Ranks among which messages are broadcast."""
PATIENCE = 60
Rates = dict[str, dict[str, list[float]]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9, help="counted rounds")
    parser.add_argument("--only-broadcasts", action="store_true", help="measure nothing else")
    parser.add_argument("--checkpoint", type=Path, default=CHECKPOINT)
    parser.add_argument("--dtype", default="float32")
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
    rates = measure_engines(options.checkpoint, options.dtype, options.rounds)
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


def measure_engines(checkpoint: Path, dtype: str, num_rounds: int) -> Rates:
    common = {"gpt_model_path": str(checkpoint), "dtype": dtype, "cpu_compile": "false", "max_batch_size": "8"}
    small = {"max_seq_len": "1024", "max_tokens_in_paged_kv_cache": "8192", "enable_kv_cache_reuse": "false"}
    two = {"tensor_parallel_size": "2", "num_threads": "1"}
    rng = random.Random(20)
    with contextlib.ExitStack() as stack:
        os.environ[RUN_DIRECTORY] = stack.enter_context(tempfile.TemporaryDirectory(prefix="run-"))

        def start(**parameters: str) -> Executor:
            config = EngineConfig.from_parameters({**common, **small, **parameters})
            return stack.enter_context(Executor(config=config))

        engines = {
            "one rank": start(num_threads="2"),
            "one rank, mpi": start(num_threads="2", executor="mpi"),
            "one rank, multiproc": start(num_threads="2", executor="multiproc"),
            "two ranks": start(**two),
            "two ranks, multiproc": start(**two, executor="multiproc"),
        }
        os.environ["CXX"] = "none"  # what ranks do without a compiler
        engines["two ranks, gloo"] = start(**two)
        rates: Rates = {f"{number} at a time": {name: [] for name in engines} for number in TOGETHER}
        for counted in [False] + [True] * num_rounds:
            for number, case in zip(TOGETHER, rates.values(), strict=True):
                prompts = [[rng.randrange(5, 2000) for _ in range(PROMPT)] for _ in range(number)]
                for name, engine in engines.items():
                    rate = serve(engine, prompts)
                    if counted:
                        case[name].append(rate)
    return rates


def serve(executor: Executor, prompts: list[list[int]]) -> float:
    """New tokens per second of all prompts at a time."""
    start = time.perf_counter()
    for prompt in prompts:
        executor.enqueue_request(Request(request_id=executor.next_request_id(), input_token_ids=prompt, max_tokens=NEW))
    running, num_tokens = len(prompts), 0
    while running:
        responses = executor.await_responses(timeout=PATIENCE)
        if not responses:
            raise TimeoutError("no response came")
        for response in responses:
            assert response.result is not None, response.error_msg
            num_tokens += len(response.result.output_token_ids)
            running -= response.is_final
    return num_tokens / (time.perf_counter() - start)


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
    found = {**machine(), "checkpoint": options.checkpoint.name, "dtype": options.dtype}
    path: Path = result_path(options.results, "ranks", found)
    rounds = {
        case: {name: [round(rate, 1) for rate in row] for name, row in each.items()} for case, each in rates.items()
    }
    path.write_text(json.dumps({"machine": found, "summary": summary, "rounds": rounds}, indent=1) + "\n")
    return path


if __name__ == "__main__":
    sys.exit(main())
