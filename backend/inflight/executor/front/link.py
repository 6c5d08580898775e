"""A front's socket to the leader of one launch. Knows the messages, and nothing of what becomes of requests.

A link is never used for another launch, so nothing of a dead engine can be heard later. For one thread.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import zmq

from inflight.executor.wire.messages import BadMessage, FromFront, FromLeader, Hello, decode_from_leader, encode

logger = logging.getLogger(__name__)

RECONNECT_MS = 20
"""Until the leader has bound its socket."""


class EngineLink:
    """Connects, and says Hello as soon as somebody listens."""

    def __init__(self, path: Path, front_id: int) -> None:
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.SNDHWM, 0)
        self.socket.setsockopt(zmq.RCVHWM, 0)
        self.socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        self.socket.connect(f"ipc://{path}")
        self.send(Hello(front_id=front_id, pid=os.getpid()))

    def send(self, message: FromFront) -> None:
        self.send_encoded(encode(message))

    def send_encoded(self, frame: bytes) -> None:
        """Never waits: there is no bound on what may be under way."""
        self.socket.send(frame, zmq.NOBLOCK)

    def receive_all(self) -> Iterator[FromLeader]:
        """Every message that has come."""
        while True:
            try:
                frame = self.socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                yield decode_from_leader(frame)
            except BadMessage as error:
                logger.warning("the leader sent %s", error)

    def close(self, linger_ms: int = 0) -> None:
        self.socket.close(linger=linger_ms)
        self._context.term()
