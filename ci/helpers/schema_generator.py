"""Random JSON schemas of the kinds that people use: tool parameters, records, unions, lists, trees. A seed gives the
same ones everywhere."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

NAMES = ("id", "name", "title", "count", "price", "tags", "status", "owner", "address", "notes", "created_at", "größe")
WORDS = ("low", "medium", "high", "open", "closed", "north", "south", "draft", "yes", 'a "quoted" one', "日本")
FORMATS = ("date", "date-time", "time", "email", "uuid", "ipv4", "hostname", "uri")
PATTERNS = (
    "^[A-Z]{2,4}-[0-9]{3}$",
    "^[a-z][a-z0-9_]*$",
    r"^\d{1,3}(\.\d{1,2})?$",
    "^#[0-9a-f]{6}$",
    "^(small|large)?$",
)
MAX_DEPTH = 3

Schema = dict[str, Any]


class SchemaGenerator:
    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def schema(self) -> Schema:
        """One whose values are objects, or a list or union of such."""
        kinds = (self._record, self._record, self._record, self._union, self._records, self._tree, self._linked)
        return {"title": "Answer", **self._random.choice(kinds)(0)}

    def _record(self, depth: int) -> Schema:
        names = self._random.sample(NAMES, self._random.randint(1, 5 - depth))
        required = [name for name in names if self._random.random() < 0.7]
        found = {"type": "object", "properties": {name: self._value(depth + 1) for name in names}, "required": required}
        return found if self._random.random() < 0.2 else {**found, "additionalProperties": False}

    def _value(self, depth: int) -> Schema:
        kinds: list[Callable[[int], Schema]] = [self._string, self._number, self._choice, self._flag, self._nullable]
        if depth < MAX_DEPTH:
            kinds += [self._record, self._list, self._map]
        return self._random.choice(kinds)(depth)

    def _string(self, depth: int) -> Schema:
        draw = self._random
        most = draw.randint(3, 30)
        bounds: list[Schema] = [{}, {"minLength": draw.randint(0, 3), "maxLength": most}, {"maxLength": most}]
        bounds += [{"format": draw.choice(FORMATS)}, {"pattern": draw.choice(PATTERNS)}]
        return {"type": "string", **draw.choice(bounds)}

    def _number(self, depth: int) -> Schema:
        draw = self._random
        least = draw.randint(-1000, 1000)
        bounds: list[Schema] = [{}, {"minimum": least}, {"minimum": least, "maximum": least + draw.randint(0, 5000)}]
        bounds += [{"exclusiveMinimum": 0, "maximum": 1}]
        if draw.random() < 0.2:
            return {"type": "integer", "multipleOf": draw.choice((1, 2, 5, 10))}
        return {"type": draw.choice(("integer", "number")), **draw.choice(bounds)}

    def _choice(self, depth: int) -> Schema:
        draw = self._random
        if draw.random() < 0.2:
            return {"enum": [f"{draw.choice(WORDS)}-{number}" for number in range(draw.randint(50, 200))]}
        return {"type": "string", "enum": draw.sample(WORDS, draw.randint(1, len(WORDS)))}

    def _flag(self, depth: int) -> Schema:
        return {"type": "boolean", "description": "Whether it is so."}

    def _nullable(self, depth: int) -> Schema:
        inner = self._random.choice((self._string, self._number))(depth)
        if self._random.random() < 0.5:
            return {**inner, "type": [inner["type"], "null"]}
        return {"anyOf": [inner, {"type": "null"}]}

    def _list(self, depth: int) -> Schema:
        counts: list[Schema] = [{}, {"maxItems": self._random.randint(1, 6)}, {"minItems": 1, "maxItems": 4}]
        return {"type": "array", "items": self._value(depth + 1), **self._random.choice(counts)}

    def _map(self, depth: int) -> Schema:
        return {"type": "object", "additionalProperties": self._value(depth + 1)}

    def _records(self, depth: int) -> Schema:
        return {"type": "array", "items": self._record(1), "minItems": 1, "maxItems": 3}

    def _union(self, depth: int) -> Schema:
        """Told apart by a constant."""
        branches = []
        for kind in self._random.sample(WORDS, self._random.randint(2, 4)):
            record = self._record(1)
            record["properties"] = {"kind": {"const": kind}, **record["properties"]}
            record["required"] = ["kind", *record["required"]]
            branches.append(record)
        return {self._random.choice(("anyOf", "oneOf")): branches}

    def _tree(self, depth: int) -> Schema:
        node = self._record(1)
        node["properties"]["children"] = {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 3}
        return {"$defs": {"node": node}, "$ref": "#/$defs/node"}

    def _linked(self, depth: int) -> Schema:
        node = self._record(1)
        node["properties"]["next"] = {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}
        node["required"].append("next")
        return {"$defs": {"node": node}, "type": "object", "properties": {"first": {"$ref": "#/$defs/node"}}}
