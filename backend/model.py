"""The module that tritonserver loads: TritonPythonModel, which passes every call on to what serves the model.

tritonserver imports this file as the bare module `model`, sometimes in two stub processes, so nothing heavy is imported
before initialize().
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import triton_python_backend_utils as pb_utils

if TYPE_CHECKING:
    from inflight.server.start import Server


class TritonPythonModel:
    """A decoupled model: execute() returns nothing, responses go through each request's response sender."""

    def initialize(self, args: dict[str, str]) -> None:
        """Launch the engine and wait until it is ready.

        Raises pb_utils.TritonModelException with one sentence, which tritonserver logs, if the configuration is wrong
        or the engine does not start.
        """
        from inflight.errors import InflightError
        from inflight.server.start import start_server

        try:
            self._server: Server = start_server(pb_utils, args)
        except InflightError as error:
            raise pb_utils.TritonModelException(str(error)) from None

    def execute(self, requests: list[Any]) -> None:
        """Accept the requests. Never raises and never waits for the engine."""
        for request in requests:
            self._server.accept(request)

    def is_ready(self) -> bool:
        """Whether requests can be served now. Called by versions of tritonserver that ask Python models."""
        return self._server.is_ready()

    def finalize(self) -> None:
        """Graceful shutdown: finish the requests in flight, end the ranks, join the threads."""
        server = getattr(self, "_server", None)
        if server is not None:
            server.close()
