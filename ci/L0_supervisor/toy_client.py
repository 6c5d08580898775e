"""A client of the toy model: answers as they come, and errors as exceptions."""

from __future__ import annotations

import contextlib
import queue
import urllib.request
from pathlib import Path

import numpy as np
import tritonclient.grpc as grpc
from server_process import ServerProcess

TOY_REPOSITORY = Path(__file__).with_name("toy_repository")
DEADLINE = 240.0
"""Seconds after which something that should happen counts as never happening."""


class Stream:
    """One open gRPC stream; `next` gives a text, None for the final response, or raises what came instead."""

    def __init__(self, url: str) -> None:
        self._answers: queue.SimpleQueue[tuple[grpc.InferResult | None, Exception | None]] = queue.SimpleQueue()
        self._unanswered = 0
        self._client = grpc.InferenceServerClient(url)
        self._client.start_stream(lambda result, error: self._answers.put((result, error)))

    def ask(self, text: str, max_tokens: int = 1) -> None:
        texts = grpc.InferInput("text_input", [1], "BYTES")
        texts.set_data_from_numpy(np.array([text.encode()], np.object_))
        limits = grpc.InferInput("max_tokens", [1], "INT32")
        limits.set_data_from_numpy(np.array([max_tokens], np.int32))
        self._unanswered += 1
        self._client.async_stream_infer("toy", [texts, limits], enable_empty_final_response=True)

    def next(self) -> str | None:
        result, error = self._answers.get(timeout=DEADLINE)
        if error is not None:
            self._unanswered -= 1
            raise error
        assert result is not None
        tensor = result.as_numpy("text_output")
        if tensor is None:
            self._unanswered -= 1
            return None
        return str(tensor[0].decode())

    def rest(self) -> list[str]:
        """The texts up to the final response."""
        return list(iter(self.next, None))

    def close(self) -> None:
        """Cancels only what is unanswered: tritonserver may keep a request for ever whose final response meets a
        cancel, and with it its trace."""
        with contextlib.suppress(Exception):
            self._client.stop_stream(cancel_requests=self._unanswered > 0)
        self._client.close()


def is_ready(server: ServerProcess) -> bool:
    """Whether the toy model is."""
    try:
        with urllib.request.urlopen(f"{server.http_url}/v2/models/toy/ready", timeout=30) as response:
            return bool(response.status == 200)
    except OSError:
        return False
