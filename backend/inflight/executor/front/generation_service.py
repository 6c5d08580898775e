"""The engine as a library: requests in, GenerationResults out, for programs without tritonserver.

    with GenerationService(InProcessExecutor(config)) as service:
        print(service.generate_async([1, 2, 3], max_tokens=16).result().token_ids)

It starts and ends the executor and receives all of its responses. It handles tokens only; text belongs to the server
side.
"""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Any

from inflight.executor.front.front import Front
from inflight.executor.front.generation_result import GenerationResult
from inflight.request import Request, SamplingConfig
from inflight.result import Response


class GenerationService:
    """Safe to use from several threads."""

    def __init__(self, executor: Front) -> None:
        """Start the executor. Raises ConfigurationError."""
        self._executor = executor
        self._results: dict[int, GenerationResult] = {}
        self._closing = False
        executor.start()
        self._thread = threading.Thread(target=self._dispatch, name="inflight-generation", daemon=True)
        self._thread.start()

    def generate_async(self, prompt_token_ids: list[int], max_tokens: int, **options: Any) -> GenerationResult:
        """Send a request and return at once. `options`: further fields of Request.

        Without a `sampling_config` it is as the checkpoint has it; `sampling_config` below makes one that differs in
        some values. Raises what Executor.enqueue_request raises.
        """
        if "sampling_config" not in options:
            options["sampling_config"] = self.sampling_config(prompt_token_ids, max_tokens)
        request = Request(
            request_id=self._executor.next_request_id(),
            input_token_ids=prompt_token_ids,
            max_tokens=max_tokens,
            **options,
        )
        result = GenerationResult(request, self._executor.cancel_request)
        self._results[request.request_id] = result
        try:
            self._executor.enqueue_request(request)
        except BaseException:
            del self._results[request.request_id]
            raise
        return result

    def sampling_config(self, prompt_token_ids: list[int], max_tokens: int, **said: Any) -> SamplingConfig:
        """The checkpoint's own way to choose tokens, but for what is `said`: see GenerationDefaults."""
        defaults = self._executor.generation_defaults
        return defaults.sampling_config(num_prompt_tokens=len(prompt_token_ids), max_tokens=max_tokens, **said)

    def close(self) -> None:
        """Shut the engine down; requests in flight fail with EngineUnavailable."""
        self._closing = True
        self._executor.shutdown()
        self._thread.join()

    def __enter__(self) -> GenerationService:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _dispatch(self) -> None:
        while True:
            responses = self._executor.await_responses(timeout=1.0)
            for response in responses:
                self._give(response)
            if not responses and self._closing and not self._executor.num_requests_in_flight():
                return

    def _give(self, response: Response) -> None:
        result = self._results.get(response.request_id)
        if result is None:
            return
        if response.is_final:
            del self._results[response.request_id]
        result.add(response)
