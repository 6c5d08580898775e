"""Checks and chooses TCP ports."""

from __future__ import annotations

import contextlib
import errno
import socket
from collections.abc import Mapping

from inflight.errors import ConfigurationError
from inflight.free_port import bind_free_port

OPTION = "--{}-port"
"""The command's option for the port of a purpose."""


class PortTaken(ConfigurationError):
    """Somebody listens there already."""

    def __init__(self, purpose: str, address: str, port: int, option: str = OPTION) -> None:
        self.port = port
        self.listener = f"{purpose} port {port} on {address}"
        self.other_port = f"choose another with {option.format(purpose.lower())}"
        super().__init__(f"{self.listener} is taken: stop the program that listens there, or {self.other_port}")


def claim(wanted: Mapping[str, tuple[str, int]], option: str = OPTION) -> dict[str, int]:
    """Check the wanted ports (purpose -> address, port) and choose a free one for each port 0. Returns the port of each
    purpose. `option`: see OPTION.

    All are free, and different, when this returns. Raises ConfigurationError, which names the first that is not free.
    """
    with contextlib.ExitStack() as held:
        return {purpose: _bind(held, purpose, address, port, option) for purpose, (address, port) in wanted.items()}


def _bind(held: contextlib.ExitStack, purpose: str, address: str, port: int, option: str) -> int:
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    except (socket.gaierror, OverflowError) as error:
        raise ConfigurationError(f"{purpose}: {address}:{port} is not an address to listen on ({error})") from None
    listener = held.enter_context(socket.socket(family, kind, protocol))
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        if port:
            listener.bind(where)
        else:
            bind_free_port(listener, where)
        listener.listen()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise PortTaken(purpose, address, port, option) from None
        raise ConfigurationError(_refusal(purpose, address, port, option, error)) from None
    bound: int = listener.getsockname()[1]
    return bound


def _refusal(purpose: str, address: str, port: int, option: str, error: OSError) -> str:
    if error.errno == errno.EACCES:
        chosen = option.format(purpose.lower())
        return f"{purpose} port {port} on {address} needs root: choose one above 1023 with {chosen}"
    return f"{purpose} port {port} on {address} cannot be listened on: {error.strerror}"
