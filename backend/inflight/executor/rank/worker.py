"""The program of one rank: join the other ranks, load the model, serve until told to end.

    python -m inflight.worker        started by an executor, which passes everything in the variable INFLIGHT_LAUNCH

It ends when the front that launched it ends, in whatever way: a rank without that front would serve nobody and occupy a
device. An exception that leaves the worker loop ends the rank too, because the states of the ranks may differ after it;
the front relaunches all of them. (For ranks that somebody else starts, see `outer_worker.py`.)
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from inflight.batch_manager_stats import BatchManagerStats
from inflight.config import EngineConfig
from inflight.distributed.joining import join
from inflight.distributed.rank_group import RankGroup, SingleRank
from inflight.errors import ConfigurationError, InflightError, InsufficientMemory, UnusableWeights
from inflight.executor.rank.assembly import (
    LoadedRunner,
    LoadRunner,
    load_model_runner,
    make_manager,
    make_token_budget,
    make_transfer,
)
from inflight.executor.rank.callbacks import RankCallbacks
from inflight.executor.rank.leader.leader_socket import LeaderSocket
from inflight.executor.wire.launch import Launch, launched_rank
from inflight.parent_watch import die_with_parent

logger = logging.getLogger("inflight.worker")

TICKS_PER_TIMEOUT = 4
MAX_TICK_SECONDS = 2.0
"""Ticks, in which all ranks must answer, per heartbeat timeout; two ticks are at most MAX_TICK_SECONDS apart. A tick
takes each rank one to three milliseconds, which is most of the work of an idle engine."""


def main(load_runner: LoadRunner | None = None) -> int:
    """Serve as one rank. Returns the exit code. `load_runner`: None = what runs the model."""
    launch = Launch.from_environment()
    load_runner = load_runner or partial(load_model_runner, launch=launch)
    die_with_parent(launch.front_pid if launch.on_fronts_host else None)
    start_logging(launch.parameters.get("log_level", "INFO"))
    group: RankGroup = SingleRank()
    try:
        config = launch.config
        group = join(
            launch.joining,
            rank=launched_rank(),
            size=config.num_replica_ranks,
            folder=Path(launch.directory) if launch.on_fronts_host else None,
        )
        start_logging(config.log_level, group.rank)
        launch.note_rank(group.rank)
        serve(config, launch, group, load_runner(config, group))
        group.close()
    except InflightError as error:
        is_lasting = isinstance(error, ConfigurationError) and not isinstance(error, InsufficientMemory)
        is_of_weights = isinstance(error, UnusableWeights)
        _fail(launch, group, str(error), is_misconfigured=is_lasting, is_of_weights=is_of_weights)
    except ConnectionError as error:  # see RankGroup
        _fail(launch, group, f"this rank ends because another one did: {error}")
    except BaseException as error:
        logger.exception("this rank ends because of an unexpected error")
        _fail(launch, group, in_one_line(error))
    return 0


def serve(
    config: EngineConfig,
    launch: Launch,
    group: RankGroup,
    runner: LoadedRunner,
    on_ready: Callable[[LeaderSocket], None] | None = None,
) -> None:
    """Serve one launch to its end. Collective. `on_ready` is called on the leader once fronts can connect."""
    config = config.for_device(runner.description.device)
    leader = None
    transfer, contexts = make_transfer(config, runner, Path(launch.directory), group)
    if group.rank == 0:
        leader = LeaderSocket(
            launch.socket_path,
            limits=runner.limits,
            description=runner.description,
            max_in_flight=config.max_in_flight,
            grammars=runner.grammars,
            adapters=runner.adapter_library,
            tick_seconds=min(MAX_TICK_SECONDS, config.worker_heartbeat_timeout_ms / 1000 / TICKS_PER_TIMEOUT),
            stats_seconds=config.stats_check_period_ms / 2000,
            preemption_rows=config.preemption_rows,
            contexts=contexts,
        )
    token_budget = make_token_budget(config) if leader is not None else None
    rank = RankCallbacks(group, leader, runner.adapters, transfer, token_budget)
    manager = make_manager(
        config, runner, rank.callbacks, raise_on_step_failure=group.size > 1, notes_events=leader is not None
    )
    rank.attach(manager)
    if leader is not None:
        # The manager reports nothing before the first request, but fronts show the KV cache's size from the start.
        leader.report_stats(BatchManagerStats.of(manager.statistics()).to_json())
        if on_ready is not None:
            on_ready(leader)
    logger.info("ready")
    try:
        if config.spare_ranks:
            _wait_for_front(group, leader)
        if config.spare_ranks or launch.is_relaunch:
            runner.occupy_memory()
        manager.run()
    except BaseException as error:
        if leader is not None:
            leader.fail(in_one_line(error))
            leader.close()
        raise
    if leader is not None:
        leader.close()
    if transfer is not None:
        transfer.close()
    if contexts is not None:
        contexts.close()
    runner.close()


def _wait_for_front(group: RankGroup, leader: LeaderSocket | None) -> None:
    """Loaded ranks sleep until a front speaks to them. For spare ranks that is when they take over."""
    if leader is not None:
        leader.wait_for_front()
        group.broadcast(b"")
    else:
        group.broadcast(None)


def _fail(
    launch: Launch, group: RankGroup, reason: str, *, is_misconfigured: bool = False, is_of_weights: bool = False
) -> None:
    launch.note_failure(reason, is_misconfigured=is_misconfigured, is_of_weights=is_of_weights)
    end_ranks(group, reason)


def in_one_line(error: BaseException) -> str:
    """Its type and the first line of its message. Those of torch have more, for who debugs it; the log has them all."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def end_ranks(group: RankGroup, reason: str) -> None:
    """Log the reason and exit at once, without waiting for other threads or ranks, which may be stuck."""
    logger.error("%s", reason)
    logging.shutdown()
    group.abort()
    os._exit(1)


def start_logging(level: str, rank: int | None = None) -> None:
    """Log to standard error in the format of tritonserver's log. No log line contains text of a prompt."""
    handler = logging.StreamHandler(sys.stderr)
    name = "rank" if rank is None else f"rank {rank}"
    template = f"%(levelname).1s%(asctime)s.%(msecs)03d {name} %(name)s] %(message)s"
    handler.setFormatter(logging.Formatter(template, "%m%d %H:%M:%S"))
    root = logging.getLogger("inflight")
    root.handlers = [handler]
    root.setLevel(level)
    root.propagate = False


if __name__ == "__main__":
    sys.exit(main())
