"""The thread by which a stub shows its supervisor that it is alive: it renews the time of a file once a second.

It touches neither tritonserver nor the engine, so it falls silent only where the whole process stands still or some
call never gives the interpreter back. tritonserver itself goes on calling a model ready whose stub has stopped.
"""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path

from inflight.run_directory import SIGNS, run_directory

logger = logging.getLogger(__name__)

PERIOD_SECONDS = 1.0


class SignThread:
    """From `start`, at the end of initialize(), until `stop` the file is there; without a supervisor there is none."""

    def __init__(self, instance: str) -> None:
        """`instance`: name of the model instance, e.g. "llm_0_0"."""
        directory = run_directory()
        self._file: Path | None = None
        if directory is not None:
            # Two stubs have the same name while a model is loaded in place of itself.
            self._file = directory / SIGNS / f"{instance}.{os.getpid()}"
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="inflight-sign", daemon=True)

    def start(self) -> None:
        if self._file is not None:
            self._thread.start()

    def stop(self) -> None:
        """Wait for the end; nobody waits for signs from here on."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        assert self._file is not None
        try:
            self._file.parent.mkdir(exist_ok=True)
            self._file.touch()
            while not self._stopping.wait(PERIOD_SECONDS):
                os.utime(self._file)
            self._file.unlink(missing_ok=True)
        except OSError as error:
            logger.warning("the supervisor cannot be shown that this process is alive: %s", error)
