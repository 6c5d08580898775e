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

    @property
    def loads_itself(self) -> frozenset[str]:
        """The paths whose answers use the engine as far as they need it (`ModelEngine.in_use`). All others that are
        posted to get it loaded."""

    @property
    def name_tag(self) -> str:
        """What its clients may add to the name of a model; "" = nothing."""

    def paths(self) -> Mapping[str, Mapping[str, Handler]]:
        """Path -> method -> what answers it."""
