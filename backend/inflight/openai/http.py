"""HTTP/1.1 as uvicorn speaks it, with bounds and two repairs.

Bounds: connections at the same time, the length of a request's head, which httptools does not have, and the time until
it has come, which uvicorn has only until its first byte. A request that offers another protocol, as Java's client
offers HTTP/2, is answered over HTTP/1.1 with its body, which httptools takes for the other protocol. The chunks of a
stream, of which there is one for each token, have a short way.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import httptools
from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 65_536
"""Of the request line and all headers."""

MAX_PIPELINED = 16
"""Requests of one connection that wait for the answer to an earlier one. A read of 256 KiB may hold thousands, each of
which takes a hundred times its bytes."""

REFUSED_SECONDS = 1.0
"""That a client has to read that its connection is refused."""
MAX_REFUSED = 64
"""Connections that are told so at the same time; others are closed at once."""

TOO_MANY = b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 1\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
TOO_LONG = b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
WRONG = "Invalid HTTP request received."
OFFERS = (b"upgrade", b"http2-settings")
"""Headers of a request that offers another protocol, and their names in its header Connection."""

WRITE_CHUNK = "inflight.write_chunk"
"""Key in the state of an ASGI scope: what writes chunks."""


def chunk_writer(scope: Scope) -> Callable[[bytes], None]:
    """Writes a piece of the body of a response that has started, has no announced length and is not complete. It never
    waits: what a slow client has not taken is kept, at most the text of its own answer."""
    writer: Callable[[bytes], None] = scope["state"][WRITE_CHUNK]
    return writer


CONNECTION = "inflight.connection"
"""The same of the connection itself."""


def connection_of(scope: Scope) -> BoundedHttp:
    connection: BoundedHttp = scope["state"][CONNECTION]
    return connection


def endless_stream(scope: Scope) -> BoundedHttp:
    """The connection of a response that has started, has no announced length and ends when either side closes it."""
    connection = connection_of(scope)
    connection.is_endless = True
    return connection


@dataclass(slots=True)
class Connections:
    """What all connections of one server know of each other."""

    most: int
    """At the same time."""
    idle: dict[BoundedHttp, None] = field(default_factory=dict)
    """Those that wait for a head, the one that has waited longest first."""
    num_refused: int = 0
    """Those beyond `most` that are being told so."""


def bounded_http(max_connections: int) -> type[asyncio.Protocol]:
    """What uvicorn makes its connections with."""
    return cast(type[asyncio.Protocol], partial(BoundedHttp, all_connections=Connections(max_connections)))


class ChunkWriter:
    """Writes chunks of a body to a connection. All that a chunk needs of it is here: with hundreds of streams, each
    further object that a token touches has left the processor's caches since the last one."""

    __slots__ = ("_is_closing", "_write")

    def __init__(self, transport: asyncio.Transport) -> None:
        self._write = transport.write
        self._is_closing = transport.is_closing

    def write(self, body: bytes) -> None:
        # An empty chunk would be the end of the response.
        if body and not self._is_closing():
            self._write(b"%x\r\n%b\r\n" % (len(body), body))


