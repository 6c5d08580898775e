"""The grammar that an answer follows."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from inflight.asking.tools.forms import Form, schema_of
from inflight.guided_decoding import GuidedDecodingParams, GuideType


class Guide(msgspec.Struct, frozen=True, kw_only=True):
    params: GuidedDecodingParams
    form: Form | None = None
    """The same as a part of tags: where the model may call tools, it calls some or answers in this form. None: such a
    grammar and that of calls exclude each other."""


def object_guide() -> Guide:
    """Any object as the form of an answer."""
    form = schema_of({"type": "object", "additionalProperties": True})
    return Guide(params=GuidedDecodingParams(guide_type=GuideType.JSON), form=form)


def schema_guide(schema: dict[str, Any], *, is_strict: bool) -> Guide:
    """What a schema allows, as the form of an answer. `is_strict`: whether what cannot be enforced is refused, and not
    left out."""
    return Guide(params=schema_params(schema, is_strict=is_strict), form=schema_of(schema))


def schema_params(schema: str | dict[str, Any], *, is_strict: bool = True) -> GuidedDecodingParams:
    text = schema if isinstance(schema, str) else json.dumps(schema)
    return GuidedDecodingParams(guide_type=GuideType.JSON_SCHEMA, guide=text, is_strict=is_strict)
