"""HTTP/1.1 on one connection: httptools (llhttp, Node.js' parser) reads, an `Exchange` answers.

What the parser leaves to its users is bounded here: the length of a head and of a body's trailers, the number of their
fields, the time until a head has come, the requests that wait for an answer. A request that offers another protocol,
as Java's client offers HTTP/2, is answered over HTTP/1.1 with its body, which the parser takes for the other protocol.
"""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections import deque
from typing import NoReturn, cast
from urllib.parse import unquote

import httptools
from starlette.types import ASGIApp, Scope

from inflight.http.chunks import WRITE_CHUNK, ChunkWriter, chunk_writer
from inflight.http.connections import Connections, address_of
from inflight.http.exchange import Exchange

logger = logging.getLogger(__name__)

MAX_HEAD_BYTES = 65_536
"""Of the request line and all headers; the same of what a body has beside its bytes, until the next of these."""
MAX_FIELDS = 256
"""Headers of a request, and trailers. Each takes thirty times its bytes."""

HEAD_SECONDS = 10.0
"""Within which a head must be complete, from the connection on, or behind an answer from its first byte on."""
KEEP_ALIVE_SECONDS = 75.0
"""Behind an answer, until the next head begins."""

MAX_PIPELINED = 16
"""Requests of one connection that wait for the answer to an earlier one. A read of 256 KiB may hold thousands, each of
which takes a hundred times its bytes."""

REFUSED_SECONDS = 1.0
"""That a client has to read that its connection, or what it sent, is refused."""


def _refusal(status: bytes, *, more: bytes = b"", why: bytes = b"") -> bytes:
    body = b"content-type: text/plain; charset=utf-8\r\ncontent-length: %d\r\n\r\n%b" % (len(why), why)
    return b"HTTP/1.1 %b\r\n%bconnection: close\r\n%b" % (status, more, body)


TOO_MANY = _refusal(b"503 Service Unavailable", more=b"retry-after: 1\r\n")
TOO_LONG = _refusal(b"431 Request Header Fields Too Large")
WRONG = _refusal(b"400 Bad Request", why=b"Invalid HTTP request received.")
FAILED = _refusal(b"500 Internal Server Error")
OFFERS = (b"upgrade", b"http2-settings")
"""Headers of a request that offers another protocol, and their names in its header Connection."""

CONNECTION = "inflight.connection"
"""Key in the state of an ASGI scope: its connection."""


def endless_stream(scope: Scope) -> Connection:
    """The connection of a response that has started, has no announced length and ends when either side closes it."""
    connection: Connection = scope["state"][CONNECTION]
    connection.is_endless = True
    return connection


