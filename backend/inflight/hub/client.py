"""What is asked of the hub, through huggingface_hub: which files a revision has, and the bytes of one.

Every answer that is not what was asked for becomes one sentence with a remedy. What may pass (no connection, 429, 5xx)
is tried again, a few times, for as long as a person would wait. huggingface_hub's own download would sleep for as long
as the hub's Retry-After says, forget the half of a file that came before an interruption, and compare no digest.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import quote

from inflight.errors import ConfigurationError
from inflight.hub.model_name import COMMIT, ModelName

if TYPE_CHECKING:
    import httpx
    from huggingface_hub.hf_api import ModelInfo, RepoSibling

NUM_RETRIES = 5
"""In a row, without a byte."""
NUM_LOOKUPS = 2
"""Fewer: somebody waits at a terminal, and may have meant a folder."""
LONGEST_WAIT = 60.0
"""Seconds that a hub may ask for between two requests. One that wants more is named instead."""
MAX_LISTING_BYTES = 2**24
"""Of fifty thousand files."""
MAX_FILE_BYTES = 2**63 - 1
DIGEST = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
TRANSIENT = (408, 429, 500, 502, 503, 504)

_T = TypeVar("_T")


class Unreachable(ConfigurationError):
    """The hub does not answer, or not now."""


class Interrupted(Exception):
    """What may pass. `seconds`: for which the hub asks."""

    def __init__(self, reason: str, seconds: float | None = None) -> None:
        super().__init__(reason)
        self.seconds = seconds


@dataclass(frozen=True, slots=True)
class HubFile:
    name: str
    size: int
    digest: str
    """SHA-256 of a large file, git's SHA-1 of a small one: how the cache names its bytes."""


@dataclass(frozen=True, slots=True)
class Listing:
    """The files of a commit."""

    commit: str
    files: dict[str, HubFile]


