"""The grammar of outputs that are messages in channels, of which calls of tools are some: the model thinks and speaks
in messages of its own, then calls tools or answers.

    (<|channel|>analysis… | <|channel|>commentary…)* (calls | <|channel|>final…)

Each is written with the header that channels.py reads and no other, so what is found in the output follows its tool's
schema wherever it stands.
"""

from __future__ import annotations

from msgspec import structs

from inflight.asking.tools.arguments_guide import json_arguments
from inflight.asking.tools.channels import ANALYSIS, BEFORE_NAME, BEHIND_NAME, CALL, END, FINAL, PREAMBLE, START, TAGS
from inflight.asking.tools.forms import Form, either, optional, sequence, tag, text
from inflight.asking.tools.guide import guide_of, offered_tools
from inflight.asking.tools.tool import Tool
from inflight.guided_decoding import GuidedDecodingParams

FREE: Form = {"type": "any_text", "excludes": list(TAGS)}


def chosen_message_guide(tools: list[Tool], *, parallel_tool_calls: bool, answer: Form | None) -> GuidedDecodingParams:
    """Calls or an answer. `answer`: what the final message follows, None = it is free. Before one in a form of its own
    the model says nothing. Raises InvalidRequest."""
    final = tag(FINAL, FREE) if answer is None else sequence(text(FINAL), answer)
    form = sequence(_before(speaks=answer is None), either(final, _calls(tools, is_one=not parallel_tool_calls)))
    return guide_of(form, "a strict tool" if answer is None else "response_format together with tools")


def forced_message_guide(
    tools: list[Tool], *, name: str | None = None, parallel_tool_calls: bool = True
) -> GuidedDecodingParams:
    """As forced_call_guide, in messages."""
    offered = offered_tools(tools, name)
    held = [structs.replace(tool, strict=True) for tool in offered]
    form = sequence(_before(speaks=False), _calls(held, is_one=name is not None or not parallel_tool_calls))
    return guide_of(form, "tool_choice", is_strict=any(tool.strict for tool in offered))


def _before(*, speaks: bool) -> Form:
    """Thoughts and, if it `speaks`, what the model tells of its plans."""
    kinds = [tag(begin, FREE, END) for begin in ((ANALYSIS, PREAMBLE) if speaks else (ANALYSIS,))]
    return {"type": "star", "content": sequence(either(*kinds), text(START))}


def _calls(tools: list[Tool], *, is_one: bool) -> Form:
    call = either(*(tag(BEFORE_NAME + tool.name + BEHIND_NAME, json_arguments(tool)) for tool in tools))
    # Where the end of a call ends outputs, it is no text, and a further call is behind the end of other messages.
    end = optional(text(CALL))
    further = sequence(either(text(CALL), text(END)), text(START), call)
    return sequence(call, end) if is_one else sequence(call, {"type": "star", "content": further}, end)
