"""`python -m inflight.executor.rank.fork_server FD`: the process that a front's ranks are forked from.

It has imported what ranks import, torch above all, which takes a second of a core, and has done nothing with it: ranks
that are forked begin behind their imports and share those pages. It has one thread, no device and no library of the
engine's own, which would not survive a fork. It ends with its front, and its ranks with it. See `wire.forks` for what
it is told over the socket FD.
"""

from __future__ import annotations

import gc
import importlib
import os
import socket
import sys
import tempfile

from inflight.executor.rank.own_image import become
from inflight.executor.wire.forks import (
    MAX_MESSAGE_BYTES,
    ROOM,
    CannotFork,
    Ended,
    Fork,
    Forked,
    FromServer,
    Ready,
    decode_to_server,
    encode,
)
from inflight.parent_watch import die_with_parent
from inflight.python_command import WORKER

IMPORTED = (
    "inflight.executor.rank.worker",
    "inflight.runtime.loading",
    "inflight.runtime.model_runner",
    "inflight.models.decoder_loading",
    "inflight.models.families",
    "torch.distributed",
)
"""With what they import. Not what only some networks need, as transformers, which takes longer than all of this."""


def serve(channel: socket.socket) -> bool:
    """Until the front is gone; True in a rank that was forked."""
    server = os.getpid()
    _say(channel, Ready())
    while data := channel.recv(MAX_MESSAGE_BYTES):
        message = decode_to_server(data)
        if isinstance(message, Fork):
            try:
                pid = os.fork()
            except OSError as error:
                _say(channel, CannotFork(str(error)))
                continue
            if pid == 0:
                die_with_parent(None, server)
                channel.close()
                _become_rank(message.variables)
                return True
            _say(channel, Forked(pid))
        else:
            _, status = os.waitpid(message.pid, 0)
            _say(channel, Ended(os.waitstatus_to_exitcode(status)))
    return False


def _say(channel: socket.socket, message: FromServer) -> None:
    channel.send(encode(message))


def _become_rank(variables: dict[str, str]) -> None:
    """As if this process had been started by itself."""
    os.setsid()
    own = {name: value for name, value in os.environ.items() if name != ROOM}
    become([sys.executable, *WORKER], {**own, **variables})
    tempfile.tempdir = None  # that of the new environment
    gc.unfreeze()
    gc.enable()


def main(channel: socket.socket) -> int:
    """The exit code, of this process or of a rank that was forked from it."""
    die_with_parent(None)
    gc.disable()
    for module in IMPORTED:
        importlib.import_module(module)
    gc.freeze()  # pages that no collection touches stay shared
    if not serve(channel):
        return 0
    from inflight.executor.rank.worker import main as serve_as_rank

    return serve_as_rank()


if __name__ == "__main__":
    from inflight.executor.rank.leave import leave

    leave(main(socket.socket(fileno=int(sys.argv[1]))))
