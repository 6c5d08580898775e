"""The heartbeat of a stub for its supervisor: a thread that updates the modification time of a file once a second.

It uses neither tritonserver nor the engine, so the heartbeat stops only if the whole process hangs or some call never
releases the GIL. tritonserver itself goes on calling a model ready whose stub has stopped.
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
    """Keeps the heartbeat file from `start`, at the end of initialize(), until `stop`. Does nothing without a
    supervisor."""

    def __init__(self, instance: str) -> None:
        """`instance`: name of the model instance, e.g. "llm_0_0"."""
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
                os.utime(self._file)
            self._file.unlink(missing_ok=True)
        except OSError as error:
            logger.warning("the supervisor cannot be shown that this process is alive: %s", error)