class Connection(asyncio.Protocol):
    """Answers the requests of one connection, one after the other."""

    is_endless = False
    """Whether its response ends only with the connection: nobody waits for it at the end."""

    address = ""
    """See `address_of`."""

    def __init__(self, app: ASGIApp, connections: Connections, tasks: set[asyncio.Task[None]]) -> None:
        """`tasks`: those that answer on any connection, for whoever ends them."""
        self._app, self._all, self._tasks = app, connections, tasks
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport
        self._parser = httptools.HttpRequestParser(self)
        self._url, self._must_continue = b"", False
        self._fields: list[tuple[bytes, bytes]] = []
        """Of the head that comes; behind it, a body's trailers, which nobody reads."""
        self._num_head_bytes = 0
        """Received since a head began, or since the last bytes of a body."""
        self._is_in_head = True
        """Whether a head has begun. The first one begins with the connection."""
        self._is_offered = False
        """Whether the head that has come offers another protocol."""
        self._arriving: Exchange | None = None
        """Whose body comes."""
        self._current: Exchange | None = None
        """Which is being answered."""
        self._waiting: deque[Exchange] = deque()
        """For the answer to an earlier one."""
        self._is_deaf = False
        """Whether nothing is read any more: the last request has come, or what is none."""
        self._refusal = WRONG
        """Of what is no request."""
        self._must_refuse = False
        """Whether that has come, behind requests that are answered first."""
        self._is_reading_paused = False
        self._writable = asyncio.Event()
        self._writable.set()
        self._head_timer: asyncio.TimerHandle | None = None
        """Closes the connection unless the next head begins within KEEP_ALIVE_SECONDS behind an answer, and unless one
        that has begun is complete within HEAD_SECONDS, whatever bytes come until then: each open connection takes one
        of the process's files. What is still to come of a body that was answered already has no longer than a head."""

    # The transport's callbacks.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self.address = address_of(transport.get_extra_info("peername"))
        self._chunks = ChunkWriter(self._transport)
        if reason := self._all.admit(self):
            logger.warning("%s: another is refused", reason)
            self._turn_away(TOO_MANY)
        else:
            self._expect_head()

    def _turn_away(self, refusal: bytes) -> None:
        """What still comes is taken and not read: were the connection closed at once, that would make the client lose
        the answer."""
        self._is_deaf = True
        self._transport.write(refusal)
        self._transport.write_eof()
        self._loop.call_later(REFUSED_SECONDS if self._all.turn_away(self) else 0, self._transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_deaf = True
        self._cancel_head_timer()
        self._all.remove(self)
        for each in filter(None, (self._current, *self._waiting)):
            each.lose()
        self._waiting.clear()
        self._writable.set()

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def data_received(self, data: bytes) -> None:
        if self._is_deaf:
            return
        self._num_head_bytes += len(data)
        try:
            self._feed(data)
        except httptools.HttpParserError:
            if not self._is_deaf:  # else these are bytes behind the last request
                self._give_up()
            return
        if self._num_head_bytes > MAX_HEAD_BYTES:
            self._refusal = TOO_LONG
            self._give_up()

    def _feed(self, data: bytes) -> None:
        """Parse what has come. Raises HttpParserError."""
        while True:
            try:
                self._parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                # The parser has left out the body. The request is read again, as one that offers nothing.
                data = self._head_without_offer() + data[upgrade.args[0] :]

    def _give_up(self) -> None:
        """What comes is no request. Those before it are answered first."""
        self._is_deaf = True
        logger.warning("a connection is closed: %s", self._refusal.partition(b"\r")[0].decode())
        arriving, self._arriving = self._arriving, None
        if arriving is not None:
            arriving.lose()
            if arriving is self._current:
                self._current = None
            elif arriving in self._waiting:
                self._waiting.remove(arriving)
        if self._current is not None:
            self._must_refuse = True
            return
        if arriving is None or not arriving.has_started:
            self._turn_away(self._refusal)
        else:
            self._transport.close()

    # The parser's callbacks. What they raise, feed_data raises as HttpParserError.

    def on_message_begin(self) -> None:
        self._url, self._must_continue, self._fields = b"", False, []
        if not self._is_in_head:
            self._is_in_head = True
            if self._head_timer is not None:
                self._start_head_timer()

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if len(self._fields) >= MAX_FIELDS:
            self._refuse(TOO_LONG)
        name = name.lower()
        if name == b"expect" and value.lower() == b"100-continue":
            self._must_continue = True
        self._fields.append((name, value))

    def on_headers_complete(self) -> None:
        if len(self._url) + sum(len(name) + len(value) for name, value in self._fields) > MAX_HEAD_BYTES:
            self._refuse(TOO_LONG)
        method, version = self._parser.get_method(), self._parser.get_http_version()
        if method == b"CONNECT" or version not in ("1.0", "1.1") or len(self._waiting) >= MAX_PIPELINED:
            self._refuse(WRONG)
        self._is_offered = self._parser.should_upgrade()
        if self._is_offered:
            return
        is_chunkless = version == "1.0"
        if is_chunkless and any(name == b"transfer-encoding" for name, _ in self._fields):
            self._refuse(WRONG)  # HTTP/1.0 has none, so a proxy may have seen another end of this request
        exchange = Exchange(
            self,
            self._scope(method.decode(), version),
            keeps_alive=not is_chunkless and self._parser.should_keep_alive(),
            must_continue=self._must_continue and not is_chunkless,
        )
        self._num_head_bytes, self._fields, self._is_in_head = 0, [], False
        self._cancel_head_timer()
        self._all.set_busy(self)
        self._arriving = exchange
        if self._current is None:
            self._begin(exchange)
        else:
            self._waiting.append(exchange)

    def on_body(self, body: bytes) -> None:
        self._num_head_bytes = 0
        if self._arriving is not None:
            self._arriving.add_body(body)
            self._regulate()

    def on_message_complete(self) -> None:
        if self._arriving is None or self._is_offered:
            return
        self._arriving.end_body()
        self._is_deaf = not self._arriving.keeps_alive
        self._arriving = None

    def _refuse(self, refusal: bytes) -> NoReturn:
        """Raises HttpParserError."""
        self._refusal = refusal
        raise httptools.HttpParserError

    def _scope(self, method: str, version: str) -> Scope:
        """Raises HttpParserError."""
        url = httptools.parse_url(self._url)
        if url.path is None:  # http://host
            self._refuse(WRONG)
        path = url.path.decode("ascii")
        writer = self._chunks.write if version == "1.1" else self._chunks.write_plain
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": version,
            "server": self._transport.get_extra_info("sockname"),
            "client": self._transport.get_extra_info("peername"),
            "scheme": "http",
            "method": method,
            "root_path": "",
            "path": unquote(path) if "%" in path else path,
            "raw_path": url.path,
            "query_string": url.query or b"",
            "headers": self._fields,
            "state": {WRITE_CHUNK: writer, CONNECTION: self},
        }

    def _head_without_offer(self) -> bytes:
        parser = self._parser
        lines = [b"%b %b HTTP/%b" % (parser.get_method(), self._url, parser.get_http_version().encode())]
        for name, value in self._fields:
            if name == b"connection":
                value = b", ".join(part for part in map(bytes.strip, value.split(b",")) if part.lower() not in OFFERS)
                if not value:
                    continue
            if name not in OFFERS:
                lines.append(b"%b: %b" % (name, value))
        self._is_offered = False
        self._parser = httptools.HttpRequestParser(self)
        return b"\r\n".join([*lines, b"", b""])

    # What an exchange asks of its connection.

    def write(self, data: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.write(data)

    async def wait_until_writable(self) -> None:
        if not self._writable.is_set():
            await self._writable.wait()

    def take_more(self) -> None:
        self._regulate()

    def answered(self, exchange: Exchange) -> None:
        self._current = None
        if self._transport.is_closing():
            return
        if not exchange.keeps_alive:
            self._transport.close()
        elif self._waiting:
            self._begin(self._waiting.popleft())
        elif self._must_refuse:
            self._turn_away(self._refusal)
        else:
            self._expect_head()
        self._regulate()

    def _begin(self, exchange: Exchange) -> None:
        self._current = exchange
        task = self._loop.create_task(self._answer(exchange))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, exchange: Exchange) -> None:
        try:
            await self._app(exchange.scope, exchange.receive, exchange.send)
        except Exception as error:
            # Not its text, which may quote a prompt.
            places = "".join(traceback.format_tb(error.__traceback__))
            logger.error("answering a request failed: %s\n%s", type(error).__name__, places)
            if not exchange.has_started:
                self.write(FAILED)
        finally:
            if self._current is exchange:  # there is no whole answer
                self._transport.close()

    def _regulate(self) -> None:
        """Read no more while the client has sent more than may wait."""
        newest = self._waiting[-1] if self._waiting else self._current
        is_full = len(self._waiting) >= MAX_PIPELINED or (newest is not None and not newest.has_room)
        if is_full == self._is_reading_paused or self._transport.is_closing():
            return
        self._is_reading_paused = is_full
        if is_full:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()

    # Time.

    def _expect_head(self) -> None:
        self._start_head_timer()
        self._all.set_idle(self)

    def _start_head_timer(self) -> None:
        self._cancel_head_timer()
        has_begun = self._is_in_head or self._arriving is not None
        self._head_timer = self._loop.call_later(HEAD_SECONDS if has_begun else KEEP_ALIVE_SECONDS, self.close_if_idle)

    def _cancel_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def close_if_idle(self) -> bool:
        """Returns whether it was."""
        is_idle = self._current is None
        if is_idle:
            self._transport.close()
        return is_idle

    def shut_down(self) -> None:
        """What was asked is answered, and then the connection is closed."""
        if self._current is None or self.is_endless:
            self._transport.close()
        else:
            (self._waiting[-1] if self._waiting else self._current).keeps_alive = False

    # What streams ask of theirs.

    @property
    def num_unsent_bytes(self) -> int:
        """Written, and not taken by the client."""
        return self._transport.get_write_buffer_size()

    def abort(self) -> None:
        """Close the connection at once; what was not sent is lost."""
        self._transport.abort()

    def write_chunk(self, body: bytes) -> None:
        """See chunk_writer: of the response in progress."""
        if self._current is not None:
            chunk_writer(self._current.scope)(body)
