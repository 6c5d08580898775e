"""What this machine has of one model, in the layout that huggingface_hub documents for its cache:

    models--ORG--NAME/blobs/DIGEST                  the bytes of a file; DIGEST.incomplete while they come
    models--ORG--NAME/snapshots/COMMIT/FILE         a link to them
    models--ORG--NAME/refs/REVISION                 the commit that a branch or tag stood for at last
    models--ORG--NAME/inflight/COMMIT.json          the files that were fetched here, and their bytes, once all are;
                               COMMIT.TAG.json      likewise of a GGUF file that was named, by a tag or its path

The last one is this engine's own: with it a folder is known to be whole without the hub. A revision is written down
after its files, so that without a network the last whole ones are found. Asks no hub.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from inflight.hub.model_name import COMMIT, ModelName
from inflight.hub.wanted_files import find_gguf_files, is_whole


@dataclass(frozen=True, slots=True)
class FoundModel:
    commit: str
    path: Path
    """See ModelCache.path."""
    has_all: bool
    """Whether it is known to have every file that the engine reads: another program may have fetched fewer."""


class ModelCache:
    def __init__(self, cache: Path, model: ModelName) -> None:
        self._root = cache / f"models--{model.name.replace('/', '--')}"
        self._model = model

    def folder(self, commit: str) -> Path:
        """Of the files of a commit. It need not exist."""
        return self._root / "snapshots" / commit

    def blob(self, digest: str) -> Path:
        """Of a file with this digest. It need not exist."""
        return self._root / "blobs" / digest

    def path(self, commit: str, names: Iterable[str]) -> Path:
        """What is served of the model that has these files: its folder, or the first of its GGUF files."""
        folder = self.folder(commit)
        return folder / min(names) if self._model.gguf else folder

    def find(self) -> FoundModel | None:
        """What is there of the model's revision, if it can be served."""
        commit = self._commit()
        if commit is None:
            return None
        folder = self.folder(commit)
        with contextlib.suppress(OSError, ValueError, AttributeError):
            sizes = json.loads(self._list(commit).read_text(encoding="utf-8"))
            if all(has_size(folder / name, size) for name, size in sizes.items()):
                return FoundModel(commit, self.path(commit, sizes), True)
        if self._model.gguf:
            files = find_gguf_files(self._model.gguf, folder)
            return FoundModel(commit, self.path(commit, files), False) if files else None
        return FoundModel(commit, folder, False) if is_whole(folder) else None

    def link(self, commit: str, name: str, digest: str) -> None:
        """Enter the bytes with this digest as a file of the commit. Raises OSError."""
        path = self.folder(commit) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=self._root) as scratch:
            made = Path(scratch, "link")
            made.symlink_to(os.path.relpath(self.blob(digest), path.parent))
            os.replace(made, path)

    def complete(self, commit: str, sizes: Mapping[str, int]) -> None:
        """Write down that the commit's folder has all files that the engine reads, of so many bytes each, and what the
        revision stands for. A cache that cannot be written is asked for them again at the next start."""
        with contextlib.suppress(OSError):
            self._write(self._list(commit), json.dumps(sizes, sort_keys=True))
            if self._model.revision != commit:
                self._write(self._reference, commit)

    @contextlib.contextmanager
    def locked(self, wait: Callable[[], None]) -> Iterator[None]:
        """Alone among the processes that fetch this model. `wait` is called if another one does; it ends by itself, and
        so does its lock if it is killed. File systems without locks cost traffic at most, since digests are compared.
        Raises OSError if the cache cannot be written."""
        self._root.joinpath("inflight").mkdir(parents=True, exist_ok=True)
        with (self._root / "inflight" / "lock").open("ab") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                wait()
                fcntl.flock(file, fcntl.LOCK_EX)
            except OSError:
                pass
            yield

    @property
    def _reference(self) -> Path:
        return self._root / "refs" / self._model.revision

    def _list(self, commit: str) -> Path:
        gguf = self._model.gguf and f".{quote(self._model.gguf, safe='')}"
        return self._root / "inflight" / f"{commit}{gguf}.json"

    def _commit(self) -> str | None:
        if self._model.is_pinned:
            return self._model.revision
        try:
            commit = self._reference.read_text(encoding="ascii").strip()
        except (OSError, ValueError):
            return None
        return commit if COMMIT.fullmatch(commit) else None

    def _write(self, path: Path, text: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=self._root) as scratch:
            whole = Path(scratch, path.name)
            whole.write_text(text, encoding="utf-8")
            os.replace(whole, path)


def has_size(path: Path, size: int) -> bool:
    """Whether it is a file of so many bytes: one that a full disk or a power cut has shortened is not what came."""
    return path.is_file() and path.stat().st_size == size
