"""The log of a process of ours: on standard error, in the format of tritonserver's own log lines."""

from __future__ import annotations

import logging
import sys


def start_logging() -> None:
    """Log to standard error, unless this process logs already."""
    root = logging.getLogger("inflight")
    if root.handlers:
        return
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Formatter())
    root.addHandler(handler)
    root.propagate = False


class _Formatter(logging.Formatter):
    """`W1121 08:26:40.123 name] message`, as tritonserver writes."""

    def __init__(self) -> None:
        super().__init__("%(letter)s%(asctime)s.%(msecs)03d %(name)s] %(message)s", "%m%d %H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        record.letter = record.levelname[0]
        return super().format(record)
