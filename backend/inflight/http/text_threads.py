"""The threads on which requests become tokens, so that the event loop never waits for a tokenizer.

A megabyte of text takes a good part of a second. Short and long requests therefore have a thread each.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from inflight.vision.vision import Unseen

MAX_SHORT_BYTES = 16_384
"""Longest body of a short request, which is tokenised in a few milliseconds."""

T = TypeVar("T")


class TextThreads:
    def __init__(self) -> None:
        self._short = ThreadPoolExecutor(1, "inflight-text-short")
        self._long = ThreadPoolExecutor(1, "inflight-text-long")

    async def run(self, num_bytes: int, work: Callable[[], T]) -> T:
        """What `work` returns, on the thread for bodies of this length. If it raises Unseen it is begun again once the
        pictures have been seen, which holds up no thread."""
        lane, loop = self._short if num_bytes <= MAX_SHORT_BYTES else self._long, asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(lane, work)
        except Unseen as unseen:
            seeing = unseen.see()
        seen = await asyncio.wrap_future(seeing)
        try:
            return await loop.run_in_executor(lane, work)
        finally:
            del seen  # until now the work finds them

    def stop(self) -> None:
        """Wait for what they are doing."""
        for lane in (self._short, self._long):
            lane.shutdown()
