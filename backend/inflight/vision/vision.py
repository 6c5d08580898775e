"""Pictures of requests, seen once each: asks the vision process on a thread of its own, and keeps what it has seen.

The same file gives the same rows, bit for bit, from the cache or anew. Safe to use from several threads.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from weakref import WeakValueDictionary

from inflight.errors import QueueFull
from inflight.prompt_tuning import EmbeddingType
from inflight.vision.messages import Settings
from inflight.vision.process import VisionFailed, VisionProcess
from inflight.vision.seen import Picture, Seen, Unreadable

logger = logging.getLogger(__name__)

MAX_WAITING = 256
"""Pictures: more would wait for minutes. Never fewer than one conversation may have."""
ENTRY_BYTES = 1024
"""What an entry of the cache takes besides its rows."""


class Unseen(Exception):
    """Not an error: these pictures have to be seen before a request can be made of them. To be raised where waiting for
    them would hold up others, and caught where it does not."""

    def __init__(self, vision: Vision, files: Sequence[bytes], dtype: EmbeddingType) -> None:
        super().__init__()
        self._vision, self._files, self._dtype = vision, files, dtype

    def see(self) -> Future[list[Seen]]:
        """As long as somebody holds the result, `Vision.find` finds the same. Raises QueueFull."""
        return self._vision.see(self._files, self._dtype)


class Vision:
    def __init__(self, settings: Settings, max_cached_bytes: int) -> None:
        """`max_cached_bytes`: of what has been seen and is in no request now."""
        self._process = VisionProcess(settings)
        self._thread = ThreadPoolExecutor(1, "inflight-vision")
        self._lock = threading.Lock()
        self._max_cached_bytes = max_cached_bytes
        self._cached: OrderedDict[bytes, Seen] = OrderedDict()
        """The one that was used last is the last."""
        self._num_cached_bytes = 0
        self._held: WeakValueDictionary[bytes, Seen] = WeakValueDictionary()
        """With those of requests in the making."""
        self._num_waiting = 0
        """Pictures that were asked for and have not been seen."""
        self._is_closing = False
        self.why_none = ""
        """Why no picture can ever be read; "" = they can, as far as is known."""

    def start(self) -> Future[str]:
        """Load the process, so that the first picture need not wait for it."""
        return self._thread.submit(self._start)

    def rest(self) -> None:
        """End the process, behind what it has to do, until it is needed again. What has been seen is kept."""
        self._thread.submit(self._process.close)

    @property
    def image_token(self) -> str:
        """The placeholder, as chat templates write it once for each picture. Known once a picture has been seen."""
        return self._process.image_token

    @property
    def pid(self) -> int | None:
        """Of the process."""
        return self._process.pid

    def find(self, files: Sequence[bytes], dtype: EmbeddingType) -> list[Seen]:
        """What is known of these pictures. `dtype`: of the rows. Raises Unseen if they have to be seen first."""
        with self._lock:
            found = [self._known(digest_of(data, dtype)) for data in files]
        seen = [each for each in found if each is not None]
        if len(seen) < len(files):
            raise Unseen(self, files, dtype)
        return seen

    def see(self, files: Sequence[bytes], dtype: EmbeddingType) -> Future[list[Seen]]:
        """One picture after the other, behind those that were asked for before. Raises QueueFull if too many wait. A
        result that is cancelled before its turn takes no time."""
        with self._lock:
            if self._num_waiting + len(files) > MAX_WAITING:
                raise QueueFull(f"{self._num_waiting} images wait to be read: try again later")
            self._num_waiting += len(files)
        seeing = self._thread.submit(lambda: [self._see(data, dtype) for data in files])
        seeing.add_done_callback(lambda _: self._count_done(len(files)))
        return seeing

    def _count_done(self, num_files: int) -> None:
        with self._lock:
            self._num_waiting -= num_files

    def close(self) -> None:
        """End the process, also while it reads."""
        self._is_closing = True
        self._process.kill()
        self._thread.shutdown(cancel_futures=True)
        self._process.close()

    def _known(self, digest: bytes) -> Seen | None:
        if digest in self._cached:
            self._cached.move_to_end(digest)
        return self._held.get(digest)

    def _start(self) -> str:
        """A clause about why there is no process; "" = there is one."""
        if self._is_closing:
            return "the server is shutting down"
        if self.why_none:
            return self.why_none
        try:
            self._process.start()
        except VisionFailed as error:
            self.why_none = str(error) if error.is_lasting else ""
            if not self._is_closing:
                logger.warning("pictures cannot be read: %s", error)
            return str(error)
        return ""

    def _see(self, data: bytes, dtype: EmbeddingType) -> Seen:
        digest = digest_of(data, dtype)
        with self._lock:
            known = self._known(digest)
        if isinstance(known, Picture) or (known is not None and known.is_lasting):
            return known
        why = self._start()
        if why:
            seen: Seen = Unreadable(why=f"cannot be read: {why}", is_lasting=False)
        else:
            seen = self._process.see(data, dtype)
            if self._process.pid is None and not self._is_closing:
                self._thread.submit(self._start)
        with self._lock:
            self._held[digest] = seen
            if isinstance(seen, Picture) or seen.is_lasting:
                self._cached[digest] = seen
                self._num_cached_bytes += _num_bytes(seen)
            while self._num_cached_bytes > self._max_cached_bytes:
                self._num_cached_bytes -= _num_bytes(self._cached.popitem(last=False)[1])
        return seen


def digest_of(data: bytes, dtype: EmbeddingType) -> bytes:
    """Of a picture's file and the type of its rows: all else that they depend on is the same within one process."""
    return hashlib.blake2b(data, digest_size=32, person=dtype.encode()).digest()


def _num_bytes(seen: Seen) -> int:
    return ENTRY_BYTES + (len(seen.rows.data) + len(seen.text) if isinstance(seen, Picture) else 0)
