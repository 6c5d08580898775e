"""From a schema to one that llguidance enforces exactly, or a refusal."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from inflight.guides.refusal import GuideRefused
from inflight.guides.schema.documents import Documents
from inflight.guides.schema.expansion import Expansion
from inflight.guides.schema.facts import Claim
from inflight.guides.schema.omissions import Omissions
from inflight.guides.schema.writing import MAX_BYTES, Schema, Writing

MAX_READINGS = 16
"""Of a schema that is not strict. All but the last one find keywords that have to be left out."""
ESCAPES = '"\\\\bfnrt'


@dataclass(frozen=True)
class Prepared:
    schema: Schema
    """What `%json` of llguidance takes."""
    not_enforced: tuple[tuple[str, str], ...]
    """JSON pointer and keyword of what the schema asks and the grammar does not enforce; empty when strict."""
    escapes: str
    """Characters that may stand behind a backslash: the option `json_allowed_escapes` of llguidance."""

    def written(self, spacing: dict[str, Any]) -> str:
        """The schema's text, with llguidance's options."""
        options = {**spacing, "json_allowed_escapes": self.escapes}
        return json.dumps({**(self.schema if isinstance(self.schema, dict) else {}), "x-guidance": options})


def prepare_schema(
    schema: Any,
    *,
    is_strict: bool = True,
    closes_objects: bool = False,
) -> Prepared:
    """`schema`, rewritten: what the grammar of the result generates are instances of `schema`.

    The reference is draft 2020-12; older spellings mean what they mean in their drafts. Properties are generated in the
    order of `properties`, then required ones without a schema there, then all others. `is_strict` False: keywords that
    cannot be enforced are dropped, and named in the result. `closes_objects`: objects with `properties` or
    `patternProperties` and without a word about others get no others than required ones. Raises GuideRefused for what
    is malformed, what is beyond the bounds of work, what has no instance and, when strict, what cannot be enforced.
    """
    documents, omissions = Documents(schema), Omissions(is_strict)
    refused: GuideRefused | None = None
    for _ in range(MAX_READINGS):
        writing = Writing(Expansion(documents, omissions), closes_objects)
        try:
            made = writing.write(frozenset({Claim(documents.root)}))
        except RecursionError as error:
            raise GuideRefused("has schemas within one another too deep") from error
        if writing.has_known_among_others and writing.numbered is not None:
            omissions.postpone(writing.numbered)
        refused = omissions.close()
        if refused is None:
            return Prepared(_whole(made, writing), omissions.named, _escapes(writing))
    assert refused is not None
    raise refused


def _whole(made: Schema, writing: Writing) -> Schema:
    if made is False:
        raise GuideRefused("has no instance: nothing satisfies it")
    result = made
    if isinstance(made, dict) and writing.definitions:
        _check_ends(made, writing.definitions)
        result = {**made, "$defs": writing.definitions}
    if len(json.dumps(result)) > MAX_BYTES:
        raise GuideRefused(f"needs more than {MAX_BYTES} bytes", is_final=True)
    return result


def _escapes(writing: Writing) -> str:
    """With `u`, for the characters that JSON writes by their numbers alone, if no object has names of its own beside
    others: the library holds `"\\u0061"` for another name than `a`, and so for one of the others. Without `u` it leaves
    such characters out of constants, which would be others then, and are refused therefore."""
    return ESCAPES if writing.has_known_among_others else f"{ESCAPES}u"


def _check_ends(root: dict[str, Any], definitions: dict[str, Any]) -> None:
    """Raise GuideRefused if a schema requires itself without end, so that no instance is finite."""
    ending: set[str] = set()

    def ends(schema: Any) -> bool:
        if not isinstance(schema, dict):
            return schema is not False
        if "$ref" in schema:
            return schema["$ref"].rpartition("/")[2] in ending
        if "anyOf" in schema:
            return any(ends(one) for one in schema["anyOf"])
        if schema.get("type") == "object":
            return all(ends(schema.get("properties", {}).get(name, True)) for name in schema.get("required", ()))
        if schema.get("type") == "array":
            prefix = schema.get("prefixItems", [])
            fewest = schema.get("minItems", 0)
            return all(ends(one) for one in prefix[:fewest]) and (
                fewest <= len(prefix) or ends(schema.get("items", True))
            )
        return True

    while more := {name for name, one in definitions.items() if name not in ending and ends(one)}:
        ending |= more
    if len(ending) < len(definitions) or not ends(root):
        raise GuideRefused("has a schema that requires itself without end")
