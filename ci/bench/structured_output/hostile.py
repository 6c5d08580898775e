"""Guides that are built to do harm: how long until each is refused or compiled, and its longest mask."""

from __future__ import annotations

import json
from time import process_time
from typing import Any

import msgspec
import numpy as np
from guides import BOMBS, HEAVY, guide
from sampled_answers import Draws

from ci.bench.structured_output.guide_times import warm_library
from inflight.errors import InvalidRequest
from inflight.guided_decoding import MAX_NESTING, GuidedDecodingParams, GuideType
from inflight.guides.translate import translate
from inflight.runtime.guided.library import GrammarRefused
from inflight.runtime.guided.llguidance_library import LlguidanceLibrary
from inflight.runtime.guided.vocabulary import Vocabulary

LIMIT_MS = 100
"""Within which a hostile guide is refused."""
MASK_LIMIT_MS = 5
WALK_TOKENS = 100
WALKS = 3
DECISIONS = 3


def _schema(schema: Any) -> GuidedDecodingParams:
    return guide(GuideType.JSON_SCHEMA, json.dumps(schema))


def _nested(depth: int, inner: Any) -> Any:
    for _ in range(depth):
        inner = {"type": "object", "properties": {"a": inner}, "required": ["a"]}
    return inner


def hostile_guides() -> dict[str, GuidedDecodingParams]:
    regex, ebnf, lark = GuideType.REGEX, GuideType.EBNF_GRAMMAR, GuideType.LARK_GRAMMAR
    string = {"type": "string"}
    doubling = {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(40)}
    choices = {f"c{i}": {"anyOf": [{"$ref": f"#/$defs/c{i + 1}"}, {"minLength": i}]} for i in range(40)}
    return {
        **BOMBS,
        **HEAVY,
        "exponential for a backtracking matcher": guide(regex, "(a+)+$"),
        "exponential states": guide(regex, "(a|b)*a(a|b){400}"),
        "a large repetition": guide(regex, "[a-z]{1,100000}"),
        "a large repetition of groups": guide(regex, "(ab?c{2,9}){1,100000}"),
        "many alternatives that begin alike": guide(regex, "|".join("a" * n + "b" for n in range(1, 120))),
        "classes of Unicode, repeated": guide(regex, r"(\w{1,200}\s{1,200}){20}"),
        "groups in groups": guide(regex, "(" * (MAX_NESTING + 1) + "a" + ")" * (MAX_NESTING + 1)),
        "rules without end": guide(ebnf, "root ::= a\na ::= b\nb ::= a"),
        "an ambiguous grammar": guide(ebnf, 'root ::= root root | "a" | root root root'),
        "a large repetition of a rule": guide(ebnf, 'root ::= a{1,100000}\na ::= "x" a | "y"'),
        "a rule that is not there": guide(ebnf, "root ::= nowhere"),
        "Lark with broken syntax": guide(lark, 'start: "a" ('),
        "Lark with a large repetition": guide(lark, 'start: a{1,100000}\na: "x" a | "y"'),
        "text that is no JSON": guide(GuideType.JSON_SCHEMA, '{"type": "object"'),
        "a schema in deep nesting": _schema(_nested(MAX_NESTING, string)),
        "a schema within the nesting that is allowed": _schema(_nested(MAX_NESTING // 2 - 2, string)),
        "a keyword that is not known": _schema({"type": "object", "requird": ["a"]}),
        "a type that is not known": _schema({"type": "objekt"}),
        "a keyword with a wrong value": _schema({"type": "string", "maxLength": "4"}),
        "a reference to nothing": _schema({"$ref": "#/$defs/nothing"}),
        "a reference elsewhere": _schema({"$ref": "https://example.org/schema.json"}),
        "references in a circle": _schema(
            {"$defs": {n: {"$ref": f"#/$defs/{m}"} for n, m in ("ab", "ba")}, "$ref": "#/$defs/a"}
        ),
        "an object that never ends": _schema(
            {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"], "additionalProperties": False}
        ),
        "references that double": _schema({"$defs": {**doubling, "d40": string}, "$ref": "#/$defs/d0"}),
        "alternatives that multiply": _schema(
            {"allOf": [{"anyOf": [{"minLength": i}, {"maxLength": i}]} for i in range(30)], **string}
        ),
        "alternatives of alternatives": _schema({"$defs": {**choices, "c40": string}, "$ref": "#/$defs/c0"}),
        "an enumeration of 5,000": _schema({"enum": [f"w{n:07d}" for n in range(5000)]}),
        "an enumeration of long texts": _schema({"enum": ["x" * 2000 + str(n) for n in range(30)]}),
        "long strings": _schema({"type": "string", "maxLength": 10**9}),
        "long lists": _schema({"type": "array", "items": string, "minItems": 10**6}),
        "long lists in long lists": _schema(
            {"type": "array", "maxItems": 900, "items": {"type": "array", "maxItems": 900}}
        ),
        "1,000 optional properties": _schema({"type": "object", "properties": {f"p{n}": string for n in range(1000)}}),
        "a pattern that is large": _schema({"type": "string", "pattern": "^([a-z]{1,300}[0-9]{1,300}){1,300}$"}),
        "a pattern of exponential states": _schema({"type": "string", "pattern": "(a|b)*a(a|b){300}"}),
        "a pattern with broken syntax": _schema({"type": "string", "pattern": "(["}),
        "a pattern in lengths": _schema({"type": "string", "pattern": "a.*b.*c.*d.*e", "maxLength": 3000}),
        "60 patterns for names": _schema(
            {"type": "object", "patternProperties": {f"{c}+{d}": {} for c in "abcdefgh" for d in "stuvwxyz"}}
        ),
        "many negations of patterns": _schema({"allOf": [{"not": {"pattern": f"^a{{{n}}}b"}} for n in range(150)]}),
        "patterns that overlap in all ways": _schema(
            {"patternProperties": {c: {"maximum": ord(c)} for c in "abcdefg"}}
        ),
        "many negations": _schema({"not": {"not": {"not": {"not": {"not": {"enum": list(range(500))}}}}}}),
        "multiples beyond reason": _schema({"type": "number", "multipleOf": 1e-300, "minimum": 0, "maximum": 1e300}),
        "multiples of a large number": _schema({"type": "integer", "multipleOf": 123456789}),
        "multiples of a large number between bounds": _schema(
            {"type": "number", "multipleOf": 10**7, "minimum": -1.5, "maximum": 987654321}
        ),
        "multiples of many": _schema(
            {"type": "integer", "allOf": [{"multipleOf": n} for n in (9973, 9967, 9949, 9941)]}
        ),
        "unique lists": _schema({"type": "array", "items": {"enum": list(range(60))}, "uniqueItems": True}),
        "dependencies of all": _schema(
            {"type": "object", "dependentRequired": {f"p{i}": [f"p{j}" for j in range(30)] for i in range(30)}}
        ),
        "3,000 choices": guide(GuideType.CHOICE, json.dumps([f"choice {n}" for n in range(3000)])),
        "200 tags with a schema each": guide(GuideType.STRUCTURAL_TAG, json.dumps(_tags(200))),
    }


def _tags(count: int) -> Any:
    record = {"type": "object", "properties": {"a": {"type": "string", "maxLength": 50}}, "required": ["a"]}
    tags = [
        {
            "type": "tag",
            "begin": f"<f{n}>",
            "content": {"type": "json_schema", "json_schema": record},
            "end": f"</f{n}>",
        }
        for n in range(count)
    ]
    return {"type": "structural_tag", "format": {"type": "triggered_tags", "triggers": ["<f"], "tags": tags}}


def _decided(params: GuidedDecodingParams) -> tuple[float, str, str]:
    """Milliseconds, and the grammar or the sentence of the refusal."""
    grammar = sentence = ""
    start = process_time()
    try:
        grammar = translate.__wrapped__(params).grammar
    except InvalidRequest as refused:
        sentence = str(refused)
    return _ms(start), grammar, sentence


def measure(params: GuidedDecodingParams, library: LlguidanceLibrary, draws: Draws) -> dict[str, Any]:
    """Milliseconds of one core until the front has decided (the least of three times: others use the machine too), of
    the engine's compilation, and of the longest mask along random walks; and the sentence, if it was refused."""
    found: dict[str, Any] = {"front": 0.0, "compile": 0.0, "mask": 0.0, "sentence": ""}
    decisions = [_decided(params) for _ in range(DECISIONS)]
    found["front"] = min(elapsed for elapsed, _, _ in decisions)
    _, grammar, found["sentence"] = decisions[0]
    if not grammar:
        return found
    start = process_time()
    try:
        compiled = library.compile(msgspec.structs.replace(params, grammar=grammar))
    except GrammarRefused as refused:
        found["sentence"] = str(refused)
        return found
    finally:
        found["compile"] = _ms(start)
    words = np.zeros((1, -(-len(draws.texts) // 32)), dtype=np.uint32)
    for _ in range(WALKS):
        state = compiled.start()
        for _ in range(WALK_TOKENS):
            start = process_time()
            ((_, error),) = library.fill([state], words)
            found["mask"] = max(found["mask"], _ms(start))
            found["sentence"] = found["sentence"] or error
            token = None if error else draws.token(words[0], 0)
            if token is None:
                break
            try:
                state.accept(token)
            except GrammarRefused as refused:
                found["sentence"] = str(refused)
                break
    return found


def hostile_times(vocabulary: Vocabulary, seed: int) -> dict[str, dict[str, Any]]:
    library, draws = warm_library(vocabulary), Draws(vocabulary, seed)
    return {name: measure(params, library, draws) for name, params in hostile_guides().items()}


def _ms(start: float) -> float:
    return round((process_time() - start) * 1e3, 2)
