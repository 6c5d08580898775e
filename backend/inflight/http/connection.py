"""HTTP/1.1 as uvicorn speaks it, with bounds and two repairs.

Bounds: connections at the same time, of all clients and of each address, the length of a request's head, which
httptools does not have, and the time until it has come, which uvicorn has only until its first byte. A request that
offers another protocol, as Java's client offers HTTP/2, is answered over HTTP/1.1 with its body, which httptools takes
for the other protocol. The chunks of a stream, of which there is one for each token, have a short way.
"""

from __future__ import annotations

import asyncio
import ipaddress
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import httptools
from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 65_536
"""Of the request line and all headers."""

HEAD_SECONDS = 10.0
"""Within which a head must be complete, from the connection on, or behind an answer from its first byte on."""

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
    most_of_address: int
    """Of them from one address."""
    of_address: Counter[str] = field(default_factory=Counter)
    """How many there are."""
    idle: dict[BoundedHttp, None] = field(default_factory=dict)
    """Those that wait for a head, the one that has waited longest first."""
    num_refused: int = 0
    """Those that are one too many, and are being told so."""


def bounded_http(max_connections: int, max_of_address: int) -> type[asyncio.Protocol]:
    """What uvicorn makes its connections with."""
    connections = Connections(max_connections, max_of_address)
    return cast(type[asyncio.Protocol], partial(BoundedHttp, all_connections=connections))


def address_of(peer: object) -> str:
    """What of a socket's peer counts as one client. Whoever has an IPv6 address usually has its 2^64 neighbours."""
    host = str(peer[0]) if isinstance(peer, tuple) and peer else ""
    if ":" not in host:
        return host
    address = ipaddress.IPv6Address(host.partition("%")[0])
    return str(address.ipv4_mapped or ipaddress.IPv6Network((address, 64), strict=False))


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
    _is_in_head = True
    """Whether a head has begun. The first one begins with the connection."""
    _head_timer: asyncio.TimerHandle | None = None
    """Closes the connection unless the next head begins within `timeout_keep_alive` after an answer, and unless one
    that has begun is complete within HEAD_SECONDS, whatever bytes come until then: each open connection takes one of
    the process's files. What is still to come of a body that was answered already has no longer than a head."""

    _is_offered = False
    """Whether the head that has come offers another protocol."""

    _is_refused = False
    """Whether it is one too many."""

    def __init__(self, *arguments: Any, all_connections: Connections, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._all = all_connections

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._address = address_of(transport.get_extra_info("peername"))
        own = self._all.of_address[self._address]
        if own >= self._all.most_of_address and not self._take_place(self._address):
            self._refuse(transport, f"{own} connections of {self._address} are in use, max_connections_per_address")
            return
        if len(self.connections) >= self._all.most and not self._take_place():
            self._refuse(transport, f"{len(self.connections)} connections are in use, max_connections")
            return
        super().connection_made(transport)
        self._all.of_address[self._address] += 1
        self._chunks = ChunkWriter(transport)
        self._expect_head()

    def _take_place(self, address: str | None = None) -> bool:
        """Of the connection, of this address if one is given, that has been idle longest. Returns whether there is
        one."""
        for each in list(self._all.idle):
            if address in (None, each._address):
                del self._all.idle[each]
                if each.close_if_idle():
                    each._leave()
                    return True
        return False

    def _leave(self) -> None:
        """Its place is free, even if it is not closed yet."""
        if self in self.connections:
            self.connections.discard(self)
            self._all.of_address[self._address] -= 1
            if not self._all.of_address[self._address]:
                del self._all.of_address[self._address]

    def _refuse(self, transport: asyncio.Transport, reason: str) -> None:
        """Whoever asks is told so: were the connection closed at once, its request would make it lose the answer."""
        self.logger.warning("%s: another is refused", reason)
        self.transport, self._is_refused = transport, True
        self._all.num_refused += 1
        transport.write(TOO_MANY)
        transport.write_eof()
        self.loop.call_later(REFUSED_SECONDS if self._all.num_refused <= MAX_REFUSED else 0, transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_head_timer()
        self._all.idle.pop(self, None)
        self._all.num_refused -= self._is_refused
        self._leave()
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
        if not self._is_in_head:
            self._is_in_head = True
            if self._head_timer is not None:
                self._start_head_timer()
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
        self._is_in_head = False
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
        self._start_head_timer()
        self._all.idle[self] = None

    def _start_head_timer(self) -> None:
        self._cancel_head_timer()
        has_begun = self._is_in_head or self._is_in_body
        seconds = HEAD_SECONDS if has_begun else self.timeout_keep_alive
        self._head_timer = self.loop.call_later(seconds, self.close_if_idle)

    def _cancel_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

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
