"""The engine's responses on their way to the HTTP requests that wait for them.

The front's thread wakes the event loop once for all responses of an iteration. There each goes to the mailbox of its
HTTP request. A stream that has begun writes what has come at once, without a task that would have to wake for it: a
token's way is `Dispatcher._give`, `TextStream.hear`, `ChunkWriter.write`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Sequence

from msgspec import structs

from inflight.executor.front.front import Front
from inflight.request import Request
from inflight.result import Response

Hear = Callable[[list[Response]], bytes]
"""Takes responses that have come at once, and returns the bytes that are to be written of them."""


class ClientGone(Exception):
    """The client has closed its connection: nobody reads the answer."""


class Mailbox:
    """The responses to the engine requests of one HTTP request. All but `send` on the event loop's thread."""

    __slots__ = ("_dispatcher", "_gone", "_is_abandoned", "_open", "_responses", "_waiting", "hear", "tenant", "write")

    def __init__(self, dispatcher: Dispatcher, tenant: int) -> None:
        """`tenant`: of the requests that it sends."""
        self._dispatcher = dispatcher
        self.tenant = tenant
        self._open: set[int] = set()
        """Ids of requests that the engine may still answer."""
        self._responses: list[Response] = []
        self._waiting: asyncio.Future[None] | None = None
        self._is_abandoned = False
        self.hear: Hear = self._keep
        """Called with all that has come at once."""
        self.write: Callable[[bytes], None] = _nowhere
        self._gone: Callable[[], None] | None = None

    def send(self, requests: Sequence[Request]) -> list[int]:
        """Send requests to the engine, all or none, and return their ids. On any thread. Raises InflightError."""
        return self._dispatcher.send(self, requests)

    async def take(self) -> list[Response]:
        """All that has come, at least one. Raises ClientGone."""
        while not self._responses:
            if self._is_abandoned:
                raise ClientGone
            self._waiting = asyncio.get_running_loop().create_future()
            await self._waiting
        taken, self._responses = self._responses, []
        return taken

    def listen(self, hear: Hear, write: Callable[[bytes], None], gone: Callable[[], None]) -> None:
        """From now on nobody takes: `hear` is called with all that has come at once, and what it returns is written
        unless it is empty; `gone` is called if the client closes its connection. None of them may raise."""
        self.hear, self.write, self._gone = hear, write, gone
        taken, self._responses = self._responses, []
        if taken and (chunk := hear(taken)):
            write(chunk)
        if self._is_abandoned:
            gone()

    def abandon(self) -> None:
        """The client has closed its connection."""
        self._is_abandoned = True
        self._wake()
        if self._gone is not None:
            self._gone()

    def close(self) -> None:
        """Cancel the requests that the engine has not answered to the end. Nothing is heard from now on, and whoever
        listened is no longer held, so that it ends at once and not with the next collection of garbage."""
        for request_id in list(self._open):
            self.cancel(request_id)
        self.hear, self.write, self._gone = _unheard, _nowhere, None

    def cancel(self, request_id: int) -> None:
        """What the engine still sends for this request is dropped."""
        self._open.discard(request_id)
        self._dispatcher.cancel(request_id)

    def opened(self, request_ids: Sequence[int]) -> None:
        self._open.update(request_ids)

    def ended(self, request_id: int) -> None:
        self._open.discard(request_id)

    def _keep(self, responses: list[Response]) -> bytes:
        self._responses += responses
        self._wake()
        return b""

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, None
        if waiting is not None and not waiting.done():
            waiting.set_result(None)


class Dispatcher:
    """The only reader of a front, or of those that follow each other when an engine is unloaded and loaded again."""

    def __init__(self, front: Front, loop: asyncio.AbstractEventLoop) -> None:
        self._front = front
        self._loop = loop
        self._mailboxes: dict[int, Mailbox] = {}
        """By request id."""
        self._arrived: deque[list[Response]] = deque()

    @property
    def front(self) -> Front:
        return self._front

    def start(self) -> None:
        self._front.listen(self._arrive)

    def follow(self, front: Front) -> None:
        """From now on requests go to this front. The last one has been shut down, so that it answers none any more."""
        self._front = front
        self.start()

    def send(self, mailbox: Mailbox, requests: Sequence[Request]) -> list[int]:
        """See Mailbox.send."""
        ids = [self._front.next_request_id() for _ in requests]
        numbered = [
            structs.replace(each, request_id=id_, tenant=mailbox.tenant)
            for each, id_ in zip(requests, ids, strict=True)
        ]
        # Before they are sent: an answer may come at once.
        mailbox.opened(ids)
        self._mailboxes.update(dict.fromkeys(ids, mailbox))
        try:
            self._front.enqueue_requests(numbered)
        except BaseException:
            for request_id in ids:
                mailbox.ended(request_id)
                self._mailboxes.pop(request_id, None)
            raise
        return ids

    def cancel(self, request_id: int) -> None:
        self._mailboxes.pop(request_id, None)
        self._front.cancel_request(request_id)

    def _arrive(self, responses: list[Response]) -> None:
        """On the front's thread."""
        self._arrived.append(responses)
        with contextlib.suppress(RuntimeError):  # the loop is closed, at the end
            self._loop.call_soon_threadsafe(self._give)

    def _give(self) -> None:
        """Give all that has arrived to whom it belongs, which leaves nothing to later calls."""
        mailboxes = self._mailboxes
        news: dict[Mailbox, list[Response]] = {}
        for _ in range(len(self._arrived)):
            for response in self._arrived.popleft():
                mailbox = mailboxes.get(response.request_id)
                if mailbox is None:
                    continue
                if response.is_final:
                    del mailboxes[response.request_id]
                    mailbox.ended(response.request_id)
                if mailbox in news:
                    news[mailbox].append(response)
                else:
                    news[mailbox] = [response]
        # All chunks first and then all system calls: between two of these the caches would have lost our code.
        chunks = [mailbox.hear(responses) for mailbox, responses in news.items()]
        for mailbox, chunk in zip(news, chunks, strict=True):
            if chunk:
                mailbox.write(chunk)


def _unheard(responses: list[Response]) -> bytes:
    """Of a mailbox that is closed."""
    return b""


def _nowhere(chunk: bytes) -> None:
    """Of a mailbox that nobody listens to."""
