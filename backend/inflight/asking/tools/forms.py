"""Parts of XGrammar's description of structural tags, in which the grammars of calls are written."""

from __future__ import annotations

from typing import Any

from inflight.guided_decoding import MAX_WHITE_SPACE

Form = dict[str, Any]


def schema_of(schema: Any) -> Form:
    """JSON that follows a schema."""
    return {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": MAX_WHITE_SPACE}


def text(value: str) -> Form:
    return {"type": "const_string", "value": value}


def regex(pattern: str) -> Form:
    return {"type": "regex", "pattern": pattern}


def any_text() -> Form:
    return {"type": "any_text"}


def sequence(*elements: Form) -> Form:
    return _joined("sequence", elements)


def either(*elements: Form) -> Form:
    return _joined("or", elements)


def optional(content: Form) -> Form:
    return {"type": "optional", "content": content}


def several(form: Form, separator: str) -> Form:
    """One or more."""
    further = sequence(text(separator), form) if separator else form
    return sequence(form, {"type": "star", "content": further})


def tag(begin: str, content: Form, end: str = "") -> Form:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def separated(calls: list[Form], separator: str, *, is_one: bool) -> Form:
    """One of some tags or, unless `is_one`, more of them."""
    return {
        "type": "tags_with_separator",
        "tags": calls,
        "separator": separator,
        "at_least_one": True,
        "stop_after_first": is_one,
    }


def _joined(kind: str, elements: tuple[Form, ...]) -> Form:
    """Parts of the same kind become one, because a guide may be nested only so deep; one element stands for itself."""
    parts = [part for each in elements for part in (each["elements"] if each["type"] == kind else [each])]
    return parts[0] if len(parts) == 1 else {"type": kind, "elements": parts}
