"""`python -m inflight.worker`: entry point of one rank's process.

See inflight.executor.rank.worker for ranks that an executor starts, inflight.executor.rank.outer_worker for others.
"""

import os
import sys

from inflight.executor.wire.launch import LAUNCH


def run() -> int:
    """The exit code."""
    if LAUNCH in os.environ:
        from inflight.executor.rank.worker import main

        return main()
    from inflight.executor.rank.outer_worker import main as outer_main

    return outer_main(sys.argv[1:])


if __name__ == "__main__":
    from inflight.executor.rank.leave import leave

    leave(run())
