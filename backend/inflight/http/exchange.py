"""One request of a connection and its answer, as ASGI has them."""

from __future__ import annotations

import asyncio
import re
import time
from email.utils import formatdate
from functools import lru_cache
from http import HTTPStatus
from typing import Protocol

from starlette.types import Message, Scope

MAX_UNTAKEN_BYTES = 65_536
"""Of a body that came, and that nobody has asked for yet: then no more is read."""

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_NOT_IN_A_HEADER = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")


class Line(Protocol):
    """The connection, as far as one exchange knows it."""

    def write(self, data: bytes) -> None: ...

    async def wait_until_writable(self) -> None:
        """While the client has not taken what was written. Returns at once when it is gone."""

    def take_more(self) -> None:
        """Somebody waits for the body."""

    def answered(self, exchange: Exchange) -> None:
        """The answer is written."""


class Exchange:
    """A body that comes in pieces, and an answer whose body has an announced length, comes in chunks or, for a client
    of HTTP/1.0, ends with the connection."""

    def __init__(self, line: Line, scope: Scope, *, keeps_alive: bool, must_continue: bool) -> None:
        """`keeps_alive`: whether the connection stays behind the answer. `must_continue`: whether the client sends its
        body only once it is asked to."""
        self.scope = scope
        self.keeps_alive = keeps_alive
        self.has_started = self.is_complete = self.is_gone = False
        self.is_chunked = False
        """Whether the answer's body comes in chunks."""
        self._line = line
        self._must_continue = must_continue
        self._body = bytearray()
        self._is_body_whole = False
        self._news = asyncio.Event()

    @property
    def has_room(self) -> bool:
        """Whether more of the body may come."""
        return len(self._body) <= MAX_UNTAKEN_BYTES

    def add_body(self, data: bytes) -> None:
        if not self.is_complete:
            self._body += data
            self._news.set()

    def end_body(self) -> None:
        self._is_body_whole = True
        self._news.set()

    def lose(self) -> None:
        """The client has closed the connection."""
        self.is_gone = True
        self._news.set()

    async def receive(self) -> Message:
        if self._must_continue and not self.has_started:
            self._must_continue = False
            self._line.write(CONTINUE)
        if not self.is_gone and not self.is_complete:
            self._line.take_more()
            await self._news.wait()
            self._news.clear()
        if self.is_gone or self.is_complete:
            return {"type": "http.disconnect"}
        body, self._body = bytes(self._body), bytearray()
        return {"type": "http.request", "body": body, "more_body": not self._is_body_whole}

    async def send(self, message: Message) -> None:
        await self._line.wait_until_writable()
        if self.is_gone:
            return
        if message["type"] == "http.response.start" and not self.has_started:
            self._line.write(self._head(message["status"], message["headers"]))
        elif message["type"] == "http.response.body" and self.has_started and not self.is_complete:
            self._send_body(message.get("body", b""), is_last=not message.get("more_body", False))
        else:
            raise RuntimeError(f"{message['type']} comes out of turn")

    def _head(self, status: int, headers: list[tuple[bytes, bytes]]) -> bytes:
        """Raises RuntimeError."""
        lines = [_status_line(status), _date_line(int(time.time()))]
        has_length = False
        for name, value in headers:
            if _NOT_IN_A_HEADER.search(name + value):
                raise RuntimeError("a header of the answer has a character that ends it")
            has_length = has_length or name == b"content-length"
            lines.append(name + b": " + value)
        if not has_length and self.scope["method"] != "HEAD":
            self.is_chunked = self.scope["http_version"] == "1.1"
            self.keeps_alive = self.keeps_alive and self.is_chunked
            if self.is_chunked:
                lines.append(b"transfer-encoding: chunked")
        if not self.keeps_alive:
            lines.append(b"connection: close")
        self.has_started = True
        return b"\r\n".join([*lines, b"", b""])

    def _send_body(self, body: bytes, *, is_last: bool) -> None:
        if self.scope["method"] == "HEAD":
            body = b""
        elif self.is_chunked:
            body = (chunk(body) if body else b"") + (b"0\r\n\r\n" if is_last else b"")
        if body:
            self._line.write(body)
        if is_last:
            self.is_complete = True
            self._news.set()
            self._line.answered(self)


def chunk(body: bytes) -> bytes:
    """`body` has at least one byte: an empty chunk would be the end of the answer."""
    return b"%x\r\n%b\r\n" % (len(body), body)


@lru_cache(64)
def _status_line(status: int) -> bytes:
    known = status in HTTPStatus._value2member_map_
    return f"HTTP/1.1 {status} {HTTPStatus(status).phrase if known else ''}".encode()


@lru_cache(1)
def _date_line(seconds: int) -> bytes:
    return b"date: " + formatdate(seconds, usegmt=True).encode()
