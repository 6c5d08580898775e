"""`python -m ci.bench.host_work`: the host's time per step, measured with a device that does nothing.

Runs one rank's loop with its callbacks, scheduler, preparation of input, padded as for a GPU, and reading of results,
without network, sampling, copies and sockets, and measures the CPU time of the loop's thread. Sequences end continually
and others take their rows; queued requests all wait in the scheduler.

From these times follows how long a GPU would wait for the host, if its steps took `--device-us` and their launch
`--launch-us`. Both are figures that are given, not measured: 4,700 µs is what the weights and caches of an 8B Llama in
bfloat16 take at batch 32 and 4 TB/s; 100 µs is a guess of what the replay of a CUDA graph and its copies take.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from ci.bench.report import machine, result_path
from inflight.config import EngineConfig
from inflight.distributed.rank_group import SingleRank
from inflight.engine_description import EngineDescription
from inflight.executor.rank.assembly import make_manager
from inflight.executor.rank.callbacks import RankCallbacks
from inflight.executor.wire.messages import NO_INPUT, RankInput
from inflight.request import Request
from inflight.request_limits import RequestLimits
from inflight.result import Response
from inflight.runtime.row_table import RowTable
from inflight.runtime.sampler import SampledTokens
from inflight.runtime.step_findings import StepFindings
from inflight.runtime.step_handle import StepHandle
from inflight.runtime.step_input import StepPreparation
from inflight.runtime.step_sizes import StepSizes
from inflight.scheduler_output import SchedulerOutput, StepOutput

BATCH_SIZES = (1, 32, 256)
QUEUES = (0, 100_000)
BLOCK_SIZE, MAX_SEQ_LEN, VOCAB_SIZE = 16, 4096, 128_256
PROMPT_LEN, MAX_TOKENS = 100, 300
WARMUP = 20
STATS_SECONDS = 0.05
DEVICE_US, LAUNCH_US = 4700.0, 100.0
RESULTS = Path(__file__).parent / "results"


class NullRunner:
    """A Runner that prepares every step as for a device, and returns the same token for every row."""

    description = EngineDescription(device="cpu")
    block_size = BLOCK_SIZE
    windows = (0,)
    num_host_blocks = 0
    num_snapshots = None
    num_host_snapshots = 0
    grammars = None
    adapters = None
    adapter_library = None

    def __init__(self, max_batch_size: int) -> None:
        self.num_blocks = max_batch_size * 80
        self.limits = RequestLimits(
            vocab_size=VOCAB_SIZE,
            max_seq_len=MAX_SEQ_LEN,
            max_input_len=MAX_SEQ_LEN - 1,
            kv_cache_tokens=self.num_blocks * BLOCK_SIZE,
        )
        self.preparation_ns = 0
        table = RowTable(max_batch_size, MAX_SEQ_LEN // BLOCK_SIZE + 1, self.num_blocks)
        sizes = StepSizes.of("cuda", max_batch_size)
        self._preparation = StepPreparation(table, vocab_size=VOCAB_SIZE, sizes=sizes)
        self._sampled = SampledTokens(
            token_ids_S=torch.full((max_batch_size,), 5),
            log_probs_S=None,
            is_finite_S=torch.ones(max_batch_size, dtype=torch.bool),
        )

    def forward(self, scheduled: SchedulerOutput) -> StepHandle:
        start = time.thread_time_ns()
        step = self._preparation.prepare(scheduled, [])
        self.preparation_ns += time.thread_time_ns() - start
        return StepHandle(step=step, forwarded=None, guided=[], processed=[], refused={})

    def sample(self, handle: StepHandle) -> dict[int, list[int]]:
        return {}

    def collect(self, handle: StepHandle) -> StepOutput:
        return StepFindings.of(handle, self._sampled, self._sampled.token_ids_S.tolist(), {}).output

    def survives(self, error: Exception) -> bool:
        return False

    def memory_usage(self) -> tuple[int, int, int]:
        return (0, 0, 0)

    def close(self) -> None:
        return None


class EndlessLeader:
    """Callbacks that provide a request for every free place in the batch, and at the start `num_queued` more."""

    def __init__(self, max_batch_size: int, num_queued: int) -> None:
        self._num_queued = num_queued
        self._requests = _requests(max_batch_size)
        self._next_stats = 0.0

    def next_input(self, max_requests: int, may_block: bool) -> RankInput:
        num_requests, self._num_queued = max_requests + self._num_queued, 0
        if not num_requests:
            return NO_INPUT
        return RankInput(requests=[next(self._requests) for _ in range(num_requests)], stops={})

    def respond(self, response: Response) -> None:
        return None

    def wants_stats(self) -> bool:
        return time.monotonic() >= self._next_stats

    def report_stats(self, json: str) -> None:
        self._next_stats = time.monotonic() + STATS_SECONDS

    wants_iteration_stats = wants_request_stats = False

    def all_ranks_answered(self) -> None:
        return None


def _requests(max_batch_size: int) -> Iterator[Request]:
    """Requests of the first batch end at different steps, spread over a request's duration; so later ones do too."""
    for number in count(1):
        share = min(number / max_batch_size, 1.0)
        yield Request(
            request_id=number,
            input_token_ids=list(range(PROMPT_LEN)),
            max_tokens=max(int(MAX_TOKENS * share), 10),
            streaming=True,
        )


