"""`python -m inflight.worker`: the program of one rank (see inflight.executor.rank.worker)."""

import sys

from inflight.executor.rank.worker import main

if __name__ == "__main__":
    sys.exit(main())
