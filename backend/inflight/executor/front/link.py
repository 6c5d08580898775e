"""A front's socket to the leader of one launch. Knows the messages, but not the state of requests.

Each launch gets a new link, so that no message of dead ranks can arrive later. To be used from one thread.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import zmq

from inflight.executor.wire.messages import BadMessage, FromFront, FromLeader, Hello, decode_frames, encode

logger = logging.getLogger(__name__)

RECONNECT_MS = 20
"""Interval of connection attempts, in milliseconds, until the leader has bound its socket."""


class EngineLink:
    """Connects in the background; a Hello is the first message that the leader receives."""

    def __init__(self, path: Path, hello: Hello) -> None:
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.SNDHWM, 0)
        self.socket.setsockopt(zmq.RCVHWM, 0)
        self.socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        self.socket.connect(f"ipc://{path}")
        self.send(hello)

    def send(self, message: FromFront) -> None:
        self.send_encoded(encode(message))

    def send_encoded(self, frame: bytes) -> None:
        """Never waits: the send queue is unbounded."""
        self.socket.send(frame, zmq.NOBLOCK)

    def receive_all(self) -> Iterator[FromLeader]:
        """Every message that has arrived; invalid ones are logged and skipped."""
        while True:
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                yield decode_frames(frames)
            except BadMessage as error:
                logger.warning("the leader sent %s", error)

    def close(self, linger_ms: int = 0) -> None:
        self.socket.close(linger=linger_ms)
        self._context.term()
