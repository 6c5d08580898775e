"""What a fault is."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from random import Random

from ci.chaos.scene import Scene
from ci.chaos.workload import Front

TRITONSERVER = frozenset({Front.TRITONSERVER})
OPENAI = frozenset({Front.OPENAI})

Inject = Callable[[Scene, Random], Awaitable[str]]
"""Does it, undoes what would last, and returns what was done, for the log. Raises ChaosFailed if it finds a promise
broken that no stream of the load can tell."""


def _nothing(scene: Scene) -> str:
    return ""


@dataclass(frozen=True, kw_only=True)
class Fault:
    name: str
    inject: Inject
    ends: frozenset[Front] = frozenset()
    """Whose streams may end with an error (UNAVAILABLE, or a lost connection). All others go on and are equal."""
    refuses: frozenset[Front] = frozenset()
    """Who may refuse requests that are sent meanwhile, in the same words. Those in flight go on."""
    replaces: bool = False
    """Whether processes of the server may be replaced; otherwise each must be there afterwards."""
    missing: Callable[[Scene], str] = _nothing
    """Why it cannot be injected here; "" = it can."""
