"""Sends responses to one client through pb_utils' response sender, which must get exactly one final response.

A gRPC stream and HTTP carry an error's message but not its code, so the code follows the message in brackets.

A final response that cannot be sent (the server shuts down) is logged and not raised: the client cannot be reached any
more, and the request counts as answered. Every call blocks for a round trip to tritonserver, so none is made by a
thread that other threads wait for.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from typing import Any

from inflight.open_requests import OpenRequests
from inflight.server.tensors.tensor_values import Array

logger = logging.getLogger(__name__)

LARGE = 2**20
"""Bytes of tensors from which a response may not fit into /dev/shm, through which tritonserver gets it (Docker gives a
container 64 MB). A response that cannot be sent closes its sender if it is marked as final, and the client would wait
for ever: so it is sent before the final one, which is then empty, and a failure can still be answered by an error."""
_TRITON_NAMES = {"INVALID_ARGUMENT": "INVALID_ARG"}
"""Codes whose constant in pb_utils.TritonError has another name."""


class Reply:
    """A response sender. One thread at a time."""

    def __init__(
        self,
        pb_utils: Any,
        sender: Any,
        *,
        is_unary: bool = False,
        open_requests: OpenRequests | None = None,
        uncoded: Collection[str] = (),
    ) -> None:
        """`is_unary`: the model is not decoupled, so that its only response is the final one. `open_requests`: counts
        this one until its final response. `uncoded`: see Dialect."""
        self._pb_utils = pb_utils
        self._sender = sender
        self._is_unary = is_unary
        self._uncoded = uncoded
        self._open_requests = open_requests
        if open_requests is not None:
            open_requests.begin()

    def send(self, arrays: Mapping[str, Array], final: bool = False) -> None:
        """One response with these output tensors.

        Raises pb_utils' exception if the response cannot be made, or is large or not final and cannot be sent: then the
        client has received nothing of it. A unary model has only final ones.
        """
        tensors = [self._pb_utils.Tensor(name, array) for name, array in arrays.items()]
        response = self._pb_utils.InferenceResponse(tensors)
        is_large = not self._is_unary and sum(array.nbytes for array in arrays.values()) >= LARGE
        if is_large or not final:
            self._sender.send(response, flags=0)
        if final:
            self._send_last(*(() if is_large else (response,)))

    def fail(self, code: str, message: str, final: bool = True) -> None:
        """Send an error `message [code]`, with the constant of TritonError that `code` names. It is the final response
        unless other prompts of the request go on."""
        errors = self._pb_utils.TritonError
        constant = getattr(errors, _TRITON_NAMES.get(code, code), None)
        sentence = message if code in self._uncoded else f"{message} [{code}]"
        error = errors(sentence) if constant is None else errors(sentence, constant)
        self._send_last(self._pb_utils.InferenceResponse(error=error), final=final)

    def close(self) -> None:
        """Send an empty final response."""
        self._send_last(*((self._pb_utils.InferenceResponse([]),) if self._is_unary else ()))

    def is_cancelled(self) -> bool:
        """Whether the client has disconnected. Must not be called after the final response."""
        try:
            return bool(self._sender.is_cancelled())
        except Exception as error:
            logger.warning("tritonserver could not say whether a request was cancelled: %s", type(error).__name__)
            return False

    def _send_last(self, *response: Any, final: bool = True) -> None:
        """The last response to a request or, with `final` false, to one of its prompts."""
        try:
            self._sender.send(*response, flags=self._pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if final else 0)
        except Exception as error:
            logger.error("a final response could not be sent: %s", type(error).__name__)
        if final and self._open_requests is not None:
            self._open_requests.end()
