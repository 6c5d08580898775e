"""The keys of clients, as a file has them. Only their hashes are kept."""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import time
from collections.abc import Callable
from pathlib import Path

from inflight.errors import ConfigurationError

HASHED = re.compile(r"sha256:([0-9a-fA-F]{64})")
MIN_KEY_LENGTH = 16
LOOK_SECONDS = 1.0
"""How often it is looked whether the file has changed."""

logger = logging.getLogger(__name__)

Version = tuple[int, int, int]
"""Of a file: its inode, time of change in ns, and length in bytes. A file that is replaced has another one."""


class ApiKeys:
    """None at all = everybody may ask. A file that changes is read again; while it is wrong, the keys from before are
    kept. Used on one thread."""

    def __init__(self, path: str, digests: list[bytes], clock: Callable[[], float] = time.monotonic) -> None:
        self._path, self._digests, self._clock = path, digests, clock
        self._numbers: dict[bytes, int] = {}
        """Of all keys that there have been: a number means one key as long as the process lives."""
        self._version = _version(path)
        self._looked = clock()
        self._number_all()

    @classmethod
    def load(cls, path: str, clock: Callable[[], float] = time.monotonic) -> ApiKeys:
        """A key in each line, in clear or as sha256: and its hash; empty lines and those with # are skipped. "" = no
        file. Raises ConfigurationError."""
        return cls(path, _read(path) if path else [], clock)

    def __len__(self) -> int:
        return len(self._digests)

    @property
    def are_needed(self) -> bool:
        return bool(self._digests)

    def find(self, authorization: bytes) -> int | None:
        """The number of the key in an Authorization header; None if it is none of ours. Takes as long for one as for
        the other: all keys are compared, each in constant time."""
        self._look()
        scheme, _, key = authorization.partition(b" ")
        digest, found = hashlib.sha256(key.strip()).digest(), None
        for each in self._digests:
            if hmac.compare_digest(digest, each):
                found = self._numbers[each]
        return found if scheme.lower() == b"bearer" else None

    def _look(self) -> None:
        """Read the file again if it has changed."""
        now = self._clock()
        if now - self._looked < LOOK_SECONDS:
            return
        self._looked = now
        version = _version(self._path)
        if version == self._version:
            return
        self._version = version
        try:
            self._digests = _read(self._path)
        except ConfigurationError as error:
            logger.error("the keys from before are kept: %s", error)
            return
        self._number_all()
        logger.warning("%s has changed; keys that are known now: %d", self._path, len(self._digests))

    def _number_all(self) -> None:
        for digest in self._digests:
            self._numbers.setdefault(digest, len(self._numbers))


def _version(path: str) -> Version | None:
    """None if there is no such file."""
    try:
        found = Path(path).stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


def _read(path: str) -> list[bytes]:
    """The hashes of the keys in a file. Raises ConfigurationError."""
    try:
        lines = [line.strip() for line in Path(path).read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"the file of API keys {path} cannot be read: {error}") from None
    digests = [_digest(line, path) for line in lines if line and not line.startswith("#")]
    if not digests:
        raise ConfigurationError(f"the file of API keys {path} holds no key")
    return digests


def _digest(line: str, path: str) -> bytes:
    if hashed := HASHED.fullmatch(line):
        return bytes.fromhex(hashed[1])
    if len(line) < MIN_KEY_LENGTH or line.startswith("sha256:"):
        raise ConfigurationError(
            f"a key in {path} is too weak, or no hash: give at least {MIN_KEY_LENGTH} characters, or sha256: and 64 "
            "hexadecimal digits"
        )
    return hashlib.sha256(line.encode()).digest()