@dataclass(frozen=True, kw_only=True)
class Hub:
    """A hub, and where its files are kept here."""

    endpoint: str
    cache: Path
    token: str | None = None
    is_offline: bool = False
    timeout: float = 10.0
    """Seconds for a connection, and without a byte."""
    listing_seconds: float = 60.0
    """For all of a model's list of files."""
    patience: float = 1.0
    """Factor of the times between two attempts."""

    @classmethod
    def of_environment(cls) -> Hub:
        """As HF_ENDPOINT, HF_HOME, HF_TOKEN, HF_HUB_OFFLINE and the others of huggingface_hub say."""
        from huggingface_hub import constants, get_token

        return cls(
            endpoint=constants.ENDPOINT,
            cache=Path(constants.HF_HUB_CACHE),
            token=get_token(),
            is_offline=constants.is_offline_mode(),
            timeout=float(constants.HF_HUB_DOWNLOAD_TIMEOUT),
        )

    def list(self, model: ModelName, *, tries_again: bool) -> Listing:
        """The files of the model's revision. `tries_again`: if the hub does not answer at once. Raises
        ConfigurationError, Unreachable for what may pass."""

        def ask() -> Listing:
            with self._in_words(model):
                info = self._in_time(model, lambda: self._info(model))
                files = [self._file(model, found) for found in info.siblings or () if found.rfilename.isprintable()]
                if not COMMIT.fullmatch(info.sha or "") or (model.is_pinned and info.sha != model.revision):
                    raise ConfigurationError(f"{self.endpoint} names no commit of {model}, or another one")
                return Listing(str(info.sha), {file.name: file for file in files})

        return self.patiently(ask, f"{model} could not be looked up", NUM_LOOKUPS if tries_again else 0)

    def _info(self, model: ModelName) -> ModelInfo:
        """As HfApi.model_info, which would read an answer of any length. Raises ConfigurationError, and what
        `_in_words` knows."""
        from huggingface_hub import get_session
        from huggingface_hub.hf_api import ModelInfo

        url = f"{self.endpoint}/api/models/{model.name}/revision/{quote(model.revision, safe='')}?blobs=true"
        body = bytearray()
        with get_session().stream(
            "GET", url, headers=self._headers(), timeout=self.timeout, follow_redirects=True
        ) as response:
            self._check(response)
            for chunk in response.iter_raw():
                body += chunk
                if len(body) > MAX_LISTING_BYTES:
                    raise ConfigurationError(
                        f"{self.endpoint} lists the files of {model} with more than {MAX_LISTING_BYTES} bytes: check "
                        f"HF_ENDPOINT, or {model.by_hand}"
                    )
        return ModelInfo(**json.loads(body))  # type: ignore[no-untyped-call]

    def _in_time(self, model: ModelName, ask: Callable[[], _T]) -> _T:
        """What `ask` gives within `listing_seconds`, else raise Unreachable. In a thread, which is left behind then: no
        timeout of HTTP ends an answer that comes byte by byte."""
        answer: concurrent.futures.Future[_T] = concurrent.futures.Future()

        def run() -> None:
            try:
                answer.set_result(ask())
            except BaseException as error:
                answer.set_exception(error)

        threading.Thread(target=run, name="inflight-hub", daemon=True).start()
        try:
            return answer.result(self.listing_seconds)
        except concurrent.futures.TimeoutError:
            raise Unreachable(
                f"{self.endpoint} has not listed the files of {model} within {self.listing_seconds:g} s: check network "
                f"and HF_ENDPOINT, or {model.by_hand}"
            ) from None

    def _headers(self) -> dict[str, str]:
        from huggingface_hub.utils._headers import build_hf_headers

        headers = build_hf_headers(token=self.token or False, library_name="inflight")
        return {**headers, "Accept-Encoding": "identity"}

    def _file(self, model: ModelName, found: RepoSibling) -> HubFile:
        """Raises ConfigurationError, and what `_in_words` knows."""
        large = found.lfs
        size, digest = (found.size, found.blob_id) if large is None else (large.size, large.sha256)
        if type(size) is not int or not 0 <= size <= MAX_FILE_BYTES or not digest or not DIGEST.fullmatch(digest):
            raise ConfigurationError(
                f"{self.endpoint} lists {found.rfilename} of {model} without a size and a digest of a file"
            )
        return HubFile(found.rfilename, size, digest)

    @contextlib.contextmanager
    def read(
        self, model: ModelName, commit: str, file: HubFile, start: int = 0, end: int | None = None
    ) -> Iterator[tuple[int, Iterator[bytes]]]:
        """Where the bytes that come begin, `start` or 0, and these bytes, which may go on behind `end`. Raises
        ConfigurationError and Interrupted."""
        from huggingface_hub import get_session, hf_hub_url

        url = hf_hub_url(model.name, file.name, revision=commit, endpoint=self.endpoint)
        headers = self._headers()
        if start or end is not None:
            headers["Range"] = f"bytes={start}-{'' if end is None else end - 1}"
        with (
            self._in_words(model),
            get_session().stream("GET", url, headers=headers, timeout=self.timeout, follow_redirects=True) as response,
        ):
            self._check(response)
            continues = response.status_code == 206 and response.headers.get("Content-Range", "").startswith(
                f"bytes {start}-"
            )
            if start and response.status_code == 206 and not continues:
                raise ConfigurationError(f"{self.endpoint} sends other bytes of {file.name} than were asked for")
            yield (start if continues else 0), response.iter_bytes()

    def patiently(
        self,
        ask: Callable[[], _T],
        failed: str,
        num_retries: int = NUM_RETRIES,
        sleep: Callable[[float], object] = time.sleep,
    ) -> _T:
        """What `ask` gives, asked again after what may pass. `failed`: a clause for the error, Unreachable."""
        for attempt in range(num_retries + 1):
            try:
                return ask()
            except Interrupted as reason:
                wait = float(2**attempt) if reason.seconds is None else reason.seconds
                if attempt == num_retries or wait > LONGEST_WAIT:
                    raise Unreachable(f"{failed}: {reason}") from None
            sleep(wait * self.patience)
        raise AssertionError("the last attempt returns or raises")

    @contextlib.contextmanager
    def _in_words(self, model: ModelName) -> Iterator[None]:
        """Errors of huggingface_hub and of HTTP as ConfigurationError or Interrupted."""
        import httpx
        from huggingface_hub import errors

        try:
            yield
        except errors.HfHubHTTPError as error:
            raise self._refusal(model, error) from None
        except httpx.HTTPError as error:
            raise Interrupted(
                f"{self.endpoint} cannot be reached ({type(error).__name__}: {error}): check network and HF_ENDPOINT"
            ) from None
        except errors.OfflineModeIsEnabled as error:
            raise Interrupted(str(error)) from None
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError, httpx.InvalidURL) as error:
            reason = " ".join(str(error).split())[:200]
            raise ConfigurationError(
                f"{self.endpoint} does not answer as a hub does ({type(error).__name__}: {reason}): check HF_ENDPOINT"
            ) from None

    def _check(self, response: httpx.Response) -> None:
        """Raise what huggingface_hub raises for a status. It tells them apart by their headers: the body of an error,
        which may have any length, is not read."""
        import httpx
        from huggingface_hub.utils._http import hf_raise_for_status

        told = [each for each in response.headers.raw if each[0].lower().startswith((b"x-", b"retry-after"))]
        hf_raise_for_status(httpx.Response(response.status_code, headers=told, request=response.request))

    def _refusal(self, model: ModelName, error: Exception) -> Exception:
        from huggingface_hub import errors

        assert isinstance(error, errors.HfHubHTTPError)
        status = error.response.status_code
        page, has_token = f"{self.endpoint}/{model.name}", self.token is not None
        if status in TRANSIENT:
            return Interrupted(*self._transience(status, error.response))
        if isinstance(error, errors.GatedRepoError):
            remedy = "accept its terms there" + ("" if has_token else " and set HF_TOKEN to your token")
            return ConfigurationError(f"{model} is gated at {page}: {remedy}")
        if isinstance(error, errors.RevisionNotFoundError):
            return ConfigurationError(
                f"{page} has no revision {model.revision}: name a branch, a tag or a commit that it has"
            )
        if isinstance(error, errors.RemoteEntryNotFoundError):
            return ConfigurationError(f"a file of {model} that {self.endpoint} lists is not there: try again later")
        if isinstance(error, errors.RepositoryNotFoundError) or (status == 401 and not has_token):
            hidden = "your token may not see it" if has_token else "it is private and HF_TOKEN is not set"
            missing = "file" if model.is_file else "folder"
            return ConfigurationError(
                f"there is no {missing} {model}, and {self.endpoint} has no model of that name, or {hidden}"
            )
        if status in (401, 403):
            return ConfigurationError(
                f"{self.endpoint} does not let {model} be read ({status}): set HF_TOKEN to a token that may read it"
            )
        if status == 416:
            return ConfigurationError(f"{self.endpoint} has fewer bytes of a file of {model} than it lists")
        return ConfigurationError(f"{self.endpoint} refuses {model} with status {status}")

    def _transience(self, status: int, response: httpx.Response) -> tuple[str, float | None]:
        """The reason in words, and for how many seconds the hub asks."""
        asked = response.headers.get("Retry-After", "")
        seconds = float(asked) if asked.isascii() and asked.isdigit() else None
        if status != 429:
            return f"{self.endpoint} fails with status {status}; try again later", seconds
        later = "later" if seconds is None else f"in {seconds:.0f} s"
        token = "" if self.token is not None else ", or set HF_TOKEN: who is known may ask more often"
        return f"{self.endpoint} has had too many requests (429); try again {later}{token}", seconds
