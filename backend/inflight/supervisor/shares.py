"""How several engines share a machine: cores and memory by weight, so that together they never take more than there is.

What does not fit is refused here, with the figures, before anything starts.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from inflight.available_memory import available_memory
from inflight.config import EngineConfig
from inflight.config_ranks import STARTED_OUTSIDE
from inflight.errors import ConfigurationError
from inflight.weight_bytes import host_bytes


def share_cores(
    engines: Mapping[str, EngineConfig],
    weights: Mapping[str, float],
    num_cores: int | None = None,
    on_demand: frozenset[str] = frozenset(),
) -> dict[str, int]:
    """Threads of each rank of each engine whose ranks compute on this machine's cores: at least one, those that
    `num_threads` names, and the rest by weight. `num_cores`: None = those that this process may use. If there are not
    enough for all, those that are loaded `on_demand` are planned as if one of them served at a time: whoever loads them
    sees to it that no more do than fit. Raises ConfigurationError if there are more ranks than cores."""
    cores = len(os.sched_getaffinity(0)) if num_cores is None else num_cores
    here = {name: config for name, config in engines.items() if _is_here(config)}
    threads = {name: max(config.num_threads, 1) for name, config in here.items()}
    taken = sum(threads[name] * config.num_ranks for name, config in here.items())
    pooled = [name for name in here if name in on_demand]
    if taken > cores and len(pooled) > 1:
        largest = max(pooled, key=lambda name: threads[name] * here[name].num_ranks)
        planned = share_cores(
            {name: config for name, config in here.items() if name == largest or name not in on_demand}, weights, cores
        )
        part = planned[largest] * here[largest].num_ranks
        of_pool = {name: here[name].num_threads or part // here[name].num_ranks for name in pooled}
        return {name: planned.get(name) or of_pool[name] for name in here}
    if taken > cores:
        each = ", ".join(f"{name} {threads[name] * config.num_ranks}" for name, config in here.items())
        raise ConfigurationError(
            f"{len(here)} engines need {taken} cores ({each}) and there are {cores}: serve fewer models, or lower "
            "num_threads, tensor_parallel_size or data_parallel_size"
        )
    while True:
        # One more for each rank of the engine that has the least for its weight, as long as there is one that can.
        open_ = [name for name, config in here.items() if not config.num_threads and config.num_ranks <= cores - taken]
        if not open_:
            return threads
        least = min(open_, key=lambda name: (threads[name] + 1) * here[name].num_ranks / weights[name])
        threads[least] += 1
        taken += here[least].num_ranks


def share_memory(weights: Mapping[str, float]) -> dict[str, float]:
    """The part of each engine, rounded down."""
    total = sum(weights.values())
    return {name: max(int(weight / total * 10_000) / 10_000, 0.0001) for name, weight in weights.items()}


def check_memory(
    engines: Mapping[str, EngineConfig], on_demand: frozenset[str] = frozenset(), available: int | None = None
) -> None:
    """Raise ConfigurationError if the weights on the host's memory do not fit: of all engines that are loaded at the
    start, or beside these of any one that is loaded `on_demand`. `available`: bytes; None = of this machine."""
    free = available_memory() if available is None else available
    sizes = {name: host_bytes(config) for name, config in engines.items() if _is_here(config)}
    lasting = {name: size for name, size in sizes.items() if name not in on_demand}
    largest = max((name for name in sizes if name in on_demand), key=sizes.__getitem__, default=None)
    needed = {**lasting, **({} if largest is None else {largest: sizes[largest]})}
    if sum(needed.values()) > free:
        each = ", ".join(f"{name} {_gib(size)}" for name, size in needed.items())
        raise ConfigurationError(
            f"the weights of the models take {_gib(sum(needed.values()))} ({each}) and {_gib(free)} of memory are "
            "available: serve fewer of them, or smaller ones"
        )


def _is_here(config: EngineConfig) -> bool:
    """Whether the server starts the ranks, on this machine alone."""
    return config.executor not in STARTED_OUTSIDE and config.launcher != "ray" and not config.mpi_hostfile


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:,.2f} GiB"
