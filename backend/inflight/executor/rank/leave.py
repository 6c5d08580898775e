"""The end of a rank's program."""

from __future__ import annotations

import atexit
import os
import sys
from typing import NoReturn


def leave(code: int) -> NoReturn:
    """End this process, whose rank has ended everything of its own. The interpreter would take half a second of a core
    to free its modules, torch above all, while the ranks that come next load."""
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
