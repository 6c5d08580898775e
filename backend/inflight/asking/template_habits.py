"""In which of the forms that are in use a chat template takes messages and writes calls, found by trying.

Clients send text as content, "" as that of a message of calls alone, and the arguments of calls as objects here, which
most templates take. Some read content as parts alone, know calls by content that is null, or join arguments to text.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from typing import Any, NamedTuple

Messages = list[dict[str, Any]]

THOUGHTS = ("reasoning", "reasoning_content", "thinking")
"""Keys under which templates look for what the model has thought."""

TEXT, SAID, NAME, KEY = "probe_text", "probe_said", "probe_name", "probe_key"
ARGUMENTS = {KEY: 1}
ID = "probe1234"
"""Nine letters and digits, as templates of Mistral have it."""
NAMING_ID = f"functions.{NAME}:0"
"""As Kimi's have it, which write the name of a tool nowhere else."""
ASKED: Messages = [{"role": "user", "content": TEXT}]
TOOL = {"type": "function", "function": {"name": NAME, "description": "", "parameters": {"type": "object"}}}


class Habits(NamedTuple):
    takes_parts: bool = False
    """Content is a list of parts, for all messages."""
    takes_null: bool = False
    """Content beside calls is null if there is none."""
    takes_text: bool = False
    """The arguments of calls are JSON as a text."""
    joins_thought: bool = False
    """Beside calls there may be a thought or content, not both: the content ends the thought."""

    def adapted(self, messages: Messages) -> Messages:
        """The same messages in this form."""
        return [self._adapted(message) for message in messages] if any(self) else messages

    def _adapted(self, message: dict[str, Any]) -> dict[str, Any]:
        content, calls = message["content"], message.get("tool_calls")
        if self.joins_thought and calls and content and "thinking" in message:
            message = {**message, **dict.fromkeys(THOUGHTS, f"{message['thinking']}\n{content}"), "content": ""}
            content = ""
        if self.takes_parts and isinstance(content, str):
            content = [{"type": "text", "text": content}]
        if calls and self.takes_null and not message["content"]:
            content = None
        if calls and self.takes_text:
            calls = [{**call, "function": _as_text(call["function"])} for call in calls]
        return {**message, "content": content, **({"tool_calls": calls} if calls else {})}


def find_habits(render: Callable[[Messages], str]) -> Habits:
    """`render`: the template, with a tool; it may raise anything."""
    takes_parts = not _shows(render, ASKED, Habits()) and _shows(render, ASKED, Habits(takes_parts=True))
    messages = [*_called(ID), {"role": "tool", "tool_call_id": ID, "name": NAME, "content": TEXT}]
    for takes_text, takes_null in itertools.product((False, True), repeat=2):
        habits = Habits(takes_parts, takes_null, takes_text)
        # A name alone could be that of the tool, and an object that is joined to text would be Python's.
        if _shows(render, messages, habits, f'"{KEY}"') or _shows(render, messages, habits, f"{KEY}="):
            spoken = [ASKED[0], {**messages[1], "content": SAID, **dict.fromkeys(THOUGHTS, TEXT)}, messages[2]]
            joined = habits._replace(joins_thought=True)
            return (
                joined if _shows(render, spoken, joined, SAID) and not _shows(render, spoken, habits, SAID) else habits
            )
    return Habits(takes_parts)


def written_call(render: Callable[[Messages], str], habits: Habits, call_id: str = ID) -> str:
    """What stands for an answer that calls NAME with ARGUMENTS, from where the text of another answer would begin; ""
    if the template refuses it. `render`: as in find_habits."""
    try:
        called = render(habits.adapted(_called(call_id)))
        answered = render(habits.adapted([*ASKED, {"role": "assistant", "content": TEXT}]))
    except Exception:  # of the template's own code
        return ""
    pairs = enumerate(zip(called, answered, strict=False))
    return called[next((place for place, (one, other) in pairs if one != other), len(answered)) :]


def _called(call_id: str) -> Messages:
    function = {"name": NAME, "arguments": ARGUMENTS}
    call = {"id": call_id, "type": "function", "function": function}
    return [*ASKED, {"role": "assistant", "content": "", "tool_calls": [call]}]


def _shows(render: Callable[[Messages], str], messages: Messages, habits: Habits, text: str = TEXT) -> bool:
    try:
        return text in render(habits.adapted(messages))
    except Exception:  # of the template's own code
        return False


def _as_text(function: dict[str, Any]) -> dict[str, Any]:
    return {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}
