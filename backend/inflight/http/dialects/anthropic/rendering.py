"""A message as it is sent: one JSON object, or the events of a stream in Anthropic's order.

    message_start                the message, empty
    ping
    the events of each block     (`content_blocks`), one block behind the other
    message_delta                why it ends, and the usage
    message_stop

An error ends a stream as an event of that name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from inflight.http.api_error import APIError
from inflight.http.call import Call
from inflight.http.choice import TIME_OUT
from inflight.http.dialects.anthropic.content_blocks import DELTA_TAIL, ContentBlocks
from inflight.http.dialects.anthropic.errors import in_anthropics_form
from inflight.http.dispatcher import Hear
from inflight.http.event_frame import event_frame
from inflight.http.generation import Generation, News
from inflight.http.rendering import Rendering
from inflight.http.text_stream import FramedText, TextStream

STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
CONTEXT_IS_FULL = "model_context_window_exceeded"


class GrowingMessage:
    """What both ways have in common."""

    def __init__(self, call: Call, generation: Generation, max_tokens: int) -> None:
        """`max_tokens`: what was asked for."""
        self._call, self._generation, self._max_tokens = call, generation, max_tokens
        self._blocks = ContentBlocks(call.prepared.format)

    def _head(self) -> dict[str, Any]:
        return {"id": self._call.answer_id, "type": "message", "role": "assistant", "model": self._call.model}

    def _grow(self, news: News) -> bytes:
        events = b""
        for choice, text in news.items():
            events += self._blocks.add(text)
            if choice.finish_reason:
                events += self._blocks.finish()
        return events

    def _end(self) -> dict[str, Any]:
        """Why it ends, once it has."""
        (choice,) = self._generation.choices
        reason = STOP_REASONS[self._blocks.finish_reason(choice.finish_reason)]
        stop_sequence = None
        if choice.finish_reason == "stop" and isinstance(choice.stop_reason, str):
            reason, stop_sequence = "stop_sequence", choice.stop_reason
        elif reason == "max_tokens" and choice.num_tokens < self._max_tokens and choice.stop_reason != TIME_OUT:
            reason = CONTEXT_IS_FULL
        return {"stop_reason": reason, "stop_sequence": stop_sequence}

    def _usage(self) -> dict[str, Any]:
        num_cached = self._generation.num_cached_tokens
        return {
            "input_tokens": self._call.num_prompt_tokens - num_cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": num_cached,
            "output_tokens": self._generation.num_tokens,
        }


class WholeMessage(GrowingMessage):
    def __init__(self, call: Call, generation: Generation, max_tokens: int) -> None:
        super().__init__(call, generation, max_tokens)
        self._blocks.open()

    def add(self, news: News) -> None:
        self._grow(news)

    def fields(self) -> dict[str, Any]:
        return {**self._head(), "content": self._blocks.fields(), **self._end(), "usage": self._usage()}


class StreamedMessage(GrowingMessage):
    def open(self) -> bytes:
        nothing: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None}
        message = {**self._head(), **nothing, "usage": {**self._usage(), "output_tokens": 0}}
        opening = event_frame("message_start", {"type": "message_start", "message": message})
        opening += event_frame("ping", {"type": "ping"})
        return opening + self._blocks.open()

    def add(self, news: News) -> bytes:
        events = self._grow(news)
        if not self._generation.is_done:
            return events
        delta = {"type": "message_delta", "delta": self._end(), "usage": self._usage()}
        stop = event_frame("message_stop", {"type": "message_stop"})
        return events + event_frame("message_delta", delta) + stop

    def text_stream(self, long_way: Hear, fail: Callable[[Exception], bytes]) -> TextStream | None:
        """The short way for what comes now; None if the text may be more than text."""
        (choice,) = self._generation.choices
        if self._call.prepared.format is not None or not choice.is_plain:
            return None
        return FramedText(choice, self._blocks.delta_head(), DELTA_TAIL, long_way, fail)

    def fail(self, error: APIError) -> bytes:
        return event_frame("error", in_anthropics_form(error)[1])


def rendering(max_tokens: int) -> Rendering:
    return Rendering(
        lambda call, generation: WholeMessage(call, generation, max_tokens),
        lambda call, generation: StreamedMessage(call, generation, max_tokens),
    )
