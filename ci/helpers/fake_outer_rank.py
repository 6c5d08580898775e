"""A rank in a job that somebody else started, whose runner is a fake: `fake_rank.py` for such ranks."""

from __future__ import annotations

import sys

from fake_rank import load_fake_runner

from inflight.executor.rank.outer_worker import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], load_fake_runner))
