"""CUDA graphs: what a decode step launches, recorded once for each key and launched again with one call.

A replay repeats the launches as they were recorded: the same kernels, grids, integers and addresses. So what is
recorded for a key launches the same whenever the key is the same, and reads what varies from memory that stays where it
is. It writes its results where it wrote them when it was recorded, until the next replay of that key.

A step has two graphs because it has two halves: one from its input to the hidden states, one from there to the sampled
tokens and the state of the rows behind them. So a step whose sampling is out of the ordinary replays the first, which
is nearly all of its launches.

All graphs take their memory from one pool. They never run at the same time, and each may overwrite what another has
computed. Only the results of a step's first graph stay until its second one, which is recorded while they are
referenced. The largest is recorded first, and the others find room in what it has taken. What is sampled lies outside,
see ResultCopies.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch

from inflight.garbage_pause import no_collections

Key = TypeVar("Key", bound=Hashable)
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkKey:
    """On what the launches up to the hidden states depend."""

    num_rows: int
    """Padding included."""
    has_adapters: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingKey:
    """On what those behind the hidden states depend."""

    network: NetworkKey
    """Whose hidden states they are."""
    is_random: bool
    is_filtered: bool
    log_probs: bool


class Graph(Protocol):
    def recording(self) -> AbstractContextManager[None]:
        """Meanwhile this thread's launches are recorded and not run."""
        ...

    def replay(self) -> None:
        """Launch what was recorded, on the current stream."""
        ...


class CudaGraph:
    """See Graph. Records on the current stream, which must not be the default one."""

    def __init__(self, pool: Any) -> None:
        """`pool`: of `torch.cuda.graph_pool_handle`."""
        self._graph = torch.cuda.CUDAGraph()
        self._pool = pool

    @contextmanager
    def recording(self) -> Iterator[None]:
        torch.cuda.synchronize()
        with no_collections():  # garbage may hold another graph, which CUDA does not destroy while it records
            # Other threads may use the GPU meanwhile: those of NCCL ask about events.
            self._graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                yield
            except BaseException:
                with suppress(RuntimeError):  # which only repeats that the recording has failed
                    self._graph.capture_end()
                raise
            self._graph.capture_end()

    def replay(self) -> None:
        self._graph.replay()


class GraphSet(Generic[Key, Result]):
    """Graphs of one kind, by key."""

    def __init__(self) -> None:
        self._recorded: dict[Key, tuple[Graph, Result]] = {}
        self.num_replays: dict[Key, int] = {}
        """For every key that is recorded."""

    def __len__(self) -> int:
        return len(self._recorded)

    def record(self, key: Key, graph: Graph, compute: Callable[[], Result]) -> None:
        """Record in `graph` what `compute` launches. It runs once before that, so that kernels are compiled."""
        compute()
        with graph.recording():
            result = compute()
        self._recorded[key] = graph, result
        self.num_replays[key] = 0

    def replay(self, key: Key) -> Result:
        """Launch what was recorded for `key`; its result, which the next replay of it overwrites."""
        self._recorded[key][0].replay()
        self.num_replays[key] += 1
        return self.result(key)

    def clear(self) -> None:
        """Give the graphs up, none of which may be running."""
        self._recorded.clear()

    def result(self, key: Key) -> Result:
        """Where a replay of `key` writes."""
        return self._recorded[key][1]


def cuda_graphs() -> Callable[[], Graph]:
    """Makes graphs that share a pool."""
    pool = torch.cuda.graph_pool_handle()
    return lambda: CudaGraph(pool)


GRAPHS: dict[str, Callable[[], Callable[[], Graph]]] = {"cuda": cuda_graphs}
"""Device type -> what makes its graphs; other devices have none."""
