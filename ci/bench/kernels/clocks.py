"""How calls are timed: by replays of CUDA graphs on a GPU, not at all on a CPU.

A contender is a list of calls, one for each set of inputs. One graph rotates over the sets, which together are more
than four times as large as the L2 cache, so that no call finds its inputs there. Contenders run in the order A B C C B
A: if the device slows down, all are affected alike, and each has two runs to compare. Knows no case.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

Contender = list[Callable[[], Any]]

MIN_CALLS = 20
MIN_REPLAYS = 20
MAX_REPLAYS = 100
# Duration of a graph from which the gap of a few microseconds between replays is negligible: no more calls are added.
LONG_GRAPH_MS = 20.0


@dataclass(frozen=True)
class Times:
    """Microseconds a call, the medians of two runs."""

    first: float
    second: float

    @property
    def best(self) -> float:
        """The shorter run."""
        return min(self.first, self.second)

    @property
    def spread(self) -> float:
        """How much longer the other run is, relative to the shorter one. Above 0.03 the measurement is unreliable."""
        return max(self.first, self.second) / self.best - 1.0


class Clock(Protocol):
    """Something that runs contenders, and may time them."""

    device: torch.device

    def sets(self, bytes_a_set: int) -> int:
        """Number of sets of inputs to rotate over, if a set has this many bytes."""

    def race(self, contenders: dict[str, Contender], seconds: float) -> tuple[dict[str, Times], dict[str, str]]:
        """(contender -> times, contender that failed -> reason). Takes about `seconds`."""


class DryClock:
    """Calls each contender once, with the second of two sets of inputs, and times nothing."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def sets(self, bytes_a_set: int) -> int:
        """Two."""
        return 2

    def race(self, contenders: dict[str, Contender], seconds: float) -> tuple[dict[str, Times], dict[str, str]]:
        """Returns no times. Exceptions of contenders are raised."""
        for calls in contenders.values():
            calls[-1]()
        return {}, {}


class GraphClock:
    """Median time of CUDA graph replays, two runs of each contender, interleaved."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size

    def sets(self, bytes_a_set: int) -> int:
        """At least three, and together more than four times the L2 cache, but at most 40 % of the free memory."""
        # Memory that torch's allocator caches from earlier cases would not count as free.
        torch.cuda.empty_cache()
        wanted = max(4 * self._l2_bytes // max(bytes_a_set, 1) + 1, 3)
        free, _ = torch.cuda.mem_get_info(self.device)
        return int(max(min(wanted, 0.4 * free // max(bytes_a_set, 1), 512), 1))

    def race(self, contenders: dict[str, Contender], seconds: float) -> tuple[dict[str, Times], dict[str, str]]:
        """See `Clock`; a contender that raises while it warms up or is captured is left out."""
        graphs: dict[str, tuple[torch.cuda.CUDAGraph, int]] = {}
        failures: dict[str, str] = {}
        for name, calls in contenders.items():
            try:
                graphs[name] = self._capture(calls)
            except Exception as error:
                failures[name] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        trial_ms = sum(self._replay(graph, 1)[0] for graph, _ in graphs.values())
        replays = int(min(max(seconds * 1e3 / (2 * trial_ms + 1e-9), MIN_REPLAYS), MAX_REPLAYS)) if graphs else 0
        runs: dict[str, list[float]] = {name: [] for name in graphs}
        for name in [*graphs, *reversed(graphs)]:
            graph, calls_a_graph = graphs[name]
            runs[name].append(statistics.median(self._replay(graph, replays)) * 1e3 / calls_a_graph)
        return {name: Times(*both) for name, both in runs.items()}, failures

    def _capture(self, calls: Contender) -> tuple[torch.cuda.CUDAGraph, int]:
        """(graph of calls that rotate over the sets, number of calls). Warms up first, to compile all kernels."""
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for call in calls:
                call()
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            calls[0]()
            end.record()
        torch.cuda.synchronize(self.device)
        wanted = min(MIN_CALLS, max(LONG_GRAPH_MS / max(begin.elapsed_time(end), 1e-3), 1))
        rounds = int(-(-wanted // len(calls)))
        graph = torch.cuda.CUDAGraph()
        # Results of a round stay alive until the next, so that each set of inputs has memory of its own to write to.
        results: list[Any] = [None] * len(calls)
        with torch.cuda.graph(graph):
            for _ in range(rounds):
                for i, call in enumerate(calls):
                    results[i] = call()
        return graph, rounds * len(calls)

    def _replay(self, graph: torch.cuda.CUDAGraph, replays: int) -> list[float]:
        """Milliseconds of each replay."""
        events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(replays)]
        graph.replay()
        for begin, end in events:
            begin.record()
            graph.replay()
            end.record()
        torch.cuda.synchronize(self.device)
        return [begin.elapsed_time(end) for begin, end in events]
