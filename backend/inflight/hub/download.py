"""One file of the hub on its way into the cache: gone on with where it was left off, and compared with its digest.

What has come stays when the process ends, so the next one asks for the rest alone.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from inflight.errors import ConfigurationError
from inflight.hub.cache import has_size
from inflight.hub.client import Hub, HubFile, Interrupted, Unreachable
from inflight.hub.model_name import ModelName

CHUNK_BYTES = 2**20
SHA256_DIGITS = 64
WORTH_BYTES = 2**16
"""What a connection must bring so that the next one is opened without waiting, and without an end to their number."""


class Cancelled(Exception):
    """Another file failed, or the process is to end."""


class Download:
    """Of `file` to `target`, by way of a file beside it."""

    def __init__(self, hub: Hub, model: ModelName, commit: str, file: HubFile, target: Path) -> None:
        self._hub = hub
        self._model = model
        self._commit = commit
        self._file = file
        self._target = target
        self._part = target.with_name(f"{target.name}.incomplete")

    @property
    def num_present(self) -> int:
        """Bytes that an earlier process left."""
        if has_size(self._target, self._file.size):
            return self._file.size
        return min(self._part.stat().st_size, self._file.size) if self._part.is_file() else 0

    def run(self, note: Callable[[int], None], cancelled: threading.Event) -> None:
        """Fetch what is missing. `note` is told how many bytes more are there, fewer if some have to come again.
        Raises ConfigurationError, OSError of the disk and Cancelled."""
        if has_size(self._target, self._file.size):
            return
        self._target.parent.mkdir(parents=True, exist_ok=True)
        with self._part.open("ab") as out:
            if out.tell() > self._file.size:
                _cut(out, 0)
            while out.tell() < self._file.size:
                self._go_on(out, note, cancelled)
            out.flush()
            os.fsync(out.fileno())  # a name that outlives a power cut, and bytes that do not, would be a broken file
        if self._digest() != self._file.digest:
            note(-self._file.size)
            self._part.unlink()
            raise ConfigurationError(
                f"{self._file.name} of {self._model} came with another digest than {self._hub.endpoint} lists: it was "
                "removed; start again, and if that does not help the hub or a proxy before it is broken"
            )
        os.replace(self._part, self._target)

    def _go_on(self, out: BinaryIO, note: Callable[[int], None], cancelled: threading.Event) -> None:
        """Until the file is whole, or a connection ends that has brought something."""
        before = out.tell()

        def attempt() -> None:
            if cancelled.is_set():
                raise Cancelled
            reason = "the connection ends before the file does"
            try:
                self._append(out, note, cancelled)
            except Interrupted as error:
                if error.seconds is not None:
                    raise
                reason = str(error)
            if out.tell() < min(before + WORTH_BYTES, self._file.size):
                raise Interrupted(reason)

        try:
            self._hub.patiently(attempt, f"{self._file.name} of {self._model} broke off", sleep=cancelled.wait)
        except Unreachable as error:
            there, whole = out.tell() / 1e9, self._file.size / 1e9
            raise Unreachable(f"{error}; {there:.2f} of {whole:.2f} GB stay: start again to go on from there") from None

    def _append(self, out: BinaryIO, note: Callable[[int], None], cancelled: threading.Event) -> None:
        with self._hub.read(self._model, self._commit, self._file, out.tell()) as (start, chunks):
            if start != out.tell():
                note(start - out.tell())
                _cut(out, start)
            for chunk in chunks:
                if cancelled.is_set():
                    raise Cancelled
                out.write(chunk)
                note(len(chunk))
                if out.tell() > self._file.size:
                    _cut(out, 0)
                    raise ConfigurationError(
                        f"{self._hub.endpoint} lists {self._file.name} of {self._model} with {self._file.size} bytes "
                        "and sends more: it is not what was asked for"
                    )

    def _digest(self) -> str:
        """Of what is there, in the way in which the hub gave it."""
        if len(self._file.digest) == SHA256_DIGITS:
            digest = hashlib.sha256()
        else:
            digest = hashlib.sha1(f"blob {self._file.size}\0".encode(), usedforsecurity=False)
        with self._part.open("rb") as file:
            while chunk := file.read(CHUNK_BYTES):
                digest.update(chunk)
        return digest.hexdigest()


def _cut(out: BinaryIO, size: int) -> None:
    """Keep so many bytes of a file to which is appended."""
    out.truncate(size)
    out.seek(size)
