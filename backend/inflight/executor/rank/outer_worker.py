"""The program of a rank that somebody else starts: `mpiexec`, `torchrun`, `srun` or a service manager.

    mpiexec -n 2 python -m inflight.worker --config model_repository/llm     every rank enters by itself
    python -m inflight.worker                                                ranks but the first need no more

The ranks join as their environment says (`distributed/outer_job.py`). Rank 0 broadcasts each launch, which holds the
whole configuration, so that what other ranks are told on their command lines does not count; `launch_source.py` says
where it has launches from. When the launcher ends, so does each rank; a rank that fails ends all others. To start them
again is the launcher's part.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from inflight.distributed.joining import OuterJob, join
from inflight.distributed.outer_job import find_outer_job
from inflight.distributed.rank_group import RankGroup, SingleRank
from inflight.errors import ConfigurationError, InflightError
from inflight.executor.rank.assembly import LoadRunner, load_model_runner
from inflight.executor.rank.launch_source import LaunchSource, OwnLaunch, PostedLaunches
from inflight.executor.rank.worker import end_ranks, in_one_line, serve, start_logging
from inflight.executor.wire.launch import Launch
from inflight.parent_watch import die_with_parent

logger = logging.getLogger("inflight.worker")


def main(arguments: Sequence[str], load_runner: LoadRunner = load_model_runner) -> int:
    """Serve as one rank. Returns the exit code."""
    options = _parser().parse_args(arguments)
    start_logging("INFO")
    group: RankGroup = SingleRank()
    launches: LaunchSource | None = None
    try:
        launches = _launch_source(options)
        group = join(OuterJob(), rank=None, size=0, folder=launches.job.path if launches is not None else None)
        if launches is None:
            # Launchers send signals to all processes of a job; rank 0 ends the others in order.
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, signal.SIG_IGN)
        while (launch := _next_launch(group, launches)) is not None:
            _serve_launch(launch, group, launches, load_runner)
        if launches is not None:
            launches.close()
        group.close()
    except InflightError as error:
        _fail(group, launches, str(error))
    except BaseException as error:
        logger.exception("this rank ends because of an unexpected error")
        _fail(group, launches, in_one_line(error))
    return 0


def _launch_source(options: argparse.Namespace) -> LaunchSource | None:
    """On rank 0 alone. Raises ConfigurationError."""
    if options.mailbox is not None:
        return PostedLaunches(options.job, options.mailbox)
    die_with_parent(None)
    job = find_outer_job(os.environ)
    if job is not None and job.rank > 0:
        return None
    if options.config is None:
        raise ConfigurationError(
            "rank 0 needs --config, the config.pbtxt or folder of a model; other ranks take theirs from it"
        )
    return OwnLaunch(options.config, dict(options.set), options.name)


def _next_launch(group: RankGroup, launches: LaunchSource | None) -> Launch | None:
    """The same on every rank; None once there will be no more."""
    if launches is None:
        told = group.broadcast(None)
        return Launch.from_text(told.decode()) if told else None
    launch = launches.next_launch()
    group.broadcast(launch.to_environment().encode() if launch is not None else b"")
    return launch


def _serve_launch(launch: Launch, group: RankGroup, launches: LaunchSource | None, load_runner: LoadRunner) -> None:
    try:
        config = launch.config
        start_logging(config.log_level, group.rank)
        if group.size != config.num_replica_ranks:
            raise ConfigurationError(
                f"the job has {group.size} ranks, and the engine's configuration asks for {config.num_replica_ranks}: "
                "start as many, or set tensor_parallel_size and pipeline_parallel_size"
            )
        launch.note_rank(group.rank)
        serve(config, launch, group, load_runner(config, group), launches.has_begun if launches is not None else None)
        group.barrier()  # nobody is in the launch any more
    except BaseException as error:
        launch.note_failure(str(error) if isinstance(error, InflightError) else in_one_line(error))
        raise
    _free_memory()


def _free_memory() -> None:
    """For the next launch, which measures what is free."""
    gc.collect()
    if "torch" in sys.modules:
        sys.modules["torch"].cuda.empty_cache()


def _fail(group: RankGroup, launches: LaunchSource | None, reason: str) -> None:
    if launches is not None:
        launches.close()
    end_ranks(group, reason)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m inflight.worker", description="One rank of an engine, in a job that somebody else started."
    )
    parser.add_argument("--config", type=Path, metavar="PATH", help="a model's folder or its config.pbtxt, for rank 0")
    parser.add_argument("--name", default="", help="of the engine, by which fronts find it; the model's unless given")
    parser.add_argument(
        "--set", type=_assignment, action="append", default=[], metavar="KEY=VALUE", help="a parameter in its place"
    )
    parser.add_argument("--mailbox", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--job", type=int, help=argparse.SUPPRESS)
    return parser


def _assignment(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not (key and equals):
        raise argparse.ArgumentTypeError(f"KEY=VALUE is needed, got {text!r}")
    return key, value
