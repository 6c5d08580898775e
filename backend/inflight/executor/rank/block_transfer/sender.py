"""Gives the blocks of prompts that this rank has computed to the ranks of other engines that ask for them.

A thread answers: in the launch's private folder, and, if a network interface is named, there too, encrypted and for
those alone who know the secret. On one machine it says where its memory is, and the other rank maps it; over the
network the bytes are sent. A prompt that nobody fetches in time is dropped.

    other rank                       this rank
       ── Fetch(key) ──────────────────>
       <── Shared(path) or Payload ─────     or Gone
       ── Taken(key) ──────────────────>     the memory is free
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from dataclasses import dataclass
from mmap import mmap
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import zmq

from inflight.distributed.sockets import KEEPALIVE, CurveKeys
from inflight.executor.wire.block_messages import (
    Endpoint,
    Fetch,
    FromSender,
    Gone,
    Payload,
    Shared,
    Taken,
    encode_block_message,
    to_sender,
)

if TYPE_CHECKING:
    from inflight.runtime.prompt_blocks import ExportedBlocks, PromptBlocks

logger = logging.getLogger(__name__)

LATE_SECONDS = 2.0
"""By how much the leader may have finished a prompt before this rank: blocks that are asked for may come until then."""
MAX_REQUEST_BYTES = 1024
LINGER_MS = 1000


@dataclass(frozen=True, slots=True)
class _Waiting:
    """Somebody who has asked for a prompt that is not there."""

    socket: zmq.Socket[bytes]
    identity: bytes
    fetch: Fetch
    until: float


class BlockSender:
    def __init__(
        self, blocks: PromptBlocks, path: Path, *, address: str, keys: CurveKeys, timeout_ms: int, is_alone: bool
    ) -> None:
        """`path`: of its socket for this machine. `address`: IPv4 address for others; empty = none. `timeout_ms`: after
        which a prompt is dropped. `is_alone`: its engine has no other ranks, so nobody can ask too early."""
        self._blocks = blocks
        self._timeout = timeout_ms / 1000
        self._patience = 0.0 if is_alone else LATE_SECONDS
        self._context = zmq.Context()
        self._path = path
        self._sockets = [self._make_socket()]
        previous = os.umask(0o177)
        try:
            self._sockets[0].bind(f"ipc://{path}")
        finally:
            os.umask(previous)
        self.endpoint = Endpoint(f"ipc://{path}", self._listen(address, keys) if address else "")
        self._waiting: list[_Waiting] = []
        self._is_closed = False
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        blocks.on_export = self._wake
        self._thread = threading.Thread(target=self._run, name="inflight-kv-sender", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._blocks.on_export = lambda: None
        self._is_closed = True
        self._wake()
        self._thread.join()
        os.close(self._wake_fd)
        self._path.unlink(missing_ok=True)

    def _make_socket(self) -> zmq.Socket[bytes]:
        made: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        made.set(zmq.MAXMSGSIZE, MAX_REQUEST_BYTES)
        made.set(zmq.LINGER, LINGER_MS)
        return made

    def _listen(self, address: str, keys: CurveKeys) -> str:
        """At a free port of this address. Returns the endpoint."""
        far = self._make_socket()
        for option, value in KEEPALIVE.items():
            far.set(option, value)
        keys.protect(far, is_leader=True)
        far.bind(f"tcp://{address}:*")
        self._sockets.append(far)
        return far.get_string(zmq.LAST_ENDPOINT).rstrip("\0")

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_write(self._wake_fd, 1)

    # -- the thread ----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        poller = zmq.Poller()
        for source in (*self._sockets, self._wake_fd):
            poller.register(source, zmq.POLLIN)
        while not self._is_closed:
            now = time.monotonic()
            due = [waiting.until for waiting in self._waiting]
            oldest = self._blocks.expire(now - self._timeout)
            if oldest is not None:
                due.append(oldest + self._timeout)
            poller.poll(max(int((min(due) - now) * 1000) + 1, 0) if due else None)
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._wake_fd)
            for socket in self._sockets:
                self._receive_all(socket)
            waiting, self._waiting = self._waiting, []
            for each in waiting:
                self._answer(each)
        for socket in self._sockets:
            socket.close()
        self._context.term()

    def _receive_all(self, socket: zmq.Socket[bytes]) -> None:
        while True:
            try:
                identity, *frames = socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                message = to_sender.decode(frames[-1])
            except (IndexError, msgspec.DecodeError, UnicodeDecodeError):
                logger.warning("dropped an invalid message of a rank that fetches blocks")
                continue
            if isinstance(message, Taken):
                self._blocks.discard(message.key)
            else:
                self._answer(_Waiting(socket, identity, message, time.monotonic() + self._patience))

    def _answer(self, asked: _Waiting) -> None:
        exported = self._blocks.exported(asked.fetch.key)
        if exported is None:
            if time.monotonic() < asked.until:
                self._waiting.append(asked)
            else:
                self._send(asked, Gone())
        elif asked.fetch.is_local:
            self._send(asked, _shared(exported))
        else:
            self._send(asked, Payload(), exported.memory)  # itself, which stays until the socket has sent it

    @staticmethod
    def _send(to: _Waiting, message: FromSender, *payload: mmap) -> None:
        frames: list[bytes | mmap] = [to.identity, encode_block_message(message), *payload]
        with contextlib.suppress(zmq.Again):  # to one that does not read its answers
            to.socket.send_multipart(frames, zmq.NOBLOCK, copy=False)


def _shared(exported: ExportedBlocks) -> Shared:
    path = f"/proc/{os.getpid()}/fd/{exported.descriptor}"
    return Shared(path, exported.device, exported.inode, exported.num_bytes)
