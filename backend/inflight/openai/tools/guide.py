"""The grammar of a forced call: what `tool_choice` required or a tool's name makes of the output.

Its form is the same for all families, because tags of theirs are special tokens, which no grammar can ask for:

    [{"name": "f", "parameters": {…}}, {"name": "g", "parameters": {…}}]

The name comes first, so that the model knows which arguments it writes, and so that they can be streamed. Each schema
is one of its own within the grammar: references in it lead where its author meant.
"""

from __future__ import annotations

import json
from typing import Any

from inflight.errors import InvalidRequest
from inflight.guided_decoding import MAX_GUIDE_BYTES, GuidedDecodingParams, GuideType
from inflight.openai.tools.tool import Tool

MAX_WHITE_SPACE = 8
"""Characters of white space in a row that arguments may have: a model could write nothing else until its end."""


def forced_call_guide(
    tools: list[Tool], *, name: str | None = None, parallel_tool_calls: bool = True
) -> GuidedDecodingParams:
    """The grammar of one or more calls of any of `tools`, or of exactly one of the tool `name`. Raises InvalidRequest
    if there is no such tool, or if the grammar is beyond the engine's bounds."""
    offered = [tool for tool in tools if name in (None, tool.name)]
    if not offered:
        wanted = "a tool" if name is None else f"the tool {name}"
        raise InvalidRequest(f"tool_choice asks for {wanted}, and the request does not have it in tools")
    calls = {
        "type": "tags_with_separator",
        "tags": [_call(tool) for tool in offered],
        "separator": ", ",
        "at_least_one": True,
        "stop_after_first": name is not None or not parallel_tool_calls,
    }
    whole = {"type": "tag", "begin": "[", "content": calls, "end": "]"}
    guide = json.dumps({"type": "structural_tag", "format": whole}, ensure_ascii=False, separators=(",", ":"))
    num_bytes = len(guide.encode("utf-8", "surrogatepass"))
    if num_bytes > MAX_GUIDE_BYTES:
        raise InvalidRequest(
            f"tool_choice needs a grammar of {num_bytes} bytes for the tools' parameters, more than {MAX_GUIDE_BYTES}"
        )
    params = GuidedDecodingParams(guide_type=GuideType.STRUCTURAL_TAG, guide=guide)
    params.validate()
    return params


def _call(tool: Tool) -> dict[str, Any]:
    arguments = {"type": "json_schema", "json_schema": tool.schema, "max_whitespace_cnt": MAX_WHITE_SPACE}
    return {"type": "tag", "begin": f'{{"name": "{tool.name}", "parameters": ', "content": arguments, "end": "}"}
