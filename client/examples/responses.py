"""OpenAI's Responses API: a streamed answer, a question about it without sending it again, a function call whose
arguments follow a schema, and an answer that is an object. With the `openai` package, against a server that was started
with --openai-port 9000.

python client/examples/responses.py [http://localhost:9000]
"""

from __future__ import annotations

import json
import sys
from typing import Any, Literal

from openai import OpenAI, pydantic_function_tool
from pydantic import BaseModel


class Feed(BaseModel):
    """Give an animal something to eat."""

    animal: Literal["cat", "dog", "fox"]
    bowls: Literal[1, 2, 3]


url = sys.argv[1] if len(sys.argv) > 1 else "http://localhost:9000"
with OpenAI(base_url=f"{url}/v1", api_key="none") as client:
    print("story: ", end="")
    story = None
    for event in client.responses.create(model="llm", input="Tell a story.", max_output_tokens=48, stream=True):
        if event.type == "response.output_text.delta":
            print(event.delta, end="", flush=True)
        elif event.type in ("response.completed", "response.incomplete"):
            story = event.response
    assert story is not None

    more = client.responses.create(
        model="llm", input="Tell another one.", previous_response_id=story.id, max_output_tokens=48
    )
    print(f"\nanother: {more.output_text}")

    exact: Any = {
        "temperature": 0,
        "extra_body": {"bad_words": ["\n"]},  # JSON may have any white space between its parts, and this model likes it
    }
    called = client.responses.parse(
        model="llm",
        input="Feed the dog.",
        tools=[pydantic_function_tool(Feed)],
        tool_choice="required",
        parallel_tool_calls=False,
        **exact,
    )
    for item in called.output:
        if item.type == "function_call":
            print(f"call: {item.name} with {json.loads(item.arguments)}")

    parsed = client.responses.parse(model="llm", input="Who is hungry?", text_format=Feed, **exact)
    print(f"object: {parsed.output_parsed!r}")
