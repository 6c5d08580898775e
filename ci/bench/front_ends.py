"""`python -m ci.bench.front_ends`: what the ways to an engine cost: through tritonserver's gRPC streams, and through
the OpenAI server's, against the same requests in process.

Round by round each way gets requests of the same lengths, in turns of order, so that a machine which slows down slows
down for all. Both servers ask the same ranks. The clients run on the same cores as all others. CPU time is that of
processes by the system's count, so what a response costs at 16 streams includes the wake-ups of its processes. A
short round warms up and is not counted.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import selectors
import socket
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from rich.console import Console
from rich.table import Table

from ci.bench.checkpoint import make_checkpoint, with_words
from ci.bench.engines import Inflight, Served, engine_parameters
from ci.bench.report import machine, result_path
from ci.bench.transformers_process import THREADS
from ci.bench.workload import Job, batch_jobs
from inflight.config import EngineConfig

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "ci" / "bench" / "results"
NUM_STREAMS = (16, 64)
QUEUED_JOBS = 16
"""Beyond those that run at once: so 16 streams are case (b) of `make bench`."""
WARM_UP_JOBS = 4
GOALS = {"gRPC": 0.92, "OpenAI": 0.95}
"""Fraction of the rate in process."""
SEED = 22
TICKS = os.sysconf("SC_CLK_TCK")

Way = Callable[[list[Job], int], float]
"""Tokens per second of all jobs, so many at a time."""


class OpenAIStreams:
    """The engine behind the OpenAI server, asked by a client that only counts tokens."""

    def __init__(self, url: str) -> None:
        host, port = url.removeprefix("http://").split(":")
        self._address = (host, int(port))

    def batch(self, jobs: list[Job], num_streams: int) -> float:
        waiting, num_tokens = iter(jobs), 0
        start = perf_counter()
        with selectors.DefaultSelector() as selector:
            for job in [job for _, job in zip(range(num_streams), waiting, strict=False)]:
                self._ask(selector, job)
            while selector.get_map():
                for key, _ in selector.select():
                    connection: Any = key.fileobj
                    received = connection.recv(65536)
                    assert received, "the server has closed a stream before its end"
                    key.data.extend(received)
                    if not key.data.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"):
                        continue
                    num_tokens += int(key.data.rpartition(b'"completion_tokens":')[2].partition(b",")[0])
                    selector.unregister(connection)
                    connection.close()
                    if (job := next(waiting, None)) is not None:
                        self._ask(selector, job)
        seconds = perf_counter() - start
        assert num_tokens == sum(job.max_tokens for job in jobs)
        return num_tokens / seconds

    def _ask(self, selector: selectors.BaseSelector, job: Job) -> None:
        body = {"prompt": job.prompt, "max_tokens": job.max_tokens, "ignore_eos": True, "temperature": 0}
        data = json.dumps({**body, "stream": True, "stream_options": {"include_usage": True}}).encode()
        connection = socket.create_connection(self._address)
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(data) + data)
        selector.register(connection, selectors.EVENT_READ, bytearray())


class Measured:
    """Rates and CPU times of all rounds."""

    def __init__(self, pids: dict[str, int]) -> None:
        """`pids`: name of a process -> its id."""
        self._pids = pids
        self.rates: dict[str, list[float]] = defaultdict(list)
        self.cpu_us: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        """Way -> process -> microseconds per token, of those that did something."""

    def run(self, name: str, way: Way, jobs: list[Job], num_streams: int, *, counts: bool) -> float:
        before = {process: cpu_seconds(pid) for process, pid in self._pids.items()}
        rate = way(jobs, num_streams)
        if counts:
            num_tokens = sum(job.max_tokens for job in jobs)
            self.rates[name].append(rate)
            for process, pid in self._pids.items():
                self.cpu_us[name][process].append((cpu_seconds(pid) - before[process]) / num_tokens * 1e6)
        return rate

    def summary(self) -> dict[str, Any]:
        """Ratios are medians of the rounds' own ratios."""
        inside = self.rates["in process"]
        found: dict[str, Any] = {"in process": {"tokens_per_second": round(median(inside), 1)}}
        for way, goal in GOALS.items():
            ratios = [rate / base for rate, base in zip(self.rates[way], inside, strict=True)]
            found[way] = {
                "tokens_per_second": round(median(self.rates[way]), 1),
                "ratio": round(median(ratios), 3),
                "ratios": [round(ratio, 3) for ratio in ratios],
                "goal": goal,
                "cpu_us_per_token": {process: round(median(us), 1) for process, us in self.cpu_us[way].items()},
            }
        return found


