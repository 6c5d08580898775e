"""The synchronous client. Knows options, deadlines and streams, but not tensors (:mod:`._protocol`) or grpc."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any

from typing_extensions import Unpack

from inflight_client._exceptions import NotReady
from inflight_client._grpc import DEFAULT_URL, GrpcTransport
from inflight_client._protocol import (
    DEFAULT_MODEL,
    generation_call,
    has_beams,
    lora_call,
    may_stream,
    num_sequences,
    stop_call,
)
from inflight_client._resume import DEFAULT_RESUME_TIMEOUT, ResumingReplyStream
from inflight_client._stream import CompletionStream
from inflight_client._transport import ReplyStream, Transport
from inflight_client._types import Completion, GenerationOptions, Prompt

CONTROL_TIMEOUT = 5.0
"""Timeout in seconds of calls that ask for a model's readiness or configuration."""
READY_POLL = 0.1
"""Seconds between two readiness checks while waiting."""


class Client:
    """One server, one model, any number of requests from any number of threads.

    with Client("localhost:8001", timeout=30) as client:
        client.wait_until_ready(10)
        client.generate("Once upon a time", max_tokens=64).text
        with client.stream([1, 5, 9], temperature=0.8, seed=7) as stream:
            for chunk in stream: ...
    """

    def __init__(
        self,
        url: str = DEFAULT_URL,
        *,
        model: str = DEFAULT_MODEL,
        timeout: float | None = None,
        transport: Transport | None = None,
        resume: bool = False,
        resume_timeout: float = DEFAULT_RESUME_TIMEOUT,
    ) -> None:
        """`resume`: whether answers go on when the server ends, from the last token that has come, once it is back or
        another one has its address; it gets `resume_timeout` seconds for that each time."""
        self._url = url
        self._model = model
        self._timeout = timeout
        self._resume = resume
        self._resume_timeout = resume_timeout
        self._transport: Transport = transport or GrpcTransport(url)

    def generate(
        self,
        prompt: Prompt,
        *,
        timeout: float | None = None,
        request_id: str | None = None,
        resume: bool | None = None,
        **options: Unpack[GenerationOptions],
    ) -> Completion:
        """The whole answer to `prompt`, a text or token ids.

        `timeout`, in seconds, and `resume` override the client's. Raises ClientError, see :mod:`._exceptions`.
        """
        with self._open(
            prompt, dict(options), stream=False, timeout=timeout, request_id=request_id, resume=resume
        ) as stream:
            for _ in stream:
                pass
        return stream.completion

    def stream(
        self,
        prompt: Prompt,
        *,
        timeout: float | None = None,
        request_id: str | None = None,
        resume: bool | None = None,
        **options: Unpack[GenerationOptions],
    ) -> CompletionStream:
        """Chunks of the answer as they are generated. `timeout` (seconds) applies to the whole answer; it and `resume`
        override the client's."""
        return self._open(prompt, dict(options), stream=True, timeout=timeout, request_id=request_id, resume=resume)

    def stop(self, request_id: str) -> None:
        """Ask the server to stop the request with that id, which another client may have sent.

        That request ends with its tokens so far. Raises InvalidRequest or ServerFailure if it is not in flight.
        """
        call = stop_call(request_id, model=self._model, timeout=self._timeout)
        for _ in CompletionStream(self._transport.open(call), request_id):
            pass

    def load_lora(self, name: str) -> None:
        """Have the server load a LoRA adapter by name, so that the first request that names it need not wait.

        Raises InvalidRequest if there is none, or if it cannot be used.
        """
        self._order_lora("load", name)

    def unload_lora(self, name: str) -> None:
        """Make the name free for other weights. Requests in flight keep the adapter."""
        self._order_lora("unload", name)

    def _order_lora(self, order: str, name: str) -> None:
        call = lora_call(order, name, model=self._model, timeout=self._timeout)
        for _ in CompletionStream(self._transport.open(call), call.request_id):
            pass

    def is_ready(self) -> bool:
        """Whether the server can be reached and the model is ready."""
        return self._transport.model_ready(self._model, CONTROL_TIMEOUT)

    def wait_until_ready(self, timeout: float) -> None:
        """Return once the model is ready; raises NotReady after `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while not self.is_ready():
            if time.monotonic() >= deadline:
                raise NotReady(f"model {self._model} at {self._url} was not ready within {timeout:g} s")
            time.sleep(READY_POLL)

    def model_config(self) -> dict[str, Any]:
        """The model's configuration on the server: its config.pbtxt as a dictionary."""
        return self._transport.model_config(self._model, CONTROL_TIMEOUT)

    def close(self) -> None:
        """Close the connection; requests in flight are cancelled."""
        self._transport.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open(
        self,
        prompt: Prompt,
        options: dict[str, object],
        *,
        stream: bool,
        timeout: float | None,
        request_id: str | None,
        resume: bool | None,
    ) -> CompletionStream:
        deadline = self._timeout if timeout is None else timeout
        resumes = self._resume if resume is None else resume
        # Of an answer that is not streamed a client has nothing to go on from.
        stream = stream or (resumes and may_stream(options))
        call = generation_call(
            prompt, options, model=self._model, stream=stream, timeout=deadline, request_id=request_id
        )
        replies: ReplyStream = (
            ResumingReplyStream(self._transport, call, self._resume_timeout) if resumes else self._transport.open(call)
        )
        return CompletionStream(replies, call.request_id, num_sequences(call), has_beams=has_beams(call))
