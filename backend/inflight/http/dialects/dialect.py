"""What the server knows of a dialect."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from inflight.http.endpoint import ErrorForm, Handler


class Dialect(Protocol):
    @property
    def error_form(self) -> ErrorForm:
        """In which its clients know errors."""

    @property
    def below(self) -> tuple[str, ...]:
        """The paths that have only paths of its own below them, whether these exist or not."""

    def paths(self) -> Mapping[str, Mapping[str, Handler]]:
        """Path -> method -> what answers it."""