def cpu_seconds(pid: int) -> float:
    """Of a process and its threads so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


@contextlib.contextmanager
def servers(parameters: dict[str, str]) -> Iterator[tuple[str, str, dict[str, int]]]:
    """tritonserver's gRPC address, the OpenAI server's URL, and the processes of both."""
    sys.path.insert(0, str(ROOT / "ci" / "helpers"))
    from server_process import MODEL_REPOSITORY, ServerProcess

    with ServerProcess(model_repository=MODEL_REPOSITORY, parameters=parameters, openai={"port": 0}) as server:
        (stub,) = server.stub_pids
        pids = {"tritonserver": server.tritonserver_pid, "stub": stub, "OpenAI server": server.openai_pid}
        yield server.grpc_url, server.openai_url, pids


def measure(ways: dict[str, Way], pids: dict[str, int], num_streams: int, num_rounds: int) -> dict[str, Any]:
    rng, measured = random.Random(SEED), Measured(pids)
    for number in range(num_rounds + 1):
        rates = {}
        for name in list(ways) if number % 2 else reversed(ways):
            num_jobs = num_streams + QUEUED_JOBS if number else WARM_UP_JOBS
            jobs = batch_jobs(rng, random.Random(SEED), num_jobs)
            rates[name] = measured.run(name, ways[name], jobs, num_streams, counts=number > 0)
        told = ", ".join(f"{name} {rate:,.0f}" for name, rate in rates.items())
        print(f"{num_streams} streams, round {number or 'of warming up'}: {told}", flush=True)
    return measured.summary()


def show(cases: dict[str, dict[str, Any]]) -> None:
    table = Table(title="tokens per second against the same in process, medians of interleaved rounds")
    for heading in ("streams", "way", "tokens/s", "ratio", "goal", "CPU us per token"):
        table.add_column(heading, justify="left" if heading in ("way", "CPU us per token") else "right")
    for streams, case in cases.items():
        for way, found in case.items():
            cpu = ", ".join(f"{process} {us:g}" for process, us in found.get("cpu_us_per_token", {}).items())
            ratio, goal = found.get("ratio", ""), found.get("goal", "")
            table.add_row(streams, way, f"{found['tokens_per_second']:,.1f}", str(ratio), str(goal), cpu)
    Console(width=130).print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3, help="counted rounds")
    parser.add_argument("--streams", type=int, nargs="+", default=list(NUM_STREAMS), help="at a time")
    parser.add_argument("--threads", type=int, default=THREADS, help="of the engine; 1 on a busy machine")
    parser.add_argument("--checkpoint", type=Path, default=ROOT / "build" / "bench-135m", help="made if missing")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    tokenizer = ROOT / "model_repository" / "llm" / "1" / "checkpoint"
    checkpoint = with_words(make_checkpoint(options.checkpoint, tokenizer))
    parameters = engine_parameters(checkpoint, max(options.streams), options.threads)
    with (
        contextlib.closing(Inflight(EngineConfig.from_parameters(parameters))) as inside,
        servers(parameters) as (grpc_url, openai_url, pids),
    ):
        ways = {"in process": inside.batch, "gRPC": Served(grpc_url).batch, "OpenAI": OpenAIStreams(openai_url).batch}
        cases = {str(count): measure(ways, pids, count, options.rounds) for count in options.streams}
    show(cases)
    found = {**machine(), "engine_threads": options.threads, "load": os.getloadavg()[0]}
    path = result_path(options.results, "front-ends", found)
    path.write_text(json.dumps({"machine": found, "streams": cases}, indent=1) + "\n")
    print(f"kept in {path}")
    print(json.dumps(cases))
    return 0


if __name__ == "__main__":
    sys.exit(main())
