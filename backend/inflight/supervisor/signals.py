"""The signals that end a server: the first asks for a stop in good order, the second for one at once."""

from __future__ import annotations

import contextlib
import queue
import signal
from collections.abc import Iterator
from types import FrameType


class Stopped(Exception):
    """A second signal asked for an immediate end."""


class Signals:
    """SIGTERM, SIGINT and SIGHUP of this process, which must be taken in its main thread."""

    def __init__(self) -> None:
        self._arrived: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._num_seen = 0

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Take them, until the context ends."""

        def note(number: int, frame: FrameType | None) -> None:
            self._arrived.put(number)

        before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def wait(self, timeout: float) -> bool:
        """Sleep, or wake at a signal. True once one has come; the second raises Stopped."""
        with contextlib.suppress(queue.Empty):
            self._arrived.get(timeout=timeout) if timeout else self._arrived.get_nowait()
            self._num_seen += 1
        if self._num_seen > 1:
            raise Stopped
        return self._num_seen == 1
