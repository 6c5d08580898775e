"""The function behind `inflight serve` and `inflight openai`: supervises a server until a signal, and leaves nothing
behind.

The command line calls nothing else of the supervisor. Every expected failure becomes one sentence and an exit code.
"""

from __future__ import annotations

import contextlib
import signal
import sys

from inflight.errors import ConfigurationError
from inflight.supervisor.options import ServeOptions
from inflight.supervisor.plan import make_plan
from inflight.supervisor.supervisor import Supervisor

CLEAN, WRONG, INTERRUPTED = 0, 2, 130


def serve(options: ServeOptions) -> int:
    """Serve until SIGTERM, SIGINT or SIGHUP. Returns the exit code: 0 after a stop, 2 with one sentence on standard
    error if something is missing or wrong, 130 if a signal comes before anything was started."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)  # until the supervisor has its own; SIGINT has it already
    try:
        with make_plan(options, tell) as plan:
            tell("adopting the server that runs" if plan.is_adopted else f"starting {plan.name}")
            Supervisor(plan, tell).run()
    except ConfigurationError as error:
        tell(str(error))
        return WRONG
    except KeyboardInterrupt:
        tell("stopped")
        return INTERRUPTED
    tell("stopped")
    return CLEAN


def tell(line: str) -> None:
    """Write a line to standard error for the user, if that is still there."""
    with contextlib.suppress(OSError):
        print(f"inflight: {line}", file=sys.stderr, flush=True)
