"""The name of a model on the hub, and how it is told from a path:

    ORGANISATION/NAME               a checkpoint of transformers
    ORGANISATION/NAME:TAG           the GGUF file of that repository with this tag in its name, as Q4_K_M
    ORGANISATION/NAME/FILE.gguf     this file of it

each with @REVISION behind it or without.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from inflight.gguf.parts import ENDING

DEFAULT_REVISION = "main"
PART = r"[A-Za-z0-9][\w.-]*"
FILE = rf"(?:{PART}/)*{PART}\{ENDING}"
NAME = re.compile(
    rf"(?P<name>{PART}/{PART})(?::(?P<tag>{PART})|/(?P<file>{FILE}))?(?:@(?P<revision>[A-Za-z0-9][\w./-]*))?", re.ASCII
)
MAX_CHARS = 96
MAX_FILE_CHARS = 160
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
    gguf: str = ""
    """Which of its GGUF files: a tag in its name, or its path; "" = none, but the checkpoint of transformers."""

    @classmethod
    def parse(cls, text: str) -> ModelName | None:
        """None if `text` cannot be such a name."""
        found = NAME.fullmatch(text)
        if found is None or ".." in text or "--" in found["name"] or len(found["name"]) > MAX_CHARS:
            return None
        gguf = found["tag"] or found["file"] or ""
        if len(gguf) > MAX_FILE_CHARS or (found["tag"] or "").endswith(ENDING):
            return None
        return cls(found["name"], found["revision"] or DEFAULT_REVISION, gguf)

    @property
    def is_file(self) -> bool:
        """Whether it says by its path which GGUF file is meant."""
        return self.gguf.endswith(ENDING)

    @property
    def is_pinned(self) -> bool:
        """Whether it says by itself which files are meant: a commit does."""
        return COMMIT.fullmatch(self.revision) is not None

    @property
    def by_hand(self) -> str:
        """What to do instead of having it fetched; a clause."""
        revision = "" if self.revision == DEFAULT_REVISION else f" --revision {self.revision}"
        if not self.gguf:
            return f"name the folder that is printed by hf download {self.name}{revision}"
        wanted = self.gguf if self.is_file else f"--include '*{self.gguf}*{ENDING}'"
        return f"name the path that is printed by hf download {self.name} {wanted}{revision}"

    def __str__(self) -> str:
        gguf = self.gguf and f"{'/' if self.is_file else ':'}{self.gguf}"
        return f"{self.name}{gguf}" + ("" if self.revision == DEFAULT_REVISION else f"@{self.revision}")


def find_name(text: str, folder: str | Path = ".") -> ModelName | None:
    """What `text` names on the hub; None if it is a path. Whatever lies at that path, from `folder` on, goes first.
    FOLDER/FILE.gguf is a path, also where there is none."""
    name = ModelName.parse(text)
    if name is None or (text.endswith(ENDING) and not name.is_file):
        return None
    # Unlike Path.exists, false for a path that is too long.
    return None if os.path.exists(os.path.join(folder, text)) else name


def shown_name(checkpoint: str | Path) -> str:
    """What people call the checkpoint in this folder: ORGANISATION/NAME where it came from the hub, else the folder's
    name."""
    folder = Path(checkpoint).resolve()
    found = SNAPSHOT.fullmatch(str(folder))
    return found["name"].replace("--", "/", 1) if found else folder.name
