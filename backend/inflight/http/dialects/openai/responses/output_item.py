"""The items of a response while they grow: each opens, takes text and closes, and tells so in events.

    response.output_item.added
        response.content_part.added          of messages and reasoning, which have one part
        response.*.delta …, response.*.done  the part's text, or a call's arguments
        response.content_part.done
    response.output_item.done

Nothing else makes JSON of them.
"""

from __future__ import annotations

import functools
import secrets
from abc import ABC, abstractmethod
from typing import Any, ClassVar

from inflight.http.dialects.openai.responses.event_frames import Delta, Event, delta_head
from inflight.http.dialects.openai.responses.items import is_json_object

IN_PROGRESS, COMPLETED, INCOMPLETE = "in_progress", "completed", "incomplete"


class OutputItem(ABC):
    prefix: ClassVar[str]
    """Of ids."""
    text_event: ClassVar[str]
    """What events of its text are called, before .delta and .done."""

    def __init__(self, index: int) -> None:
        """`index`: in the response's output."""
        self.id = f"{self.prefix}_{secrets.token_hex(24)}"
        self.status = IN_PROGRESS
        self._index = index
        self._pieces: list[str] = []
        self._place: dict[str, Any] = {"item_id": self.id, "output_index": index}
        """Of its text, in events."""

    @functools.cached_property
    def _delta_head(self) -> bytes:
        return delta_head(f"{self.text_event}.delta", self._place)

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    @abstractmethod
    def fields(self) -> dict[str, Any]:
        """The item as JSON, as far as it has come."""

    def opening(self) -> list[Event]:
        return [("response.output_item.added", {"output_index": self._index, "item": self.fields()})]

    def grow(self, text: str) -> Delta:
        self._pieces.append(text)
        return Delta(self._delta_head, text, None)

    def closing(self, *, is_cut: bool) -> list[Event]:
        """`is_cut`: whether the answer ended here before the model had ended it."""
        self.status = INCOMPLETE if is_cut else COMPLETED
        return [("response.output_item.done", {"output_index": self._index, "item": self.fields()})]


class PartItem(OutputItem):
    """One with a single part, which holds its text."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self._place["content_index"] = 0

    @abstractmethod
    def part(self) -> dict[str, Any]: ...

    def opening(self) -> list[Event]:
        return [*super().opening(), ("response.content_part.added", {**self._place, "part": self.part()})]

    def closing(self, *, is_cut: bool) -> list[Event]:
        done = {**self._place, **self._done()}
        return [
            (f"{self.text_event}.done", done),
            ("response.content_part.done", {**self._place, "part": self.part()}),
            *super().closing(is_cut=is_cut),
        ]

    def _done(self) -> dict[str, Any]:
        return {"text": self.text}

    def _content(self) -> list[dict[str, Any]]:
        """Empty until the part has come."""
        return [self.part()] if self._pieces else []


class MessageItem(PartItem):
    prefix, text_event = "msg", "response.output_text"

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.log_probs: list[dict[str, Any]] = []
        """Of the tokens of its text, if they were asked for."""
        self._num_sent = 0
        """Of these, in events."""

    def part(self) -> dict[str, Any]:
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": [*self.log_probs]}

    def fields(self) -> dict[str, Any]:
        content = self._content()
        return {"id": self.id, "type": "message", "role": "assistant", "status": self.status, "content": content}

    def grow(self, text: str) -> Delta:
        self._pieces.append(text)
        new = self.log_probs[self._num_sent :] if self.log_probs else []
        self._num_sent += len(new)
        return Delta(self._delta_head, text, new)

    def _done(self) -> dict[str, Any]:
        return {**super()._done(), "logprobs": self.log_probs}


class ReasoningItem(PartItem):
    prefix, text_event = "rs", "response.reasoning_text"

    def part(self) -> dict[str, Any]:
        return {"type": "reasoning_text", "text": self.text}

    def fields(self) -> dict[str, Any]:
        content = self._content()
        more = {"encrypted_content": None, "status": self.status}
        return {"id": self.id, "type": "reasoning", "summary": [], "content": content, **more}


class CallItem(OutputItem):
    prefix, text_event = "fc", "response.function_call_arguments"

    def __init__(self, index: int, call_id: str, name: str) -> None:
        super().__init__(index)
        self._call_id, self._name = call_id, name

    def fields(self) -> dict[str, Any]:
        named = {"call_id": self._call_id, "name": self._name, "arguments": self.text}
        return {"id": self.id, "type": "function_call", **named, "status": self.status}

    def closing(self, *, is_cut: bool) -> list[Event]:
        # The cut may be behind its end; and a model may break off a call, and write on.
        done = {**self._place, "name": self._name, "arguments": self.text}
        return [(f"{self.text_event}.done", done), *super().closing(is_cut=not is_json_object(self.text))]
