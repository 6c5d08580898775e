"""The short way of a stream's chunks, of which there is one for each token: from whoever makes them to the socket."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from starlette.types import Scope

WRITE_CHUNK = "inflight.write_chunk"
"""Key in the state of an ASGI scope: what writes chunks."""


def chunk_writer(scope: Scope) -> Callable[[bytes], None]:
    """Writes a piece of the body of a response that has started, has no announced length and is not complete. It never
    waits: what a slow client has not taken is kept, at most the text of its own answer."""
    writer: Callable[[bytes], None] = scope["state"][WRITE_CHUNK]
    return writer


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

    def write_plain(self, body: bytes) -> None:
        """For a client of HTTP/1.0, whose answer ends with the connection."""
        if not self._is_closing():
            self._write(body)