class BoundedHttp(HttpToolsProtocol):
    """One connection."""

    is_endless = False
    """Whether its response ends only with the connection: nobody waits for it at the end."""

    _num_head_bytes = 0
    """Received of a head that is not complete."""
    _has_more_than_head = False
    """Whether the bytes that came last belong to a body, or end a head."""
    _is_in_body = False
    _head_timer: asyncio.TimerHandle | None = None
    """Closes the connection unless the next head is complete `timeout_keep_alive` after the connection was made or the
    last answer was sent, whatever bytes come until then: each open connection takes one of the process's files."""

    _is_offered = False
    """Whether the head that has come offers another protocol."""

    _is_refused = False
    """Whether it is one too many."""

    def __init__(self, *arguments: Any, all_connections: Connections, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._all = all_connections

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        if len(self.connections) >= self._all.most and not self._take_place():
            self._refuse(transport)
            return
        super().connection_made(transport)
        self._chunks = ChunkWriter(transport)
        self._expect_head()

    def _take_place(self) -> bool:
        """Of the connection that has been idle longest. Returns whether there is one."""
        idle = self._all.idle
        while idle:
            each = next(iter(idle))
            del idle[each]
            if each.close_if_idle():
                self.connections.discard(each)
                return True
        return False

    def _refuse(self, transport: asyncio.Transport) -> None:
        """Whoever asks is told so: were the connection closed at once, its request would make it lose the answer."""
        self.logger.warning("%d connections are in use, max_connections: another is refused", len(self.connections))
        self.transport, self._is_refused = transport, True
        self._all.num_refused += 1
        transport.write(TOO_MANY)
        transport.write_eof()
        self.loop.call_later(REFUSED_SECONDS if self._all.num_refused <= MAX_REFUSED else 0, transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_head_timer()
        self._all.idle.pop(self, None)
        self._all.num_refused -= self._is_refused
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        self._has_more_than_head = self._is_in_body
        self._unset_keepalive_if_required()
        try:
            self._feed(data)
        except httptools.HttpParserError:
            self.logger.warning(WRONG)
            self.send_400_response(WRONG)
            return
        self._num_head_bytes = 0 if self._has_more_than_head else self._num_head_bytes + len(data)
        if self._num_head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self.transport.write(TOO_LONG)
            self.transport.close()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["state"] |= {WRITE_CHUNK: self._chunks.write, CONNECTION: self}

    def _feed(self, data: bytes) -> None:
        """Parse what has come. Raises HttpParserError."""
        while True:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                # The parser has left out the body. The request is read again, as one that offers nothing.
                if not self._is_offered:
                    raise httptools.HttpParserError from None
                data = self._head_without_offer() + data[upgrade.args[0] :]

    def _head_without_offer(self) -> bytes:
        parser = self.parser
        lines = [b"%b %b HTTP/%b" % (parser.get_method(), self.url, parser.get_http_version().encode())]
        for name, value in self.headers:
            if name == b"connection":
                value = b", ".join(part for part in map(bytes.strip, value.split(b",")) if part.lower() not in OFFERS)
                if not value:
                    continue
            if name not in OFFERS:
                lines.append(b"%b: %b" % (name, value))
        self._is_offered = False
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
        return b"\r\n".join([*lines, b"", b""])

    def on_headers_complete(self) -> None:
        # Where no other protocol is offered, this is a tunnel.
        self._is_offered = self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT"
        if self._is_offered:
            return
        if len(self.pipeline) >= MAX_PIPELINED:
            raise httptools.HttpParserError("too many pipelined requests")
        self._is_in_body = self._has_more_than_head = True
        self._cancel_head_timer()
        self._all.idle.pop(self, None)
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        if self._is_offered:
            return
        self._is_in_body = False
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self.transport.is_closing():
            self._expect_head()

    def _expect_head(self) -> None:
        self._cancel_head_timer()
        self._head_timer = self.loop.call_later(self.timeout_keep_alive, self.close_if_idle)
        self._all.idle[self] = None

    def _cancel_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()

    def close_if_idle(self) -> bool:
        """Returns whether it was."""
        # Of pipelined requests the last one's head has come: it is answered first.
        is_idle = self.cycle is None or self.cycle.response_complete
        if is_idle:
            self.transport.close()
        return is_idle

    def shutdown(self) -> None:
        if self.is_endless:
            self.transport.close()
        super().shutdown()

    @property
    def num_unsent_bytes(self) -> int:
        """Written, and not taken by the client."""
        return self.transport.get_write_buffer_size()

    def abort(self) -> None:
        """Close the connection at once; what was not sent is lost."""
        self.transport.abort()

    @property
    def is_closing(self) -> bool:
        """Whether nothing can be sent any more; uvicorn itself is told a moment later."""
        return bool(self.transport.is_closing())

    def write_chunk(self, body: bytes) -> None:
        self._chunks.write(body)
