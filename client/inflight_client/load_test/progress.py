"""A progress bar over a whole load test, for the terminal.

perf_analyzer prints nothing before a level is over; within a level the bar follows tritonserver's own count of the
model's requests. A request is counted when it is admitted, so the bar is ahead by the requests in flight. Loads of this
process's own tell each end of a request.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from inflight_client.load_test.load import Progress
from inflight_client.load_test.results import LevelResult
from inflight_client.load_test.sweep import Level

if TYPE_CHECKING:
    from rich.console import Console

POLL_SECONDS = 0.25


class ProgressBar(Progress):
    """A context manager that draws on `console`: with ProgressBar(...) as bar: run_load_test(..., progress=bar)."""

    def __init__(self, levels: Sequence[Level], *, console: Console, count: RequestCount | None = None) -> None:
        """`count`: of tritonserver; None = the load tells each end of a request."""
        from rich.progress import BarColumn, MofNCompleteColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Bar

        self._console = console
        self._count = count
        self._num_levels = len(levels)
        self._measured = 0
        self._number = 0
        self._current: Level | None = None
        self._base: int | None = None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="load-test-progress", daemon=True)
        self._bar = Bar(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("requests"),
            TimeElapsedColumn(),
            console=console,
        )
        self._task = self._bar.add_task("warming up", total=sum(level.num_requests for level in levels))

    def level_started(self, level: Level) -> None:
        self._base = self._count.read() if self._count is not None else None
        self._number += 1
        self._bar.update(self._task, description=f"[bold]{level.name}[/] ({self._number} of {self._num_levels})")
        self._current = level

    def request_ended(self) -> None:
        self._bar.advance(self._task)

    def level_finished(self, level: Level, result: LevelResult) -> None:
        self._current = None
        self._measured += level.num_requests
        self._bar.update(self._task, completed=self._measured)

    def __enter__(self) -> ProgressBar:
        self._bar.start()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopped.set()
        self._thread.join()
        self._bar.stop()
        if self._count is not None:
            self._count.close()

    def _follow(self) -> None:
        while not self._stopped.wait(POLL_SECONDS):
            level, base = self._current, self._base
            if self._count is None or level is None or base is None:
                continue
            count = self._count.read()
            if count is not None and level is self._current:
                done = min(max(count - base, 0), level.num_requests)
                self._bar.update(self._task, completed=self._measured + done)


class RequestCount:
    """Reads how many requests the server has admitted for a model since it started; None if it does not answer."""

    def __init__(self, url: str, model: str) -> None:
        from tritonclient.grpc import InferenceServerClient

        self._client: Any = InferenceServerClient(url)
        self._model = model

    def read(self) -> int | None:
        from tritonclient.utils import InferenceServerException

        try:
            statistics = self._client.get_inference_statistics(self._model, client_timeout=1.0)
        except InferenceServerException:
            return None
        return sum(int(one.inference_stats.success.count) for one in statistics.model_stats)

    def close(self) -> None:
        self._client.close()
