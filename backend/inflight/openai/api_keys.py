"""The keys of clients, as a file has them. Only their hashes are kept."""

from __future__ import annotations

import hashlib
import hmac
import re
from pathlib import Path

from inflight.errors import ConfigurationError

HASHED = re.compile(r"sha256:([0-9a-fA-F]{64})")
MIN_KEY_LENGTH = 16


class ApiKeys:
    """None at all = everybody may ask."""

    def __init__(self, digests: list[bytes]) -> None:
        self._digests = digests

    @classmethod
    def load(cls, path: str) -> ApiKeys:
        """A key in each line, in clear or as sha256: and its hash; empty lines and those with # are skipped. "" = no
        file. Raises ConfigurationError."""
        if not path:
            return cls([])
        try:
            lines = [line.strip() for line in Path(path).read_text(encoding="utf-8").splitlines()]
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigurationError(f"the file of API keys {path} cannot be read: {error}") from None
        digests = [_digest(line, path) for line in lines if line and not line.startswith("#")]
        if not digests:
            raise ConfigurationError(f"the file of API keys {path} holds no key")
        return cls(digests)

    def __len__(self) -> int:
        return len(self._digests)

    @property
    def are_needed(self) -> bool:
        return bool(self._digests)

    def find(self, authorization: bytes) -> int | None:
        """The number of the key in an Authorization header; None if it is none of ours. Takes as long for one as for
        the other: all keys are compared, each in constant time."""
        scheme, _, key = authorization.partition(b" ")
        digest, found = hashlib.sha256(key.strip()).digest(), None
        for number, each in enumerate(self._digests):
            if hmac.compare_digest(digest, each):
                found = number
        return found if scheme.lower() == b"bearer" else None


def _digest(line: str, path: str) -> bytes:
    if hashed := HASHED.fullmatch(line):
        return bytes.fromhex(hashed[1])
    if len(line) < MIN_KEY_LENGTH or line.startswith("sha256:"):
        raise ConfigurationError(
            f"a key in {path} is too weak, or no hash: give at least {MIN_KEY_LENGTH} characters, or sha256: and 64 "
            "hexadecimal digits"
        )
    return hashlib.sha256(line.encode()).digest()
