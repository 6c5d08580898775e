"""Files of a model that come side by side, and how far they are: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait

from inflight.hub.download import Cancelled, Download
from inflight.log_progress import SECONDS_BETWEEN_LINES

NUM_CONNECTIONS = 4


def run_all(downloads: Sequence[Download], note: Callable[[int], None]) -> None:
    """Fetch these. The first that fails ends the others, and what it raised is raised. `note`: see Download; called by
    one thread at a time."""
    lock, cancelled = threading.Lock(), threading.Event()

    def note_alone(number: int) -> None:
        with lock:
            note(number)

    with ThreadPoolExecutor(NUM_CONNECTIONS, thread_name_prefix="inflight-fetch") as threads:
        running = [threads.submit(each.run, note_alone, cancelled) for each in downloads]
        try:
            done, _ = wait(running, return_when=FIRST_EXCEPTION)
        except BaseException:  # a signal
            cancelled.set()
            raise
        if any(each.exception() for each in done):
            cancelled.set()
    errors = [error for each in running if (error := each.exception()) is not None]
    for error in sorted(errors, key=lambda error: isinstance(error, Cancelled)):
        raise error


@contextlib.contextmanager
def progress(what: str, total: int, present: int, tell: Callable[[str], None]) -> Iterator[Callable[[int], None]]:
    """Show how many of `total` bytes are there; the block says how many more. `present`: that are there already."""
    if not sys.stderr.isatty():
        yield _Lines(what, total, present, tell).note
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as bar:
        task = bar.add_task(what, total=total, completed=present)
        yield lambda number: bar.advance(task, number)


class _Lines:
    def __init__(self, what: str, total: int, present: int, tell: Callable[[str], None]) -> None:
        self._what = what
        self._total = total
        self._there = present
        self._fetched = 0
        self._tell = tell
        self._began = self._told = time.monotonic()

    def note(self, number: int) -> None:
        self._there += number
        self._fetched += number
        now = time.monotonic()
        if now - self._told >= SECONDS_BETWEEN_LINES:
            self._told = now
            rate = self._fetched / 1e6 / (now - self._began)
            self._tell(f"{self._what}: {self._there / 1e9:.2f} of {self._total / 1e9:.2f} GB, {rate:.0f} MB/s")
