"""The name of a model on the hub, ORGANISATION/NAME or ORGANISATION/NAME@REVISION, and how it is told from a path."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

DEFAULT_REVISION = "main"
PART = r"[A-Za-z0-9][\w.-]*"
NAME = re.compile(rf"(?P<name>{PART}/{PART})(?:@(?P<revision>[A-Za-z0-9][\w./-]*))?", re.ASCII)
MAX_CHARS = 96
COMMIT = re.compile(r"[0-9a-f]{40}")
SNAPSHOT = re.compile(r".*/models--(?P<name>[^/]+)/snapshots/[0-9a-f]{40}")
"""How the hub's cache calls the folder of a commit."""


@dataclass(frozen=True, slots=True)
class ModelName:
    """Of a model on the hub. `str` gives what was parsed."""

    name: str
    """With its organisation."""
    revision: str = DEFAULT_REVISION
    """A branch, a tag or a commit."""

    @classmethod
    def parse(cls, text: str) -> ModelName | None:
        """None if `text` cannot be such a name."""
        found = NAME.fullmatch(text)
        if found is None or ".." in text or "--" in found["name"] or len(found["name"]) > MAX_CHARS:
            return None
        return cls(found["name"], found["revision"] or DEFAULT_REVISION)

    @property
    def is_pinned(self) -> bool:
        """Whether it says by itself which files are meant: a commit does."""
        return COMMIT.fullmatch(self.revision) is not None

    @property
    def by_hand(self) -> str:
        """What to do instead of having it fetched; a clause."""
        revision = "" if self.revision == DEFAULT_REVISION else f" --revision {self.revision}"
        return f"name the folder that is printed by hf download {self.name}{revision}"

    def __str__(self) -> str:
        return self.name if self.revision == DEFAULT_REVISION else f"{self.name}@{self.revision}"


def find_name(text: str, folder: str | Path = ".") -> ModelName | None:
    """What `text` names on the hub; None if it is a path. Whatever lies at that path, from `folder` on, goes first. A
    GGUF file is a path, also where there is none."""
    name = None if text.endswith(".gguf") else ModelName.parse(text)
    # Unlike Path.exists, false for a path that is too long.
    return None if name is None or os.path.exists(os.path.join(folder, text)) else name


def shown_name(checkpoint: str | Path) -> str:
    """What people call the checkpoint in this folder: ORGANISATION/NAME where it came from the hub, else the folder's
    name."""
    folder = Path(checkpoint).resolve()
    found = SNAPSHOT.fullmatch(str(folder))
    return found["name"].replace("--", "/", 1) if found else folder.name
