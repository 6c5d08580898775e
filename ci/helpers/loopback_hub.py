"""A small hub on loopback for the real client: it keeps models in memory, and fails in every way that hubs do.

with LoopbackHub() as hub:
    commit = hub.publish("org/model", {"config.json": b"{}"})
    hub.faults["model.safetensors"] = [Fault(bytes_sent=100)]    # the first answer breaks off
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from urllib.parse import unquote, urlsplit

LARGE = 1000
"""Bytes from which on a file is kept elsewhere, as the hub keeps weights, and reached by a redirect."""


@dataclass(frozen=True)
class Fault:
    """What is wrong with one answer."""

    status: int = 0
    headers: Mapping[str, str] = field(default_factory=dict)
    bytes_sent: int | None = None
    """The connection breaks off behind so many bytes of the body."""
    body: bytes | None = None
    """Sent in place of the right one."""
    ignores_range: bool = False
    waits: bool = False
    """Nothing is sent for as long as the hub runs."""


@dataclass(frozen=True)
class Asked:
    path: str
    headers: Mapping[str, str]


class LoopbackHub:
    def __init__(self) -> None:
        self.commits: dict[str, dict[str, dict[str, bytes]]] = {}
        """Name -> commit -> file -> its bytes."""
        self.refs: dict[str, dict[str, str]] = {}
        """Name -> branch or tag -> commit."""
        self.tokens: dict[str, set[str]] = {}
        """Name -> whom a gated model may be sent to."""
        self.sizes: dict[str, int] = {}
        """File -> the size that is listed instead of its own."""
        self.faults: dict[str, list[Fault]] = {}
        """File, or "api" -> what happens to the next answers, one after the other."""
        self.asked: list[Asked] = []
        self._closed = threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> LoopbackHub:
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Take it from the network, with the connections that clients keep."""
        self._closed.set()
        self._server.shutdown()
        self._server.server_close()

    @property
    def is_closed(self) -> bool:
        return self._closed.is_set()

    def wait_until_closed(self) -> None:
        self._closed.wait()

    def publish(self, name: str, files: Mapping[str, bytes], revision: str = "main") -> str:
        """Make these the files of a revision. Returns the commit."""
        digest = hashlib.sha1(repr(sorted(files.items())).encode(), usedforsecurity=False)
        commit = digest.hexdigest()
        self.commits.setdefault(name, {})[commit] = dict(files)
        self.refs.setdefault(name, {})[revision] = commit
        return commit

    def fetched(self) -> list[str]:
        """The files that were asked for, each as often as it was."""
        return [found[3] for each in self.asked if (found := _RESOLVE.fullmatch(each.path))]

    def info(self, name: str, commit: str) -> bytes:
        """What the hub says of a model."""
        files = [
            {"rfilename": file, "size": size, "blobId": oid, "lfs": lfs and {**lfs, "sha256": lfs["oid"]}}
            for file, size, oid, lfs in self._list(name, commit)
        ]
        return json.dumps({"id": name, "sha": commit, "siblings": files}).encode()

    def tree(self, name: str, commit: str) -> bytes:
        """The same, as the client's own download of a whole model asks for it."""
        files = [
            {"type": "file", "path": file, "size": size, "oid": oid, **({"lfs": lfs} if lfs else {})}
            for file, size, oid, lfs in self._list(name, commit)
        ]
        return json.dumps(files).encode()

    def _list(self, name: str, commit: str) -> Iterator[tuple[str, int, str, dict[str, object] | None]]:
        for file, content in self.commits[name][commit].items():
            size = self.sizes.get(file, len(content))
            lfs = {"oid": hashlib.sha256(content).hexdigest(), "size": size, "pointerSize": 130}
            yield file, size, _git_digest(content), lfs if len(content) >= LARGE else None


_API = re.compile(r"/api/models/([^/]+/[^/]+)/(revision|tree)/(.+)")
_RESOLVE = re.compile(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)")
_STORED = re.compile(r"/stored/([^/]+/[^/]+)/([^/]+)/(.+)")


