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
from inflight.executor.executor import attach_executor, make_launchers, resolve_config
from inflight.executor.front.remote import RemoteFront
from inflight.log_output import start_logging
from inflight.openai_options import OpenAIOptions

OTHER_FILES = 256
"""That the process opens besides its connections."""


def open_front(options: OpenAIOptions) -> RemoteFront:
    """A front of the engine, or of that of the first model, for a process that serves it. Ranks of this server's own
    begin to load, unless that is done on demand; `start` waits for them, or for an engine that another program has
    launched. Raises ConfigurationError."""
    start_logging()
    end_when_abandoned()
    # Texts are tokenised one at a time, and the library's own threads would only take cores from the ranks.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    allow_connections(options.max_connections)
    first = options.of_each()[0]
    config = EngineConfig.from_parameters(first.parameters)
    # Beside the engine's own front, whose log tells of its ranks, this one need not.
    logging.getLogger("inflight").setLevel(config.log_level if options.launches_ranks else logging.WARNING)
    front = make_front(first)
    if not (options.models and options.models[0].is_on_demand):
        front.begin()
    return front


def make_front(options: OpenAIOptions) -> RemoteFront:
    """One that is not started. `options`: of a model. Raises ConfigurationError."""
    config = with_statistics(EngineConfig.from_parameters(options.parameters), 0)
    if not options.launches_ranks:
        return attach_executor(config, options.engine)
    config = resolve_config(None, config)
    return RemoteFront(config, *make_launchers(config, options.engine), name=options.engine)


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