def idle_share(host_us: list[float], device_us: float, launch_us: float) -> float:
    """Share of the time in which the device waits for the host, from its first step to its last.

    The host prepares a step and launches it while the device computes the one before, whose results it awaits then.
    """
    now = free = begun = idle = 0.0
    for number, host in enumerate(host_us):
        now += host + launch_us
        start = max(now, free)
        if number:
            idle += start - free
            now = max(now, free)  # the results of the step before
        else:
            begun = start
        free = start + device_us
    return idle / (free - begun)


def measure(
    max_batch_size: int,
    num_queued: int,
    num_steps: int,
    device_us: float = DEVICE_US,
    launch_us: float = LAUNCH_US,
) -> dict[str, Any]:
    """Microseconds of one step, and the percentage of time that a device would be idle."""
    config = EngineConfig(max_batch_size=max_batch_size, max_num_tokens=8192, tokens_per_block=BLOCK_SIZE)
    runner = NullRunner(max_batch_size)
    rank = RankCallbacks(SingleRank(), EndlessLeader(max_batch_size, num_queued))
    manager = make_manager(config, runner, rank.callbacks, raise_on_step_failure=False)
    rank.attach(manager)
    for _ in range(WARMUP):
        manager.step()
    runner.preparation_ns = 0
    times: list[int] = []
    for _ in range(num_steps):
        start = time.thread_time_ns()
        manager.step()
        times.append(time.thread_time_ns() - start)
    idle = idle_share([time_ns / 1e3 for time_ns in times], device_us, launch_us)
    times.sort()
    return {
        "batch": max_batch_size,
        "queued": num_queued,
        "p50": round(times[num_steps // 2] / 1e3, 1),
        "p99": round(times[num_steps * 99 // 100] / 1e3, 1),
        "preparation": round(runner.preparation_ns / num_steps / 1e3, 1),
        "idle_percent": round(100 * idle, 2),
    }


def step_times(num_steps: int) -> dict[str, dict[str, float]]:
    """By batch size, without a queue: microseconds of half of the steps, and of 99 %, at most."""
    cases = [measure(batch, 0, num_steps) for batch in BATCH_SIZES]
    return {str(case["batch"]): {share: case[share] for share in ("p50", "p99")} for case in cases}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1000, help="counted steps of each case")
    parser.add_argument("--device-us", type=float, default=DEVICE_US, help="what a step takes on the device")
    parser.add_argument("--launch-us", type=float, default=LAUNCH_US, help="what its launch takes on the host")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    times = (options.steps, options.device_us, options.launch_us)
    cases = [measure(batch, queued, *times) for batch in BATCH_SIZES for queued in QUEUES]
    table = Table(title="host work of a step, microseconds of CPU time")
    for heading in ("batch", "queued", "p50", "p99", "preparation", "idle %"):
        table.add_column(heading, justify="right")
    for case in cases:
        table.add_row(*(f"{value:,}" for value in case.values()))
    Console(width=100).print(table)
    found = machine()
    path = result_path(options.results, "host", found)
    path.write_text(json.dumps({"machine": found, "cases": cases}, indent=1) + "\n")
    print(f"kept in {path}")
    print(json.dumps(cases))
    return 0


if __name__ == "__main__":
    sys.exit(main())
