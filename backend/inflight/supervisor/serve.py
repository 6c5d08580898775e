"""`inflight serve`: from options to a running, watched tritonserver, and back to nothing.

This is the supervisor's only door for the command line. Every expected failure becomes one sentence and an exit code.
"""

from __future__ import annotations

import sys

from inflight.errors import ConfigurationError
from inflight.supervisor.options import ServeOptions
from inflight.supervisor.plan import make_plan
from inflight.supervisor.supervisor import Supervisor

CLEAN, WRONG = 0, 2


def serve(options: ServeOptions) -> int:
    """Serve until SIGTERM or SIGINT. Returns the exit code: 0 after a clean stop, 2 with one sentence on standard error
    if something is missing or wrong."""
    try:
        with make_plan(options) as plan:
            tell("starting tritonserver")
            Supervisor(plan, tell).run()
    except ConfigurationError as error:
        tell(str(error))
        return WRONG
    tell("stopped")
    return CLEAN


def tell(line: str) -> None:
    """Say something to whoever started us."""
    print(f"inflight: {line}", file=sys.stderr, flush=True)
