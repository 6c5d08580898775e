"""Serves an ASGI application on a socket, and ends without breaking off what it answers."""

from __future__ import annotations

import asyncio
import logging
import socket

from starlette.types import ASGIApp

from inflight.http.connection import Connection
from inflight.http.connections import Connections

logger = logging.getLogger(__name__)

BACKLOG = 2048
LAST_SECONDS = 1.0
"""That answers have to tell their clients that they were cancelled."""


class HttpServer:
    """Used on the event loop's thread."""

    def __init__(self, app: ASGIApp, *, max_connections: int, max_connections_per_address: int) -> None:
        self._app = app
        self._connections = Connections(max_connections, max_connections_per_address)
        self._tasks: set[asyncio.Task[None]] = set()

    async def listen(self, listener: socket.socket) -> None:
        """From now on connections are taken."""
        self._server = await asyncio.get_running_loop().create_server(
            lambda: Connection(self._app, self._connections, self._tasks), sock=listener, backlog=BACKLOG
        )

    async def drain(self, seconds: float, hurry: asyncio.Event) -> None:
        """Take no more, answer what was asked, for so long at most or until `hurry` is set, and cancel the rest."""
        self._server.close()
        for connection in self._connections:
            connection.shut_down()
        waits = [asyncio.ensure_future(each) for each in (self._wait_until_idle(), hurry.wait())]
        await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        if self._tasks:
            logger.warning("%d requests are cancelled: the server ends", len(self._tasks))
            for task in self._tasks:
                task.cancel()
            await asyncio.wait(list(self._tasks), timeout=LAST_SECONDS)

    async def _wait_until_idle(self) -> None:
        await self._connections.wait_until_gone()
        while self._tasks:  # of clients that are gone
            await asyncio.wait(list(self._tasks))
