"""The grammar of one call's arguments in each way of writing: what follows it is read as arguments of the schema.

A strict tool's arguments follow its schema to the letter, or the tool is refused by its name with the reason. Those of
another tool are any object, which has no lists and objects within it where a syntax has bare keys.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from inflight.asking.tools.forms import (
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
from inflight.asking.tools.syntax import Arguments, JsonArguments, PythonArguments, TaggedArguments
from inflight.asking.tools.tool import Tool
from inflight.asking.tools.value_types import MAX_DEPTH, SchemaTypes, referred, typed
from inflight.errors import InvalidRequest

ANY_OBJECT: Form = {"type": "object", "additionalProperties": True}
KEYWORD = "[a-zA-Z_][a-zA-Z0-9_]{0,63}"
BEYOND_PROPERTIES = (
    "$ref", "allOf", "anyOf", "oneOf", "not", "if", "const", "enum", "patternProperties", "propertyNames",
    "minProperties", "maxProperties", "dependentRequired", "dependentSchemas", "dependencies",
)  # fmt: skip
"""What a schema may say of arguments besides naming them one by one."""
_NOTES = frozenset({"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment"})
_NOT_IN_KEYS = frozenset('<>"\n{}[]:,')
MAX_VALUES = 256
"""Values in arguments of a tool, those within others included, where a syntax has them not as JSON."""

MAX_SHARED_BYTES = 2**20
"""Of a schema's definitions, which stand beside each of its parameters: more is beyond any engine's bound."""

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
        return {"type": "star", "content": _tagged_any(writing)}
    types = SchemaTypes(tool.schema)
    return _members(
        tool, lambda name: _tagged_value(writing, tool, name, types.of(tool.schema["properties"][name])), ""
    )


def _tagged_value(writing: TaggedArguments, tool: Tool, name: str, types: frozenset[str]) -> Form:
    _check_key(tool, name)
    schema = _own(tool, name)
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
    if tool.strict:
        return _BareGuide(quote, tool).object(tool.schema)
    # Lists and objects would nest the guide deeper than one may be.
    scalar = {"type": "json_schema", "json_schema": {"type": ["number", "boolean", "null"]}}
    member = sequence(regex(KEYWORD), text(":"), either(tag(quote, any_text(), quote), scalar))
    return sequence(text("{"), optional(several(member, ",")), text("}"))


class _BareGuide:
    """Of one strict tool."""

    def __init__(self, quote: str, tool: Tool) -> None:
        self._quote = quote
        self._tool = tool
        self._types = SchemaTypes(tool.schema)
        self._num_left = MAX_VALUES

    def object(self, schema: dict[str, Any]) -> Form:
        part = Tool(name=self._tool.name, parameters=schema, strict=True)
        properties = part.schema["properties"]
        for key in properties:
            _check_key(part, key)
        members = _members(part, lambda key: sequence(text(f"{key}:"), self._value(properties[key], key)), ",")
        return sequence(text("{"), members, text("}"))

    def _value(self, schema: Any, name: str) -> Form:
        quote, types = self._quote, self._types.of(schema)
        self._num_left -= 1
        beyond = _refusal(self._tool, f"its parameter {name!r} has a schema that this family's syntax cannot hold")
        if not isinstance(schema, dict) or self._num_left < 0:
            raise beyond
        if not types & {"string", "array", "object"}:
            return schema_of({**_shared(self._tool.schema, schema), **schema})
        own = _followed(schema, self._tool.schema)
        said = own.keys() - _NOTES - {"$defs", "definitions"}
        if types == {"string"}:
            plain = _plain(schema, self._tool.schema)
            if plain is None or any(quote in value for value in plain):
                raise beyond
            free = tag(quote, any_text(), quote)
            return either(*(text(f"{quote}{value}{quote}") for value in plain)) if plain else free
        if types == {"array"} and said <= {"type", "items"}:
            item = self._value(own.get("items"), name)
            return sequence(text("["), optional(several(item, ",")), text("]"))
        if types == {"object"} and said <= {"type", "properties", "required", "additionalProperties"}:
            return self.object(own)
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
    num_bytes = len(properties) * len(json.dumps([schema.get("$defs"), schema.get("definitions")]))
    if num_bytes > MAX_SHARED_BYTES:
        raise _refusal(tool, f"its definitions would be {num_bytes} bytes long, one for each parameter")
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
    own = tool.schema["properties"][name]
    return {**_shared(tool.schema, own), **own} if isinstance(own, dict) else own


def _shared(root: dict[str, Any], schema: dict[str, Any]) -> Form:
    """What references within a part of a schema lead into."""
    has_references = '"$ref"' in json.dumps(schema)
    return {key: root[key] for key in ("$defs", "definitions") if key in root and has_references}


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
    if said in ({"anyOf"}, {"oneOf"}):
        ways = own[next(iter(said))]
        return [] if all(isinstance(each, dict) and each.keys() - _NOTES == {"type"} for each in ways) else None
    return None


def _check_key(tool: Tool, name: str) -> None:
    if not name.strip() or name != name.strip() or len(name) > 256 or _NOT_IN_KEYS & set(name):
        raise _refusal(tool, f"its parameter {name[:64]!r} is no name")


def _refusal(tool: Tool, reason: str) -> InvalidRequest:
    return InvalidRequest(f"tool {tool.name} cannot be strict here: {reason}")
