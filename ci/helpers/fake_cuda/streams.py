"""The order of what a device is asked for: nothing takes effect before somebody waits for it."""

from __future__ import annotations

from collections.abc import Callable


class Stream:
    """What the host has asked for in order, done when somebody waits for it and not before."""

    cuda_stream = 1
    """Stands for CUDA's handle."""

    def __init__(self) -> None:
        self._queue: list[Callable[[], None]] = []
        self.num_done = 0

    def enqueue(self, effect: Callable[[], None]) -> None:
        self._queue.append(effect)

    def run_until(self, end: int) -> None:
        while self.num_done < end:
            effect = self._queue[self.num_done]
            self.num_done += 1
            effect()

    @property
    def end(self) -> int:
        return len(self._queue)


class Mark:
    """A place in a stream: behind all that it was asked for until now. Without a stream it is reached already."""

    def __init__(self, stream: Stream | None = None) -> None:
        self._stream = stream
        self._end = 0 if stream is None else stream.end

    def reach(self) -> None:
        """Let everything before it take effect."""
        if self._stream is not None:
            self._stream.run_until(self._end)

    @property
    def is_reached(self) -> bool:
        return self._stream is None or self._stream.num_done >= self._end
