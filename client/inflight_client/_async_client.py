"""The asyncio client, with the same interface as :class:`~inflight_client.Client`."""

from __future__ import annotations

import asyncio
import time
from types import TracebackType
from typing import Any

from typing_extensions import Unpack

from inflight_client._client import CONTROL_TIMEOUT, READY_POLL
from inflight_client._exceptions import NotReady
from inflight_client._grpc import DEFAULT_URL, AsyncGrpcTransport
from inflight_client._protocol import (
    DEFAULT_MODEL,
    generation_call,
    has_beams,
    lora_call,
    may_stream,
    num_sequences,
    stop_call,
)
from inflight_client._resume import DEFAULT_RESUME_TIMEOUT, AsyncResumingReplyStream
from inflight_client._stream import AsyncCompletionStream
from inflight_client._transport import AsyncReplyStream, AsyncTransport
from inflight_client._types import Completion, GenerationOptions, Prompt


class AsyncClient:
    """One server, one model, any number of requests at once, within one event loop.

    async with AsyncClient("localhost:8001", timeout=30) as client:
        await client.wait_until_ready(10)
        (await client.generate("Once upon a time", max_tokens=64)).text
        async with client.stream([1, 5, 9], temperature=0.8, seed=7) as stream:
            async for chunk in stream: ...
    """

    def __init__(
        self,
        url: str = DEFAULT_URL,
        *,
        model: str = DEFAULT_MODEL,
        timeout: float | None = None,
        transport: AsyncTransport | None = None,
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
        self._transport: AsyncTransport = transport or AsyncGrpcTransport(url)

    async def generate(
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
        async with self._open(
            prompt, dict(options), stream=False, timeout=timeout, request_id=request_id, resume=resume
        ) as stream:
            async for _ in stream:
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
    ) -> AsyncCompletionStream:
        """Chunks of the answer as they are generated. `timeout` (seconds) applies to the whole answer; it and `resume`
        override the client's."""
        return self._open(prompt, dict(options), stream=True, timeout=timeout, request_id=request_id, resume=resume)

    async def stop(self, request_id: str) -> None:
        """Ask the server to stop the request with that id, which another client may have sent.

        That request ends with its tokens so far. Raises InvalidRequest or ServerFailure if it is not in flight.
        """
        call = stop_call(request_id, model=self._model, timeout=self._timeout)
        async for _ in AsyncCompletionStream(self._transport.open(call), request_id):
            pass

    async def load_lora(self, name: str) -> None:
        """Have the server load a LoRA adapter by name, so that the first request that names it need not wait.

        Raises InvalidRequest if there is none, or if it cannot be used.
        """
        await self._order_lora("load", name)

    async def unload_lora(self, name: str) -> None:
        """Make the name free for other weights. Requests in flight keep the adapter."""
        await self._order_lora("unload", name)

    async def _order_lora(self, order: str, name: str) -> None:
        call = lora_call(order, name, model=self._model, timeout=self._timeout)
        async for _ in AsyncCompletionStream(self._transport.open(call), call.request_id):
            pass

    async def is_ready(self) -> bool:
        """Whether the server can be reached and the model is ready."""
        return await self._transport.model_ready(self._model, CONTROL_TIMEOUT)

    async def wait_until_ready(self, timeout: float) -> None:
        """Return once the model is ready; raises NotReady after `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while not await self.is_ready():
            if time.monotonic() >= deadline:
                raise NotReady(f"model {self._model} at {self._url} was not ready within {timeout:g} s")
            await asyncio.sleep(READY_POLL)

    async def model_config(self) -> dict[str, Any]:
        """The model's configuration on the server: its config.pbtxt as a dictionary."""
        return await self._transport.model_config(self._model, CONTROL_TIMEOUT)

    async def close(self) -> None:
        """Close the connection; requests in flight are cancelled."""
        await self._transport.close()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def _open(
        self,
        prompt: Prompt,
        options: dict[str, object],
        *,
        stream: bool,
        timeout: float | None,
        request_id: str | None,
        resume: bool | None,
    ) -> AsyncCompletionStream:
        deadline = self._timeout if timeout is None else timeout
        resumes = self._resume if resume is None else resume
        # Of an answer that is not streamed a client has nothing to go on from.
        stream = stream or (resumes and may_stream(options))
        call = generation_call(
            prompt, options, model=self._model, stream=stream, timeout=deadline, request_id=request_id
        )
        replies: AsyncReplyStream = (
            AsyncResumingReplyStream(self._transport, call, self._resume_timeout)
            if resumes
            else self._transport.open(call)
        )
        return AsyncCompletionStream(replies, call.request_id, num_sequences(call), has_beams=has_beams(call))
