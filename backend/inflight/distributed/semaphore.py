"""A counting semaphore in memory that processes share: the C library's, so it needs no compiler of ours.

It counts what one process has done for another. What a process wrote before a post, another one reads after the wait
that took it, on every CPU: POSIX orders memory there. Whoever waits long sleeps in the kernel (in a futex); a post
calls the kernel only if somebody sleeps. Knows nothing of messages.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import time

NUM_BYTES = 64
"""Of one semaphore: a cache line of its own. The C library's sem_t has 32 bytes at most."""

SPIN_SECONDS = 50e-6
"""How long a process looks before it sleeps, giving its core away between two looks: about as long as a sleeper takes
to wake up, so looking costs at most as much again as sleeping at once."""

_sleeping = ctypes.CDLL(None)  # releases the GIL
_at_once = ctypes.PyDLL(None)


class _TimeSpec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class SharedSemaphore:
    """At an offset of memory that the processes map each for itself, which must outlive this."""

    def __init__(self, memory: mmap.mmap, offset: int) -> None:
        """`offset`: a multiple of NUM_BYTES."""
        assert offset % NUM_BYTES == 0
        self._semaphore = (ctypes.c_char * NUM_BYTES).from_buffer(memory, offset)

    def initialise(self, value: int) -> None:
        """To be called by one process, before any uses it."""
        if _at_once.sem_init(self._semaphore, 1, value) != 0:
            raise OSError(f"the C library cannot make a semaphore of value {value}")

    def post(self) -> None:
        """Count one more; wakes a process that waits for it."""
        _at_once.sem_post(self._semaphore)

    def wait(self, seconds: float) -> bool:
        """Count one less as soon as there is one. False if there was none for so long."""
        if self._take():
            return True
        now = time.monotonic()
        end, looks_until = now + seconds, now + min(SPIN_SECONDS, seconds)
        while time.monotonic() < looks_until:
            os.sched_yield()
            if self._take():
                return True
        whole = int(end)
        deadline = ctypes.byref(_TimeSpec(whole, int((end - whole) * 1e9)))
        while _sleeping.sem_clockwait(self._semaphore, time.CLOCK_MONOTONIC, deadline) != 0:
            if time.monotonic() >= end:  # otherwise a signal has interrupted it
                return self._take()
        return True

    def _take(self) -> bool:
        return int(_at_once.sem_trywait(self._semaphore)) == 0
