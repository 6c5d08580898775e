"""The door through which tritonserver enters: TritonPythonModel, and nothing else.

tritonserver imports this file as the bare module `model` in a stub process, sometimes twice; so nothing heavy is
imported before initialize().
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import triton_python_backend_utils as pb_utils

if TYPE_CHECKING:
    from inflight.server.backend_server import BackendServer


class TritonPythonModel:
    """A decoupled model: execute() returns nothing, answers go through each request's response sender."""

    def initialize(self, args: dict[str, str]) -> None:
        """Launch the engine and wait until it serves. A wrong configuration is one sentence in the server's log."""
        from inflight.errors import InflightError
        from inflight.server.start import start_server

        try:
            self._server: BackendServer = start_server(pb_utils, args)
        except InflightError as error:
            raise pb_utils.TritonModelException(str(error)) from None

    def execute(self, requests: list[Any]) -> None:
        """Hand the requests over. Never raises and never waits for the engine."""
        for request in requests:
            self._server.accept(request)

    def is_ready(self) -> bool:
        """For servers that ask: true while every rank answers."""
        return self._server.is_ready()

    def finalize(self) -> None:
        """Finish what is in flight, end the ranks, join the threads."""
        server = getattr(self, "_server", None)
        if server is not None:
            server.close()
