"""The log of a process of ours: on standard error, in the format of tritonserver's own log lines."""

from __future__ import annotations

import logging
import sys

from inflight.log_rate import LogRate

MAX_CHARS = 16_384
"""Of one record, traceback included."""


def start_logging() -> None:
    """Log to standard error, unless this process logs already."""
    logger = logging.getLogger("inflight")
    if logger.handlers:
        return
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Formatter())
    handler.addFilter(LogRate())
    logger.addHandler(handler)
    logger.propagate = False


class _Formatter(logging.Formatter):
    """`W1121 08:26:40.123 name] message`, as tritonserver writes. Further lines of a record are indented: whatever text
    is in it, nothing looks like another record."""

    def __init__(self) -> None:
        super().__init__("%(letter)s%(asctime)s.%(msecs)03d %(name)s] %(message)s", "%m%d %H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        record.letter = record.levelname[0]
        text = super().format(record)
        if len(text) > MAX_CHARS:
            text = f"{text[:MAX_CHARS]}..."
        first, *others = text.splitlines() or [""]
        return "\n".join([first, *(f"  {line}" for line in others)])
