"""The engine's responses on their way to the HTTP requests that wait for them.

One thread takes responses from the front, all that have come at once, and hands them to the event loop in one call.
There each goes to the mailbox of its HTTP request. A stream that has begun writes what has come at once, without a task
that would have to wake for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Sequence

from msgspec import structs

from inflight.executor.front.front import Front
from inflight.request import Request
from inflight.result import Response

logger = logging.getLogger(__name__)

WAIT_SECONDS = 1.0


class ClientGone(Exception):
    """The client has closed its connection: nobody reads the answer."""


class Mailbox:
    """The responses to the engine requests of one HTTP request. All but `send` on the event loop's thread."""

    def __init__(self, dispatcher: Dispatcher, tenant: int) -> None:
        """`tenant`: of the requests that it sends."""
        self._dispatcher = dispatcher
        self.tenant = tenant
        self._open: set[int] = set()
        """Ids of requests that the engine may still answer."""
        self._responses: list[Response] = []
        self._waiting: asyncio.Future[None] | None = None
        self._is_abandoned = False
        self._hear: Callable[[list[Response]], bytes] | None = None
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

    def listen(
        self, hear: Callable[[list[Response]], bytes], write: Callable[[bytes], None], gone: Callable[[], None]
    ) -> None:
        """From now on nobody takes: `hear` is called with all that has come at once, and what it returns is written
        unless it is empty; `gone` is called if the client closes its connection. None of them may raise."""
        self._hear, self.write, self._gone = hear, write, gone
        if self._responses and (chunk := self.flush()):
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
        """Cancel the requests that the engine has not answered to the end."""
        for request_id in list(self._open):
            self.cancel(request_id)

    def cancel(self, request_id: int) -> None:
        """What the engine still sends for this request is dropped."""
        self._open.discard(request_id)
        self._dispatcher.cancel(request_id)

    def put(self, response: Response) -> bool:
        """Whether it is the first that nobody has got: `flush` is due once all others of its batch are here."""
        self._responses.append(response)
        return len(self._responses) == 1

    def flush(self) -> bytes:
        """Hand on what has come. Returns what is to be written of it."""
        if self._hear is None:
            self._wake()
            return b""
        taken, self._responses = self._responses, []
        return self._hear(taken)

    def opened(self, request_ids: Sequence[int]) -> None:
        self._open.update(request_ids)

    def ended(self, request_id: int) -> None:
        self._open.discard(request_id)

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, None
        if waiting is not None and not waiting.done():
            waiting.set_result(None)


class Dispatcher:
    """The only reader of a front."""

    def __init__(self, front: Front, loop: asyncio.AbstractEventLoop) -> None:
        self._front = front
        self._loop = loop
        self._mailboxes: dict[int, Mailbox] = {}
        """By request id."""
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="inflight-dispatch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def stop(self) -> None:
        """After the front was shut down."""
        self._stopping.set()
        self._thread.join()

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

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                responses = self._front.await_responses(timeout=WAIT_SECONDS)
            except Exception:
                logger.exception("taking responses failed")
                return
            if responses:
                with contextlib.suppress(RuntimeError):  # the loop is closed, at the end
                    self._loop.call_soon_threadsafe(self._give, responses)
            elif not self._front.can_enqueue_requests():
                self._stopping.wait(WAIT_SECONDS)

    def _give(self, responses: list[Response]) -> None:
        mailboxes, due = self._mailboxes, []
        for response in responses:
            request_id = response.request_id
            mailbox = mailboxes.get(request_id)
            if mailbox is None:
                continue
            if response.is_final:
                del mailboxes[request_id]
                mailbox.ended(request_id)
            if mailbox.put(response):
                due.append(mailbox)
        # All chunks first and then all system calls: between two of these the caches would have lost our code.
        chunks = [mailbox.flush() for mailbox in due]
        for mailbox, chunk in zip(due, chunks, strict=True):
            if chunk:
                mailbox.write(chunk)


def _nowhere(chunk: bytes) -> None:
    """Of a mailbox that nobody listens to."""
