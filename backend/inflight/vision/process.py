"""The vision process as its program sees it: a picture in, its rows out. Used by one thread.

A process that ends, by itself or by a picture, is replaced when the next one is needed.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection

import msgspec

from inflight.prompt_tuning import EmbeddingType
from inflight.python_command import find_python, worker_environment
from inflight.vision.messages import LOAD_SECONDS, Ready, See, Settings, Unusable, answer_decoder, encoder
from inflight.vision.seen import Seen, Unreadable

logger = logging.getLogger(__name__)

MODULE = "inflight.vision.worker"
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}

GRACE_SECONDS = 5.0
"""Beyond the bounds that the process sets itself. Those do not end it while it is stopped, or cannot be scheduled."""


class VisionFailed(Exception):
    """There is no process: the message is a clause that says why."""

    def __init__(self, why: str, *, is_lasting: bool) -> None:
        """`is_lasting`: whether another process would fail as well."""
        super().__init__(why)
        self.is_lasting = is_lasting


class VisionProcess:
    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self.image_token = ""
        """Once it is started."""

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """And wait until it is ready, unless it is. Raises VisionFailed."""
        if self._process is not None and self._process.poll() is None:
            return
        self.close()
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [str(find_python()), "-m", MODULE, str(theirs.fileno()), msgspec.json.encode(self._settings).decode()],
                env={**worker_environment(os.environ), **OFFLINE},
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=2,
            )
        self._connection = Connection(ours.detach())
        try:
            with self._killed_after(LOAD_SECONDS + GRACE_SECONDS):
                said = answer_decoder.decode(self._connection.recv_bytes())
        except (EOFError, OSError):
            why = f"its process ended with code {self._end()} while it was loaded"
            raise VisionFailed(why, is_lasting=False) from None
        if isinstance(said, Unusable):
            self.close()
            raise VisionFailed(said.why, is_lasting=True)
        assert isinstance(said, Ready)
        self.image_token = said.image_token

    def see(self, data: bytes, dtype: EmbeddingType) -> Seen:
        """By the process, which has been started."""
        assert self._connection is not None
        most = self._settings.max_seconds
        began = time.monotonic()
        try:
            with self._killed_after(most + GRACE_SECONDS):
                self._connection.send_bytes(encoder.encode(See(data=data, dtype=dtype)))
                said = answer_decoder.decode(self._connection.recv_bytes())
        except (EOFError, OSError):
            code = self._end()
            logger.error("the process that reads pictures ended with code %d; another one takes its place", code)
            why = f"could not be read: the process that does it ended with code {code}"
            if code == -signal.SIGALRM or time.monotonic() - began > most:
                why = f"took longer than {most:g} s to read (image_timeout_ms)"
            return Unreadable(why=why, is_lasting=False)
        assert not isinstance(said, Ready | Unusable)
        seen = said.picture or said.unreadable
        assert seen is not None
        return seen

    def kill(self) -> None:
        """End the process, whatever it is doing. From any thread: who waits for it, waits no longer."""
        process = self._process
        if process is not None:
            process.kill()

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    @contextlib.contextmanager
    def _killed_after(self, seconds: float) -> Iterator[None]:
        """Within which the process must have done what it is to do."""
        assert self._process is not None
        timer = threading.Timer(seconds, self._process.kill)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _end(self) -> int:
        """The code with which the process has ended."""
        assert self._process is not None
        code = self._process.wait()
        self.close()
        return code
