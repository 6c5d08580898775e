"""The reply to a request of several prompts, which their work items share.

Each prompt is served as a request of its own, so the engine, the journal and the limits know nothing of batches; only
the way back is shared. What ends a prompt ends the request only if no other prompt is open, and an error ends its own
prompt alone. The one response of a model that is not decoupled has a row for each prompt: there the first error is the
answer to all.

Prompts are answered by several threads. The lock is held while tritonserver is called, so only threads that answer
prompts of the same request wait for each other.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

from inflight.server.reply import Reply
from inflight.server.tensors.tensor_values import Array, gather


class BatchReply:
    """A Reply shared by the prompts 0, 1, … of one request. Thread safe."""

    def __init__(self, reply: Reply, num_prompts: int, *, gathers: bool) -> None:
        """`gathers`: one response holds all prompts."""
        self._reply = reply
        self._open = set(range(num_prompts))
        """Prompts without a final response."""
        self._rows: dict[int, Mapping[str, Array]] | None = {} if gathers else None
        """Outputs of the prompts that have ended, if they are gathered."""
        self._is_closed = False
        """Whether the request's final response was sent."""
        self._is_cancelled = False
        self._lock = threading.Lock()

    def prompts(self) -> Sequence[PromptReply]:
        return [PromptReply(self, index) for index in sorted(self._open)]

    def send(self, index: int, arrays: Mapping[str, Array], final: bool) -> None:
        """As Reply.send. What comes behind the request's final response is dropped."""
        with self._lock:
            if self._is_closed:
                return
            is_last = final and self._open == {index}
            if self._rows is None:
                self._reply.send(arrays, final=is_last)
            else:
                self._rows[index] = arrays
                if is_last:
                    self._reply.send(gather([self._rows[each] for each in sorted(self._rows)]), final=True)
            self._ended(index, final, is_last)

    def fail(self, index: int, code: str, message: str) -> None:
        """As Reply.fail. The message says which prompt has failed."""
        with self._lock:
            if self._is_closed:
                return
            is_last = self._rows is not None or self._open == {index}
            self._reply.fail(code, f"prompt {index}: {message}", final=is_last)
            self._ended(index, True, is_last)

    def is_cancelled(self, index: int) -> bool:
        """Whether the client has disconnected, or the request was answered without this prompt. Only the first open
        prompt asks tritonserver."""
        with self._lock:
            if not (self._is_cancelled or self._is_closed) and index == min(self._open):
                self._is_cancelled = self._reply.is_cancelled()
            return self._is_cancelled or self._is_closed

    def _ended(self, index: int, final: bool, is_last: bool) -> None:
        if final:
            self._open.discard(index)
        self._is_closed = self._is_closed or is_last


class PromptReply:
    """One prompt's part of a BatchReply."""

    def __init__(self, batch: BatchReply, index: int) -> None:
        self._batch = batch
        self._index = index

    def send(self, arrays: Mapping[str, Array], final: bool = False) -> None:
        self._batch.send(self._index, arrays, final)

    def fail(self, code: str, message: str) -> None:
        self._batch.fail(self._index, code, message)

    def is_cancelled(self) -> bool:
        return self._batch.is_cancelled(self._index)
