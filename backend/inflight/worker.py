"""`python -m inflight.worker`: entry point of one rank's process (see inflight.executor.rank.worker)."""

import sys

from inflight.executor.rank.worker import main

if __name__ == "__main__":
    sys.exit(main())
