"""From options to an exit code: every expected failure becomes one sentence."""

from __future__ import annotations

import sys

from inflight.errors import ConfigurationError
from inflight.supervisor.plan import make_plan
from inflight.supervisor.serve import ServeOptions
from inflight.supervisor.supervisor import ServerLost, Supervisor

CLEAN, LOST, WRONG = 0, 1, 2


def run(options: ServeOptions) -> int:
    """See `serve`."""
    try:
        with make_plan(options) as plan:
            tell("starting tritonserver")
            Supervisor(plan, tell).run()
    except ConfigurationError as error:
        tell(str(error))
        return WRONG
    except ServerLost as error:
        tell(str(error))
        return LOST
    tell("stopped")
    return CLEAN


def tell(line: str) -> None:
    """Say something to whoever started us."""
    print(f"inflight: {line}", file=sys.stderr, flush=True)
