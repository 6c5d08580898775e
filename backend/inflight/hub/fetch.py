"""A model of the hub becomes a folder of this machine, or a GGUF file: what it is asked for, in which order, and what
is enough.

config.json comes first, and whoever knows the engine's layers is asked whether they can serve it; of a GGUF file its
architecture, which is in its first bytes: a model that cannot be served costs kilobytes. Weights come last. A revision
is resolved to a commit once, and its folder is what everything behind has: relaunches read the same files, whatever
happens to the hub.
"""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from inflight.checkpoint_files import CONFIG
from inflight.errors import ConfigurationError
from inflight.gguf.architectures import ARCHITECTURE, find_architecture
from inflight.gguf.file import read_head
from inflight.hub.cache import ModelCache, has_size
from inflight.hub.client import Hub, HubFile, Listing
from inflight.hub.download import Download
from inflight.hub.model_name import ModelName
from inflight.hub.transfer import progress, run_all
from inflight.hub.wanted_files import Unfit, decisive_files, gguf_files, small_files, weight_files

HEAD_BYTES = 2**14
"""Of a GGUF file: its architecture is the first value of its metadata."""
SPARE_BYTES = 2**28
"""That stay free on the disk."""
MAX_DECISIVE_BYTES = 2**27
"""Of a file that comes before the disk is looked at. The index of a hundred thousand tensors has a tenth of it."""


def fetch(model: ModelName, hub: Hub, check: Callable[[Path], None], tell: Callable[[str], None]) -> Path:
    """The folder with all files of the model that the engine reads, or the first of its GGUF files. `check` raises
    ConfigurationError for a folder with a config.json that cannot be served; `tell` is given lines for people. Raises
    ConfigurationError."""
    cache = ModelCache(hub.cache, model)
    found = cache.find()
    if found is not None and (hub.is_offline or (model.is_pinned and found.has_all)):
        return found.path
    if hub.is_offline:
        raise ConfigurationError(
            f"{model} is not in {hub.cache}, and HF_HUB_OFFLINE forbids to fetch it: unset that, or set HF_HOME to the "
            "folder that has it"
        )
    try:
        listing = hub.list(model, tries_again=found is None)
    except ConfigurationError as error:
        if found is None:
            raise
        tell(f"{error}; so commit {found.commit} of {model} is served, which is in {hub.cache}")
        return found.path
    try:
        with cache.locked(partial(tell, f"another process fetches {model}: waiting for it")):
            return _complete(_Fetching(model, hub, cache, listing, tell), check)
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        remedy = "make room there or set HF_HOME to a folder with more" if full else "set HF_HOME to a folder that can"
        raise ConfigurationError(
            f"{model} cannot be written to {hub.cache} ({error.strerror or error}): {remedy}"
        ) from None


class _Fetching:
    """Of the files of one commit."""

    def __init__(
        self, model: ModelName, hub: Hub, cache: ModelCache, listing: Listing, tell: Callable[[str], None]
    ) -> None:
        self.model = model
        self.hub = hub
        self.cache = cache
        self.listing = listing
        self.folder = cache.folder(listing.commit)
        self._tell = tell

    def get(self, names: Sequence[str], note: Callable[[int], None]) -> None:
        """Have these files, which become visible once all of them are there. Raises ConfigurationError and OSError."""
        files = self._missing(names)
        run_all(self._downloads(files), note)
        for file in files:
            self.cache.link(self.listing.commit, file.name, file.digest)

    def get_visibly(self, names: Sequence[str]) -> None:
        """Likewise, with a check of the disk and something to look at."""
        total = self.size_of(names)
        present = sum(each.num_present for each in self._downloads(self._missing(names)))
        self._check_room(total - present)
        with progress(f"fetching {self.model}", total, present, self._tell) as note:
            self.get(names, note)

    def size_of(self, names: Sequence[str]) -> int:
        """Bytes of those that are not there, or not whole."""
        return sum({file.digest: file.size for file in self._missing(names)}.values())

    def head_of(self, name: str) -> bytes:
        """The first bytes of a file, which are not kept. Raises ConfigurationError."""

        def read() -> bytes:
            head, file = bytearray(), self.listing.files[name]
            with self.hub.read(self.model, self.listing.commit, file, end=HEAD_BYTES) as (_, chunks):
                for chunk in chunks:
                    head += chunk
                    if len(head) >= HEAD_BYTES:
                        break
            return bytes(head)

        return self.hub.patiently(read, f"{name} of {self.model} could not be looked at")

    def _missing(self, names: Sequence[str]) -> list[HubFile]:
        files = [self.listing.files[name] for name in names]
        return [file for file in files if not has_size(self.folder / file.name, file.size)]

    def _downloads(self, files: Sequence[HubFile]) -> list[Download]:
        """Files of one content come once."""
        place = self.cache.blob
        once = {file.digest: file for file in files}.values()
        return [Download(self.hub, self.model, self.listing.commit, file, place(file.digest)) for file in once]

    def _check_room(self, num_bytes: int) -> None:
        free = shutil.disk_usage(self.folder.parents[1]).free
        if num_bytes and free < num_bytes + SPARE_BYTES:
            raise ConfigurationError(
                f"{self.model} needs {(num_bytes + SPARE_BYTES) / 1e9:.2f} GB more in {self.hub.cache}, and "
                f"{free / 1e9:.2f} GB are free: make room there or set HF_HOME to a folder with more"
            )


def _check_head(name: str, head: bytes) -> None:
    """Raise ConfigurationError if the first bytes of a GGUF file show that the engine cannot serve it."""
    metadata = read_head(name, head)
    if ARCHITECTURE in metadata:
        find_architecture(metadata)


def _complete(fetching: _Fetching, check: Callable[[Path], None]) -> Path:
    files, folder, gguf = fetching.listing.files, fetching.folder, fetching.model.gguf
    try:
        decisive = [] if gguf else decisive_files(files)
        for name in decisive:
            if files[name].size > MAX_DECISIVE_BYTES:
                raise Unfit(f"its {name} has {files[name].size} bytes, more than {MAX_DECISIVE_BYTES}")
        fetching.get(decisive, lambda number: None)
        rest = gguf_files(gguf, files) if gguf else [*small_files(files), *weight_files(folder, files)]
    except Unfit as reason:
        raise ConfigurationError(f"{fetching.model} cannot be served: {reason}") from None
    if fetching.size_of(rest):
        head = fetching.head_of(rest[0]) if gguf else b""
        try:
            if gguf:
                _check_head(rest[0], head)
            else:
                check(folder)
        except ConfigurationError as error:
            why = str(error).removeprefix(f"{rest[0] if gguf else folder / CONFIG}: ")
            raise ConfigurationError(f"{fetching.model} was not fetched: {why}") from None
        fetching.get_visibly(rest)
    fetching.cache.complete(fetching.listing.commit, {name: files[name].size for name in (*decisive, *rest)})
    return fetching.cache.path(fetching.listing.commit, rest)