def _git_digest(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def _handler(hub: LoopbackHub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            if hub.is_closed:
                self.close_connection = True
                return
            path = unquote(urlsplit(self.path).path)
            hub.asked.append(Asked(path, {key.lower(): value for key, value in self.headers.items()}))
            if found := _API.fullmatch(path):
                self._api(found[1], found[3], hub.info if found[2] == "revision" else hub.tree)
            elif found := _RESOLVE.fullmatch(path):
                self._resolve(found[1], found[2], found[3])
            elif found := _STORED.fullmatch(path):
                self._send(hub.commits[found[1]][found[2]][found[3]], self._fault(found[3]))
            else:
                self._refuse(404, "EntryNotFound")

        def _api(self, name: str, revision: str, answer: Callable[[str, str], bytes]) -> None:
            fault = self._fault("api")
            if fault.status:
                self._refuse(fault.status, "", fault.headers)
            elif name not in hub.commits:
                # As the real one tells somebody who may not know whether there is such a model.
                self._refuse(404 if self._token() else 401, "RepoNotFound" if self._token() else "")
            elif (commit := hub.refs[name].get(revision, revision)) not in hub.commits[name]:
                self._refuse(404, "RevisionNotFound")
            else:
                self._send(answer(name, commit), fault)

        def _resolve(self, name: str, commit: str, file: str) -> None:
            content = hub.commits[name][commit].get(file)
            if name in hub.tokens and self._token() not in hub.tokens[name]:
                self._refuse(403 if self._token() else 401, "GatedRepo")
            elif content is None:
                self._refuse(404, "EntryNotFound")
            elif len(content) >= LARGE:
                # Another host as far as clients can tell.
                place = f"{hub.endpoint.replace('127.0.0.1', 'localhost')}/stored/{name}/{commit}/{file}"
                digest = hashlib.sha256(content).hexdigest()
                linked = {"X-Linked-Etag": digest, "X-Linked-Size": str(len(content)), "X-Repo-Commit": commit}
                self._refuse(302, "", {"Location": place, **linked})
            else:
                self._send(content, self._fault(file), {"ETag": _git_digest(content), "X-Repo-Commit": commit})

        def _token(self) -> str:
            return self.headers.get("Authorization", "").removeprefix("Bearer ")

        def _fault(self, file: str) -> Fault:
            faults = hub.faults.get(file, [])
            return faults.pop(0) if faults else Fault()

        def _refuse(self, status: int, code: str, headers: Mapping[str, str] | None = None) -> None:
            self.send_response(status)
            for key, value in {"X-Error-Code": code, **(headers or {}), "Content-Length": "0"}.items():
                if value:
                    self.send_header(key, value)
            self.end_headers()

        def _send(self, content: bytes, fault: Fault, headers: Mapping[str, str] | None = None) -> None:
            if fault.waits:
                hub.wait_until_closed()
            if fault.status:
                self._refuse(fault.status, "", fault.headers)
                return
            content = content if fault.body is None else fault.body
            asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
            asked = None if fault.ignores_range else asked
            start, end = (int(asked[1]), int(asked[2] or len(content)) + 1) if asked else (0, len(content))
            if start and start >= len(content):
                self._refuse(416, "")
                return
            part = content[start:end]
            self.send_response(206 if asked else 200)
            if asked:
                self.send_header("Content-Range", f"bytes {start}-{start + len(part) - 1}/{len(content)}")
            for key, value in {**(headers or {}), "Content-Length": str(len(part))}.items():
                self.send_header(key, value)
            self.end_headers()
            if self.command == "HEAD":
                return
            self.wfile.write(part if fault.bytes_sent is None else part[: fault.bytes_sent])
            if fault.bytes_sent is not None:
                self.close_connection = True

        def log_message(self, *_: object) -> None:
            """Nothing."""

    return Handler
