"""The grammar of one call's arguments in each way of writing: what follows it is read as arguments of the schema.

A strict tool's arguments follow its schema to the letter, or the tool is refused by its name with the reason. Those of
another tool are any object.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from inflight.errors import InvalidRequest
from inflight.openai.tools.forms import (
    Form,
    any_text,
    either,
    optional,
    regex,
    schema_of,
    sequence,
    several,
    tag,
    text,
)
from inflight.openai.tools.syntax import Arguments, JsonArguments, PythonArguments, TaggedArguments
from inflight.openai.tools.tool import Tool
from inflight.openai.tools.value_types import MAX_DEPTH, referred, typed, types_of

ANY_OBJECT: Form = {"type": "object", "additionalProperties": True}
KEYWORD = "[a-zA-Z_][a-zA-Z0-9_]{0,63}"
BEYOND_PROPERTIES = (
    "$ref", "allOf", "anyOf", "oneOf", "not", "if", "const", "enum", "patternProperties", "propertyNames",
    "minProperties", "maxProperties", "dependentRequired", "dependentSchemas", "dependencies",
)  # fmt: skip
"""What a schema may say of arguments besides naming them one by one."""
_NOTES = frozenset({"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment"})
_NOT_IN_KEYS = frozenset('<>"\n{}[]:,')
_NESTING = 0
"""Of lists and objects in arguments of tools that are not strict, where a syntax has them not as JSON."""

Argument = Callable[[str], Form]
"""Makes the grammar of an argument of a name: the key with its value."""


def arguments_form(writing: Arguments, tool: Tool) -> Form:
    """Raises InvalidRequest if the tool is strict and this way of writing cannot hold arguments to its schema."""
    if isinstance(writing, JsonArguments):
        return json_arguments(tool)
    if isinstance(writing, PythonArguments):
        return tag("(", _keywords(tool), ")")
    if isinstance(writing, TaggedArguments):
        return _tagged(writing, tool)
    return _bare(writing.quote, tool)


def json_arguments(tool: Tool) -> Form:
    return schema_of(tool.schema if tool.strict else ANY_OBJECT)


def _keywords(tool: Tool) -> Form:
    """Arguments as Python has them, with values as JSON has them: the parser takes these. Required ones come first."""
    if not tool.strict:
        one = sequence(regex(KEYWORD), text("="), {"type": "json_schema", "json_schema": True})
        return optional(several(one, ", "))
    for name in tool.schema["properties"]:
        if not name.isidentifier():
            raise _refusal(tool, f"its parameter {name[:64]!r} is no name")
    return _members(tool, lambda name: sequence(text(f"{name}="), schema_of(_own(tool, name))), ", ")


def _tagged(writing: TaggedArguments, tool: Tool) -> Form:
    if not tool.strict:
        return _star(_tagged_any(writing))
    return _members(tool, lambda name: _tagged_value(writing, tool, name), "")


def _tagged_value(writing: TaggedArguments, tool: Tool, name: str) -> Form:
    _check_key(tool, name)
    schema = _own(tool, name)
    types = types_of(schema, tool.schema)
    before = writing.before_key + name
    as_text, as_json = before + writing.behind_key + writing.pad, before + writing.behind_json_key + writing.pad
    behind = writing.pad + writing.behind_value
    if "string" not in types:
        return sequence(text(as_json if writing.behind_json_key else as_text), schema_of(schema), text(behind))
    plain = _plain(schema, tool.schema)
    if plain is None or (types != {"string"} and writing.behind_json_key):
        if writing.behind_json_key:
            return sequence(text(as_json), schema_of(schema), text(behind))
        raise _refusal(tool, f"its parameter {name!r} is a text here, which only types, enum or const can describe")
    if types & {"array", "object"}:
        raise _refusal(tool, f"its parameter {name!r} may be a text, a list or an object, which look alike here")
    end = writing.behind_value.rstrip("\n")
    if plain:
        values = [value if isinstance(value, str) else json.dumps(value) for value in plain]
        for value, written in zip(plain, values, strict=True):
            is_text = isinstance(value, str)
            if is_text and (end in written or (types != {"string"} and typed(written.strip(), types) is not None)):
                raise _refusal(tool, f"its parameter {name!r} has a text that would be read as something else here")
        return sequence(text(as_text), either(*map(text, values)), text(behind))
    return sequence(tag(as_text, any_text(), end), text(writing.behind_value[len(end) :]))


def _tagged_any(writing: TaggedArguments) -> Form:
    """Any argument, with a key that is a name."""
    end = writing.behind_value.rstrip("\n")
    behind = text(writing.behind_value[len(end) :])
    json_value = sequence({"type": "json_schema", "json_schema": True}, text(writing.pad + end))
    if writing.behind_json_key:
        free = tag(writing.behind_key, any_text(), end)
        value = either(free, sequence(text(writing.behind_json_key), json_value))
    else:
        # What begins as a list or an object is read as one.
        container = sequence(schema_of({"type": ["array", "object"]}), text(writing.pad + end))
        first = regex(r"[^ \t\n\r{\[<]")
        free = either(text(end), sequence(first, tag("", any_text(), end)))
        value = sequence(text(writing.behind_key + writing.pad), either(container, free))
    return sequence(text(writing.before_key), regex(KEYWORD), value, behind)


def _bare(quote: str, tool: Tool) -> Form:
    if not tool.strict:
        members = optional(several(sequence(regex(KEYWORD), text(":"), _bare_any(quote, _NESTING)), ","))
        return sequence(text("{"), members, text("}"))
    for name in tool.schema["properties"]:
        _check_key(tool, name)
    members = _members(
        tool, lambda name: sequence(text(f"{name}:"), _bare_value(quote, tool, _own(tool, name), name, MAX_DEPTH)), ","
    )
    return sequence(text("{"), members, text("}"))


def _bare_any(quote: str, nesting: int) -> Form:
    scalar = {"type": "json_schema", "json_schema": {"type": ["number", "boolean", "null"]}}
    values = [tag(quote, any_text(), quote), scalar]
    if nesting:
        inner = _bare_any(quote, nesting - 1)
        values.append(sequence(text("["), optional(several(inner, ",")), text("]")))
        member = sequence(regex(KEYWORD), text(":"), inner)
        values.append(sequence(text("{"), optional(several(member, ",")), text("}")))
    return either(*values)


def _bare_value(quote: str, tool: Tool, schema: Any, name: str, depth: int) -> Form:
    types = types_of(schema, tool.schema)
    beyond = _refusal(tool, f"its parameter {name!r} has a schema that this family's syntax cannot hold")
    if not isinstance(schema, dict) or not depth:
        raise beyond
    if not types & {"string", "array", "object"}:
        return schema_of(schema)
    if types == {"string"}:
        plain = _plain(schema, tool.schema)
        if plain is None or any(quote in value for value in plain):
            raise beyond
        free = tag(quote, any_text(), quote)
        return either(*(text(f"{quote}{value}{quote}") for value in plain)) if plain else free
    own = _followed(schema, tool.schema)
    if types == {"array"} and own.keys() <= _NOTES | {"type", "items", "$defs", "definitions"}:
        item = _bare_value(quote, tool, own.get("items"), name, depth - 1)
        return sequence(text("["), optional(several(item, ",")), text("]"))
    known = _NOTES | {"type", "properties", "required", "additionalProperties", "$defs", "definitions"}
    if types == {"object"} and own.keys() <= known:
        inner = Tool(name=tool.name, parameters={**tool.schema, "required": [], **own}, strict=True)
        for key in inner.schema["properties"]:
            _check_key(tool, key)
        members = _members(
            inner,
            lambda key: sequence(text(f"{key}:"), _bare_value(quote, inner, _own(inner, key), name, depth - 1)),
            ",",
        )
        return sequence(text("{"), members, text("}"))
    raise beyond


def _members(tool: Tool, argument: Argument, separator: str) -> Form:
    """The arguments of a strict tool: the required ones, in the order of its properties, then those that may be left
    out."""
    schema = tool.schema
    for key in BEYOND_PROPERTIES:
        if key in schema:
            raise _refusal(tool, "its parameters are not all in properties")
    properties = schema["properties"]
    if not set(schema.get("required", ())) <= properties.keys():
        raise _refusal(tool, "it requires a parameter that is not in properties")
    required = [name for name in properties if name in schema.get("required", ())]
    others = [name for name in properties if name not in required]

    def further(name: str) -> Form:
        return sequence(text(separator), argument(name)) if separator else argument(name)

    if required or not separator:
        first = [argument(name) for name in required[:1]]
        rest = [*map(further, required[1:]), *(optional(further(name)) for name in others)]
        return sequence(*first, *rest) if first or rest else text("")
    cases = [
        sequence(argument(name), *(optional(further(later)) for later in others[place + 1 :]))
        for place, name in enumerate(others)
    ]
    return optional(either(*cases)) if cases else text("")


def _own(tool: Tool, name: str) -> Any:
    """A parameter's schema, with what its references lead to."""
    schema = tool.schema
    own = schema["properties"][name]
    shared: Form = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    return {**shared, **own} if isinstance(own, dict) else own


