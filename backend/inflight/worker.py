"""`python -m inflight.worker`: entry point of one rank's process.

See inflight.executor.rank.worker for ranks that an executor starts, inflight.executor.rank.outer_worker for others.
"""

import os
import sys

from inflight.executor.wire.launch import LAUNCH

if __name__ == "__main__":
    if LAUNCH in os.environ:
        from inflight.executor.rank.worker import main

        sys.exit(main())
    from inflight.executor.rank.outer_worker import main as outer_main

    sys.exit(outer_main(sys.argv[1:]))
