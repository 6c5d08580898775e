"""The keywords of JSON Schema, and what is near enough to one to be a misspelling."""

from __future__ import annotations

import difflib

TYPES = ("null", "boolean", "number", "string", "array", "object")

NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
STRINGS = ("minLength", "maxLength", "pattern", "format")
ARRAYS = (
    "prefixItems",
    "items",
    "additionalItems",
    "minItems",
    "maxItems",
    "contains",
    "minContains",
    "maxContains",
    "uniqueItems",
    "unevaluatedItems",
)
OBJECTS = (
    "properties",
    "patternProperties",
    "additionalProperties",
    "required",
    "minProperties",
    "maxProperties",
    "propertyNames",
    "dependentRequired",
    "dependentSchemas",
    "dependencies",
    "unevaluatedProperties",
)
IN_PLACE = ("type", "const", "enum", "allOf", "anyOf", "oneOf", "not", "if", "then", "else")
REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
KNOWN = (*NUMBERS, *STRINGS, *ARRAYS, *OBJECTS, *IN_PLACE, *REFERENCES)

ONE_SCHEMA = (
    "not",
    "if",
    "then",
    "else",
    "items",
    "additionalItems",
    "contains",
    "unevaluatedItems",
    "additionalProperties",
    "propertyNames",
    "unevaluatedProperties",
)
MANY_SCHEMAS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
NAMED_SCHEMAS = ("properties", "patternProperties", "dependentSchemas", "dependencies", "$defs", "definitions")
"""Where the schemas of a schema are: those that can hold identifiers and anchors."""

ANNOTATIONS = frozenset(
    {"$anchor", "$comment", "$defs", "$dynamicAnchor", "$id", "$recursiveAnchor", "$schema", "$vocabulary", "content"}
    | {"contentEncoding", "contentMediaType", "contentSchema", "default", "definitions", "deprecated", "description"}
    | {
        "discriminator",
        "example",
        "examples",
        "externalDocs",
        "id",
        "nullable",
        "readOnly",
        "title",
        "writeOnly",
        "xml",
    }
    | {"strict", "name", "order", "unit", "units", "label", "pattern_description"}
)
"""What the standard and OpenAPI 3 only annotate with, and names that people give to annotations of their own."""


def misspelt(keyword: str) -> str | None:
    """The keyword that an unknown one is likely to mean. None: it is an annotation."""
    if keyword in ANNOTATIONS or keyword.startswith(("x-", "$")):
        return None
    alike = [k for k in KNOWN if abs(len(k) - len(keyword)) < 3 and (k[:2] == keyword[:2] or k[-3:] == keyword[-3:])]
    near = difflib.get_close_matches(keyword, alike, n=1, cutoff=0.82)
    return near[0] if near else None
