"""A response as it is sent: one JSON object, or the events of a stream in OpenAI's order.

    response.created, response.in_progress
    the events of each item (`output_item`), one item behind the other
    response.completed, or .incomplete if the answer was cut, or .failed

The first and the last hold the whole response. No [DONE] follows them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from inflight.asking.reasoning_tokens import ReasoningTokens
from inflight.http.api_error import APIError
from inflight.http.call import Call
from inflight.http.choice import TIME_OUT, Choice
from inflight.http.dialects.openai.responses.event_frames import Event, EventFrames
from inflight.http.dialects.openai.responses.output import Output
from inflight.http.dialects.openai.responses.output_item import MessageItem
from inflight.http.dialects.openai.responses.response_object import MAX_OUTPUT_TOKENS, ResponseObject
from inflight.http.dispatcher import Hear
from inflight.http.generation import Generation, News
from inflight.http.rendering import Rendering
from inflight.http.text_stream import TextStream

Keep = Callable[[dict[str, Any]], None]
"""Takes a response that has ended."""
ENDS = {"completed": "response.completed", "incomplete": "response.incomplete"}


@dataclass(frozen=True, slots=True)
class ResponseCall:
    """One call, and what its rendering needs besides. It has one choice."""

    call: Call
    response: ResponseObject
    reasoning_tokens: ReasoningTokens | None
    """Fresh; None if no text is reasoning."""
    keep: Keep

    def rendering(self) -> Rendering:
        return Rendering(
            lambda call, generation: WholeResponse(self, generation),
            lambda call, generation: StreamedResponse(self, generation),
        )


class GrowingResponse:
    """What both ways have in common."""

    def __init__(self, made: ResponseCall, generation: Generation) -> None:
        self._call, self._generation = made.call, generation
        self._response, self._keep = made.response, made.keep
        self._reasoning_tokens = made.reasoning_tokens
        self._output = Output(made.call.prepared.format)

    def _grow(self, news: News) -> list[Event]:
        events: list[Event] = []
        for choice, text in news.items():
            if self._reasoning_tokens is not None:
                self._reasoning_tokens.add(choice.take_token_ids())
            events += self._output.add(text, self._log_probs(choice))
            if choice.finish_reason:
                events += self._output.finish(is_cut=choice.finish_reason == "length")
        return events

    def _ended(self) -> dict[str, Any]:
        """The whole response, once its choice has ended. To be called once."""
        (choice,) = self._generation.choices
        cut_by = None
        if choice.finish_reason == "length":
            cut_by = TIME_OUT if choice.stop_reason == TIME_OUT else MAX_OUTPUT_TOKENS
        fields = self._response.ended(self._output.fields(), self._usage(), cut_by)
        self._keep(fields)
        return fields

    def _usage(self) -> dict[str, Any]:
        num_input, num_output = self._call.num_prompt_tokens, self._generation.num_tokens
        num_reasoning = 0 if self._reasoning_tokens is None else self._reasoning_tokens.count
        return {
            "input_tokens": num_input,
            "input_tokens_details": {"cached_tokens": self._generation.num_cached_tokens},
            "output_tokens": num_output,
            "output_tokens_details": {"reasoning_tokens": num_reasoning},
            "total_tokens": num_input + num_output,
        }

    def _log_probs(self, choice: Choice) -> list[dict[str, Any]]:
        writer = self._call.log_probs
        entries: list[dict[str, Any]] = [] if writer is None else writer.of_chat(choice.take_log_probs())["content"]
        return entries


class WholeResponse(GrowingResponse):
    def add(self, news: News) -> None:
        self._grow(news)

    def fields(self) -> dict[str, Any]:
        return self._ended()


class MessageText(TextStream):
    """Its chunks have numbers, and the message keeps its text."""

    __slots__ = ("_frames", "_message")

    def __init__(
        self,
        choice: Choice,
        message: MessageItem,
        frames: EventFrames,
        long_way: Hear,
        fail: Callable[[Exception], bytes],
    ) -> None:
        super().__init__(choice, long_way, fail)
        self._message, self._frames = message, frames

    def chunk(self, text: str) -> bytes:
        return self._frames.frame(self._message.grow(text))


class StreamedResponse(GrowingResponse):
    def __init__(self, made: ResponseCall, generation: Generation) -> None:
        super().__init__(made, generation)
        self._frames = EventFrames()

    def open(self) -> bytes:
        fields = {"response": self._response.in_progress()}
        return self._frames.frames([("response.created", fields), ("response.in_progress", fields)])

    def add(self, news: News) -> bytes:
        chunk = self._frames.frames(self._grow(news))
        if not self._generation.is_done:
            return chunk
        ended = self._ended()
        return chunk + self._frames.frame((ENDS[ended["status"]], {"response": ended}))

    def text_stream(self, long_way: Hear, fail: Callable[[Exception], bytes]) -> TextStream | None:
        """The short way for what comes now; None if an event may hold more than text."""
        (choice,) = self._generation.choices
        message = self._output.open_message
        if message is None or not choice.is_plain:
            return None
        return MessageText(choice, message, self._frames, long_way, fail)

    def fail(self, error: APIError) -> bytes:
        return self._frames.frame(
            ("response.failed", {"response": self._response.failed(self._output.fields(), error)})
        )
