"""Progress bars for programs that use the engine as a library, on standard error.

rich is imported only when a bar is shown.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator


def is_shown(asked: bool | None) -> bool:
    """Whether to show a bar: as `asked`, or, if that is None, where standard error is a terminal."""
    return sys.stderr.isatty() if asked is None else asked


@contextlib.contextmanager
def loading(what: str, *, shown: bool | None) -> Iterator[None]:
    """A bar without an end, with the time that has passed, for as long as the block runs."""
    if not is_shown(shown):
        yield
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(f"Loading {what}", total=None)
        yield
        progress.update(task, total=1, completed=1)


@contextlib.contextmanager
def counting(what: str, total: int, *, shown: bool | None) -> Iterator[Callable[[], None]]:
    """A bar of `total` parts with rate and remaining time; the block calls what it is given once for each part."""
    if not is_shown(shown):
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=Console(stderr=True)) as progress:
        task = progress.add_task(what, total=total)
        yield lambda: progress.advance(task)