def _followed(schema: Any, root: dict[str, Any]) -> dict[str, Any]:
    """What a schema that is a reference alone leads to."""
    for _ in range(MAX_DEPTH):
        if not isinstance(schema, dict) or "$ref" not in schema or not isinstance(schema["$ref"], str):
            break
        if schema.keys() - _NOTES - {"$ref", "$defs", "definitions"}:
            break
        schema = referred(schema["$ref"], root)
    return schema if isinstance(schema, dict) else {}


def _plain(schema: Any, root: dict[str, Any]) -> list[Any] | None:
    """The values that a text, or what may be one, is limited to; [] = any of its types; None = something else is said
    of them."""
    own = _followed(schema, root)
    said = own.keys() - _NOTES - {"$defs", "definitions"}
    if said <= {"type"}:
        return []
    if said <= {"type", "enum"}:
        return list(own["enum"])
    if said <= {"type", "const"}:
        return [own["const"]]
    if said in ({"anyOf"}, {"oneOf"}) and all(_plain(each, root) == [] for each in own[next(iter(said))]):
        return []
    return None


def _check_key(tool: Tool, name: str) -> None:
    if not name.strip() or name != name.strip() or len(name) > 256 or _NOT_IN_KEYS & set(name):
        raise _refusal(tool, f"its parameter {name[:64]!r} is no name")


def _refusal(tool: Tool, reason: str) -> InvalidRequest:
    return InvalidRequest(f"tool {tool.name} cannot be strict here: {reason}")


def _star(content: Form) -> Form:
    return {"type": "star", "content": content}
