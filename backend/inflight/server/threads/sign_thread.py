"""The heartbeat of a stub for its supervisor: a thread that updates the modification time of a file once a second.

It uses neither tritonserver nor the engine, so the heartbeat stops only if the whole process hangs, some call never
releases the GIL, or a thread without which no request is answered has ended by a fault. tritonserver itself goes on
calling a model ready whose stub has stopped.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path

from inflight.run_directory import SIGNS, run_directory

logger = logging.getLogger(__name__)

PERIOD_SECONDS = 1.0


class SignThread:
    """Keeps the heartbeat file from `start`, at the end of initialize(), until `stop`. Does nothing without a
    supervisor."""

    def __init__(self, instance: str, is_well: Callable[[], bool] = lambda: True) -> None:
        """`instance`: name of the model instance, e.g. "llm_0_0". `is_well`: whether requests can be answered."""
        self._is_well = is_well
        directory = run_directory()
        self._file: Path | None = None
        if directory is not None:
            # Two stubs have the same instance name while a model is reloaded in place.
            self._file = directory / SIGNS / f"{instance}.{os.getpid()}"
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="inflight-sign", daemon=True)

    def start(self) -> None:
        if self._file is not None:
            self._thread.start()

    def stop(self) -> None:
        """Remove the file, so that the supervisor expects no more heartbeats, and join the thread."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        assert self._file is not None
        try:
            self._file.parent.mkdir(exist_ok=True)
            self._file.touch()
            while not self._stopping.wait(PERIOD_SECONDS):
                if self._is_well():
                    os.utime(self._file)
            self._file.unlink(missing_ok=True)
        except OSError as error:
            logger.warning("the supervisor cannot be shown that this process is alive: %s", error)
