"""An answer as Ollama sends it: one JSON object, or a line of JSON for each piece and a last one with `done`.

A call of a tool is a line when it is whole. One whose arguments are no JSON object, because it was cut, is left out.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import datetime, timezone
from typing import Any

import msgspec

from inflight.asking.chat_format import ChatReader, Piece
from inflight.asking.tools.events import Content, Reasoning, ToolCallStarted
from inflight.http.api_error import APIError
from inflight.http.call import Call
from inflight.http.dispatcher import Hear
from inflight.http.generation import Generation, News
from inflight.http.rendering import Rendering
from inflight.http.text_stream import FramedText, TextStream

LINES = b"application/x-ndjson"
DONE_REASONS = {"stop": "stop", "length": "length", "tool_calls": "stop"}

_encode = msgspec.json.Encoder().encode


class GrowingAnswer:
    """What both ways have in common."""

    def __init__(
        self, call: Call, generation: Generation, began: float, load_seconds: float, *, has_messages: bool
    ) -> None:
        """`began`: when the HTTP request arrived, on the monotonic clock. `load_seconds`: for which it waited for its
        engine. `has_messages`: whether pieces are messages, or texts."""
        self._call, self._generation = call, generation
        self._began, self._load_seconds = began, load_seconds
        self._has_messages = has_messages
        self._first = 0.0
        """When the first token came."""
        format = call.prepared.format
        self._reader = None if format is None else ChatReader(format)
        self._open_call: tuple[ToolCallStarted, list[str]] | None = None

    def _grow(self, news: News) -> list[dict[str, Any]]:
        """The pieces as fields of a line."""
        self._first = self._first or time.monotonic()
        found: list[dict[str, Any]] = []
        for choice, text in news.items():
            pieces: list[Piece] = [Content(text)] if text and self._reader is None else []
            if self._reader is not None:
                pieces = self._reader.feed(text)
                if choice.finish_reason:
                    pieces += self._reader.finish()
            for piece in pieces:
                found += self._fields(piece)
            if choice.finish_reason:
                found += self._close_call()
            if self._call.log_probs is not None:
                entries = self._call.log_probs.of_chat(choice.take_log_probs())["content"]
                found = found or [self._piece("")]
                found[0]["logprobs"] = entries
        return found

    def _fields(self, piece: Piece) -> list[dict[str, Any]]:
        if isinstance(piece, ToolCallStarted):
            closed = self._close_call()
            self._open_call = piece, []
            return closed
        if isinstance(piece, Content):
            return [*self._close_call(), self._piece(piece.text)]
        if isinstance(piece, Reasoning):
            return [*self._close_call(), self._piece("", thinking=piece.text)]
        assert self._open_call is not None, "arguments follow the start of a call"
        self._open_call[1].append(piece.text)
        return []

    def _close_call(self) -> list[dict[str, Any]]:
        if self._open_call is None:
            return []
        (started, pieces), self._open_call = self._open_call, None
        try:
            arguments = msgspec.json.decode("".join(pieces) or "{}", type=dict[str, Any])
        except (msgspec.DecodeError, RecursionError):
            return []
        call = {"id": started.id, "function": {"name": started.name, "arguments": arguments}}
        return [self._piece("", tool_calls=[call])]

    def _piece(self, text: str, **more: Any) -> dict[str, Any]:
        if self._has_messages:
            return {"message": {"role": "assistant", "content": text, **more}}
        return {"response": text, **more}

    def _head(self) -> dict[str, Any]:
        made = datetime.fromtimestamp(self._call.created, timezone.utc).isoformat().replace("+00:00", "Z")
        return {"model": self._call.model, "created_at": made}

    def _end(self) -> dict[str, Any]:
        (choice,) = self._generation.choices
        reason = choice.finish_reason if self._reader is None else self._reader.finish_reason(choice.finish_reason)
        now = time.monotonic()
        return {
            "done": True,
            "done_reason": DONE_REASONS[reason],
            "total_duration": _nanoseconds(now - self._began),
            "load_duration": _nanoseconds(self._load_seconds),
            "prompt_eval_count": self._call.num_prompt_tokens,
            "prompt_eval_duration": _nanoseconds(self._first - self._began - self._load_seconds),
            "eval_count": self._generation.num_tokens,
            "eval_duration": _nanoseconds(now - self._first),
        }


class WholeAnswer(GrowingAnswer):
    def __init__(
        self, call: Call, generation: Generation, began: float, load_seconds: float, *, has_messages: bool
    ) -> None:
        super().__init__(call, generation, began, load_seconds, has_messages=has_messages)
        self._texts: list[str] = []
        self._thoughts: list[str] = []
        self._calls: list[dict[str, Any]] = []
        self._log_probs: list[dict[str, Any]] = []

    def add(self, news: News) -> None:
        for fields in self._grow(news):
            piece = fields["message"] if self._has_messages else fields
            self._texts.append(piece["content" if self._has_messages else "response"])
            self._thoughts.append(piece.get("thinking", ""))
            self._calls += piece.get("tool_calls", ())
            self._log_probs += fields.get("logprobs", ())

    def fields(self) -> dict[str, Any]:
        more = {"thinking": "".join(self._thoughts), "tool_calls": self._calls}
        given = {name: value for name, value in more.items() if value}
        log_probs = {} if self._call.log_probs is None else {"logprobs": self._log_probs}
        return {**self._head(), **self._piece("".join(self._texts), **given), **log_probs, **self._end()}


class StreamedAnswer(GrowingAnswer):
    def open(self) -> bytes:
        return b""

    def add(self, news: News) -> bytes:
        lines = b"".join([self._line(fields, done=False) for fields in self._grow(news)])
        return lines + self._line(self._piece(""), **self._end()) if self._generation.is_done else lines

    def text_stream(self, long_way: Hear, fail: Callable[[Exception], bytes]) -> TextStream | None:
        """The short way for what comes now; None if a line may hold more than text."""
        (choice,) = self._generation.choices
        if self._reader is not None or not choice.is_plain:
            return None
        head, _, tail = self._line(self._piece(""), done=False).partition(b'""')
        return FramedText(choice, head, tail, long_way, fail)

    def fail(self, error: APIError) -> bytes:
        return _encode({"error": error.message}) + b"\n"

    def _line(self, fields: dict[str, Any], **more: Any) -> bytes:
        return _encode({**self._head(), **fields, **more}) + b"\n"


def rendering(began: float, load_seconds: float, *, has_messages: bool) -> Rendering:
    return Rendering(
        lambda call, generation: WholeAnswer(call, generation, began, load_seconds, has_messages=has_messages),
        lambda call, generation: StreamedAnswer(call, generation, began, load_seconds, has_messages=has_messages),
        LINES,
    )


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)
