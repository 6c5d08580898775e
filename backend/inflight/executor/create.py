"""Chooses an executor by configuration."""

from __future__ import annotations

from collections.abc import Callable

from inflight.config import EngineConfig
from inflight.executor.executor import Executor


def create_executor(
    config: EngineConfig,
    *,
    auto_relaunch: bool = True,
    on_engine_death: Callable[[str], None] | None = None,
) -> Executor:
    """The executor that `config.executor` names; auto: uniproc for one rank, mpi for more. Not started yet.

    See ProcessExecutor for the options.
    """
    if config.executor == "mpi" or (config.executor == "auto" and config.tensor_parallel_size > 1):
        from inflight.executor.mpi_executor import MpiExecutor

        return MpiExecutor(config, auto_relaunch=auto_relaunch, on_engine_death=on_engine_death)
    from inflight.executor.uniproc_executor import UniProcExecutor

    return UniProcExecutor(config, auto_relaunch=auto_relaunch, on_engine_death=on_engine_death)
