"""The front of an OpenAI server, and what its process needs first. Imports nothing of the server itself: while that is
imported, ranks of its own load.
"""

from __future__ import annotations

import logging
import os
import resource
from dataclasses import replace

from inflight.abandonment import end_when_abandoned
from inflight.config import EngineConfig
from inflight.errors import ConfigurationError
from inflight.executor.executor import Executor, attach_executor
from inflight.executor.front.remote import RemoteFront
from inflight.log_output import start_logging
from inflight.openai_options import OpenAIOptions

OTHER_FILES = 256
"""That the process opens besides its connections."""


def open_front(options: OpenAIOptions) -> RemoteFront:
    """A front of the engine, for a process that serves it. Ranks of this server's own begin to load; `start` waits for
    them, or for an engine that another program has launched. Raises ConfigurationError."""
    start_logging()
    end_when_abandoned()
    # Texts are tokenised one at a time, and the library's own threads would only take cores from the ranks.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    allow_connections(options.max_connections)
    config = EngineConfig.from_parameters(options.parameters)
    # Beside the engine's own front, whose log tells of its ranks, this one need not.
    logging.getLogger("inflight").setLevel(config.log_level if options.launches_ranks else logging.WARNING)
    quiet = with_statistics(config, 0)
    if not options.launches_ranks:
        return attach_executor(quiet, options.engine)
    return Executor(config=quiet, name=options.engine, waits=False)


def with_statistics(config: EngineConfig, num_iterations: int) -> EngineConfig:
    """For a front that keeps those of so many iterations, and of the requests in them."""
    return replace(
        config,
        iter_stats_max_iterations=num_iterations,
        request_stats_max_iterations=num_iterations,
        event_buffer_max_size=0,
    )


def allow_connections(count: int) -> None:
    """Each of them takes one of this process's files. Raises ConfigurationError if it may not have so many."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = count + OTHER_FILES
    if hard != resource.RLIM_INFINITY and needed > hard:
        raise ConfigurationError(
            f"max_connections {count} of the OpenAI server needs {needed} files, and this process may open {hard}: "
            "raise its limit (ulimit -n) or lower max_connections"
        )
    if soft != resource.RLIM_INFINITY and needed > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
