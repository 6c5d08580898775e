"""Whether the text of an answer follows its guide, by a judge that had no part in making it (`guided_decoding_check`).

JSON, schemas and choices are judged. Expressions, grammars and tags are not: what matches them is known by running them
once more, and an expression of a client's may run for ever. Of a schema whose answer may leave out what cannot be
enforced, JSON alone is.
"""

from __future__ import annotations

import json
from decimal import Decimal
from functools import lru_cache
from typing import Any, NamedTuple

import jsonschema_rs
from msgspec import structs

from inflight.guided_decoding import GuidedDecodingParams, GuideType, Reasoning, json_nesting
from inflight.guides.limits import MAX_TRANSLATIONS
from inflight.guides.schema.documents import OLD_DRAFTS, escaped
from inflight.guides.translate import ANY_OBJECT, translate

MAX_NESTING = 200
"""Levels of brackets in an answer that is judged: the library walks through it by recursion, on the thread's stack."""
MAX_INTEGER_DIGITS = 4_000
"""Of a Python int that is read; it refuses to read more than 4,300."""
_OLD_VALIDATORS = {
    "draft-03": jsonschema_rs.Draft4Validator,
    "draft-04": jsonschema_rs.Draft4Validator,
    "draft-05": jsonschema_rs.Draft4Validator,
    "draft-06": jsonschema_rs.Draft6Validator,
    "draft-07": jsonschema_rs.Draft7Validator,
}
_NEW_VALIDATORS = (
    jsonschema_rs.Draft202012Validator,
    jsonschema_rs.Draft201909Validator,
    jsonschema_rs.Draft4Validator,
)
"""Guides without an old `$schema` may be written with older keywords all the same: `items` as a list, an
`exclusiveMinimum` that is true. The newest draft whose schema it is judges it."""


class Breach(NamedTuple):
    """Where an answer breaks its guide. It holds nothing of the answer."""

    pointer: str
    """JSON pointer within the guide, of the schema that is broken."""
    keyword: str
    """Of that schema, "false" of one that is so; of a guide that is no schema, and of an answer that is no JSON, the
    guide's type."""


class NotChecked(Exception):
    """There is no judge of this guide, or none of this answer."""


def find_breach(params: GuidedDecodingParams, text: str) -> Breach | None:
    """Where `text`, a whole output, breaks its guide; None = it follows it. Raises NotChecked."""
    own = Breach("", params.guide_type.value)
    answer = text if params.reasoning is None else _behind(params.reasoning, text)
    if params.guide_type is GuideType.CHOICE:
        choices = json.loads(params.guide)
        if params.reasoning is not None:  # white space before the answer may belong to it, or may not
            answer, choices = answer.strip(), [choice.strip() for choice in choices]
        return None if answer in choices else own
    if params.guide_type not in (GuideType.JSON, GuideType.JSON_SCHEMA):
        raise NotChecked
    if answer.count("[") + answer.count("{") > MAX_NESTING and json_nesting(answer) > MAX_NESTING:
        raise NotChecked
    try:
        value = json.loads(answer, parse_int=_integer, parse_float=Decimal, parse_constant=_no_json)
    except ValueError:
        return own
    if not _is_enforced(params):
        return None
    return _first_breach(_validator(params.guide, asserts_formats=bool(params.grammar)), value)


def _is_enforced(params: GuidedDecodingParams) -> bool:
    """Whether the grammar holds all that the guide says. XGrammar, which needs none, does not tell what it drops."""
    if params.is_strict:
        return True
    return bool(params.grammar) and not translate(structs.replace(params, grammar="")).not_enforced


def _behind(reasoning: Reasoning, text: str) -> str:
    """The answer of an output that may begin with thoughts."""
    if reasoning.before_answer:
        return text.rpartition(reasoning.before_answer)[2]
    if reasoning.is_open or text.startswith(reasoning.opening):
        return text.partition(reasoning.closing)[2]
    return text


def _first_breach(validator: Any, value: Any) -> Breach | None:
    error = next(validator.iter_errors(value), None)
    if error is None:
        return None
    path: list[str | int] = list(error.schema_path)
    *steps, keyword = [*path, "false"] if error.kind.name == "falseSchema" else path
    return Breach("".join(f"/{escaped(step)}" for step in steps), str(keyword))


def _integer(digits: str) -> int | Decimal:
    return int(digits) if len(digits) <= MAX_INTEGER_DIGITS else Decimal(digits)


def _no_json(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


@lru_cache(maxsize=MAX_TRANSLATIONS)
def _validator(guide: str, *, asserts_formats: bool) -> Any:
    """Of the draft that a guide's translation follows. `asserts_formats`: whether formats are enforced; by llguidance
    all that the validator knows are, or the guide was refused."""
    schema = json.loads(guide) if guide else ANY_OBJECT
    said = str(schema.get("$schema", ""))
    old = [_OLD_VALIDATORS[draft] for draft in OLD_DRAFTS if draft in said]
    for draft in old[:1] or _NEW_VALIDATORS:
        try:
            return draft(
                schema,
                validate_formats=asserts_formats,
                pattern_options=jsonschema_rs.RegexOptions(),  # in linear time
                offline=True,
            )
        except (jsonschema_rs.ValidationError, ValueError):
            continue
    raise NotChecked
