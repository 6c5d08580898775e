"""What the grammars of calls have in common: one call, its arguments, and the bounds of the whole.

Each schema is one of its own within the grammar: references in it lead where its author meant. The name of a call comes
before its arguments, so that the model knows which ones it writes, and so that they can be streamed.
"""

from __future__ import annotations

import json

from inflight.asking.tools.forms import Form, schema_of, separated, tag
from inflight.asking.tools.tool import Tool
from inflight.errors import InvalidRequest
from inflight.guided_decoding import MAX_JSON_GUIDE_BYTES, GuidedDecodingParams, GuideType


def forced_call_guide(
    tools: list[Tool], *, name: str | None = None, parallel_tool_calls: bool = True
) -> GuidedDecodingParams:
    """What `tool_choice` required or a tool's name makes of the output: one or more calls of any of `tools`, or exactly
    one of the tool `name`. Raises InvalidRequest if there is no such tool, or if the grammar is beyond the engine's
    bounds.

    It is the same for all families but those that write messages, because no parser of theirs need be configured:

        [{"name": "f", "parameters": {…}}, {"name": "g", "parameters": {…}}]
    """
    offered = offered_tools(tools, name)
    calls = [json_call(tool, "parameters", schema_of(tool.schema)) for tool in offered]
    form = call_list(calls, is_one=name is not None or not parallel_tool_calls)
    return guide_of(form, "tool_choice", is_strict=any(tool.strict for tool in offered))


def offered_tools(tools: list[Tool], name: str | None) -> list[Tool]:
    """Those that a forced call may call: `name`, None = any of them. Raises InvalidRequest if there is none."""
    offered = [tool for tool in tools if name in (None, tool.name)]
    if not offered:
        wanted = "a tool" if name is None else f"the tool {name}"
        raise InvalidRequest(f"tool_choice asks for {wanted}, and the request does not have it in tools")
    return offered


def guide_of(form: Form, field: str, *, is_strict: bool = True) -> GuidedDecodingParams:
    """The grammar that the engine is asked for. `field`: of the request, that wants it. `is_strict`: whether its
    schemas are followed exactly or refused. Raises InvalidRequest."""
    guide = json.dumps({"type": "structural_tag", "format": form}, ensure_ascii=False, separators=(",", ":"))
    num_bytes = len(guide.encode("utf-8", "surrogatepass"))
    if num_bytes > MAX_JSON_GUIDE_BYTES:
        raise InvalidRequest(
            f"{field} needs a grammar of {num_bytes} bytes for the tools' parameters, more than {MAX_JSON_GUIDE_BYTES}"
        )
    params = GuidedDecodingParams(guide_type=GuideType.STRUCTURAL_TAG, guide=guide, is_strict=is_strict)
    params.validate()
    return params


def json_call(tool: Tool, key: str, arguments: Form) -> Form:
    """A call as an object, with its arguments under `key`."""
    return tag(f'{{"name": "{tool.name}", "{key}": ', arguments, "}")


def json_object_call(tool: Tool, key: str) -> Form:
    """The same as one schema, which takes the tool's definitions over, so that references lead to them."""
    schema = tool.schema if tool.strict else {"type": "object", "additionalProperties": True}
    shared = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    properties = {"name": {"const": tool.name}, key: {name: schema[name] for name in schema if name not in shared}}
    whole = {"type": "object", "properties": properties, "required": ["name", key], "additionalProperties": False}
    return schema_of({**whole, **shared})


def call_list(calls: list[Form], *, is_one: bool) -> Form:
    """Calls in brackets."""
    return tag("[", separated(calls, ", ", is_one=is_one), "]")
