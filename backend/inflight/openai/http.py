"""HTTP/1.1 as uvicorn speaks it, with three things more: a bound on the length of a request's head, which httptools
does not have, a bound on the time until it has come, which uvicorn has only until its first byte, and a short way for
the chunks of a stream, of which there is one for each token."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 65_536
"""Of the request line and all headers."""

TOO_LONG = b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


WRITE_CHUNK = "inflight.write_chunk"
"""Key in the state of an ASGI scope: what writes chunks."""


def chunk_writer(scope: Scope) -> Callable[[bytes], None]:
    """Writes a piece of the body of a response that has started, has no announced length and is not complete. It never
    waits: what a slow client has not taken is kept, at most the text of its own answer."""
    writer: Callable[[bytes], None] = scope["state"][WRITE_CHUNK]
    return writer


CONNECTION = "inflight.connection"
"""The same of the connection itself, for streams that have no end of their own."""


def endless_stream(scope: Scope) -> BoundedHttp:
    """The connection of a response that has started, has no announced length and ends when either side closes it."""
    connection: BoundedHttp = scope["state"][CONNECTION]
    connection.is_endless = True
    return connection


class ChunkWriter:
    """Writes chunks of a body to a connection. All that a chunk needs of it is here: with hundreds of streams, each
    further object that a token touches has left the processor's caches since the last one."""

    __slots__ = ("_is_closing", "_write")

    def __init__(self, transport: asyncio.Transport) -> None:
        self._write = transport.write
        self._is_closing = transport.is_closing

    def write(self, body: bytes) -> None:
        if not self._is_closing():
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

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._chunks = ChunkWriter(transport)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_head_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._has_more_than_head = self._is_in_body
        super().data_received(data)
        self._num_head_bytes = 0 if self._has_more_than_head else self._num_head_bytes + len(data)
        if self._num_head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self.transport.write(TOO_LONG)
            self.transport.close()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["state"] |= {WRITE_CHUNK: self._chunks.write, CONNECTION: self}

    def on_headers_complete(self) -> None:
        self._is_in_body = self._has_more_than_head = True
        self._cancel_head_timer()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._is_in_body = False
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self.transport.is_closing():
            self._expect_head()

    def _expect_head(self) -> None:
        self._cancel_head_timer()
        self._head_timer = self.loop.call_later(self.timeout_keep_alive, self._close_if_idle)

    def _cancel_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()

    def _close_if_idle(self) -> None:
        # Of pipelined requests the last one's head has come: it is answered first.
        if self.cycle is None or self.cycle.response_complete:
            self.transport.close()

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

    def write_chunk(self, body: bytes) -> None:
        self._chunks.write(body)
