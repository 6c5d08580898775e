"""What a request asks of guided decoding: output that follows a grammar. Its bounds are checked here, without a parser.

The names are TensorRT-LLM's, as far as it has them. Grammars are made of it in inflight.guides.
"""

from __future__ import annotations

import json
import re
from enum import Enum

import msgspec

from inflight.errors import InvalidRequest

MAX_GUIDE_BYTES = 8192
"""Of a regular expression or a grammar."""
MAX_JSON_GUIDE_BYTES = 65536
"""Of a schema, or of tags with the schemas of many tools."""
MAX_GRAMMAR_CHARACTERS = 1024 * 1024
"""Of what a guide is translated to."""
MAX_NESTING = 32
"""Depth of the brackets in a guide."""


class GuidedDecodingBackend(str, Enum):
    """The library that follows guides."""

    LLGUIDANCE = "llguidance"
    """A guide is followed exactly, or refused; its limits count work."""
    XGRAMMAR = "xgrammar"
    """It takes more schemas, and drops in silence what it cannot express; neither time nor memory is bounded."""

    def is_meant_by(self, name: str) -> bool:
        """Whether clients of vLLM that name a library per request, by its own name or by vLLM's, get what they want."""
        return name in ("", "auto", self.value) or (name == "guidance" and self is GuidedDecodingBackend.LLGUIDANCE)


class GuideType(str, Enum):
    """What `GuidedDecodingParams.guide` is."""

    JSON = "json"
    """Any JSON object. Without a guide."""
    JSON_SCHEMA = "json_schema"
    """A JSON schema; properties that it does not name are not generated."""
    REGEX = "regex"
    """A regular expression, which the whole output matches."""
    EBNF_GRAMMAR = "ebnf_grammar"
    """A grammar in GBNF, whose first rule is `root`."""
    LARK_GRAMMAR = "lark_grammar"
    """A grammar in llguidance's Lark, whose first rule is `start`."""
    CHOICE = "choice"
    """A JSON list of texts, one of which is the whole output."""
    STRUCTURAL_TAG = "structural_tag"
    """XGrammar's JSON description of tags in free text, and of the content of each."""


_EBNF_RULE = re.compile(r"^[ \t]*[A-Za-z0-9_.-]+(?:\s|#[^\n]*\n)*::=", re.MULTILINE)
_LARK_START = re.compile(r"^[ \t]*[?!]*start\b[^:\n]*:", re.MULTILINE)


def grammar_type(grammar: str) -> GuideType:
    """Which of its two syntaxes a grammar is in, for dialects that do not say: EBNF defines a rule by `::=`, Lark by a
    colon. A grammar with a rule of EBNF is in it, as its other lines may begin with `start ":"`."""
    is_lark = _EBNF_RULE.search(grammar) is None and _LARK_START.search(grammar) is not None
    return GuideType.LARK_GRAMMAR if is_lark else GuideType.EBNF_GRAMMAR


class WhiteSpace(str, Enum):
    """What stands between the parts of a JSON text."""

    DUMPS = "dumps"
    """As Python's json.dumps writes it: a space behind commas and colons."""
    COMPACT = "compact"
    """Nothing."""
    FREE = "free"
    """Any white space that JSON allows, within bounds."""


MAX_WHITE_SPACE = 8
"""Characters of free white space in one place; without a bound, weak models write no others."""
_CHARACTERS = {" ": " ", r"\t": "\t", r"\n": "\n", r"\r": "\r", "\t": "\t", "\n": "\n", "\r": "\r", r"\s": " \t\n\r"}
_ONE = "|".join(map(re.escape, _CHARACTERS))
_PATTERN = re.compile(rf"(?P<one>{_ONE}|\[(?:{_ONE})+\])(?P<count>[*+?]|\{{(?P<low>\d{{1,4}}),(?P<high>\d{{0,4}})\}})")
NO_SUCH_SPACE = "it must be one class of white space, and allow none of it, as [ ]? does"


def white_space_of(pattern: str) -> WhiteSpace | None:
    """For clients of vLLM, who give a regular expression of what may stand between two parts: the freest WhiteSpace of
    which it matches all. None if it matches all of none, or is not one repeated class of characters."""
    found = _PATTERN.fullmatch(pattern)
    if found is None:
        return None
    characters = {each for one in re.findall(_ONE, found["one"]) for each in _CHARACTERS[one]}
    least, most = {"*": ("0", ""), "+": ("1", ""), "?": ("0", "1")}.get(found["count"], (found["low"], found["high"]))
    if int(least) > 0:
        return None
    bound = MAX_WHITE_SPACE if most == "" else int(most)
    if characters >= set(" \t\n\r") and bound >= MAX_WHITE_SPACE:
        return WhiteSpace.FREE
    return WhiteSpace.DUMPS if " " in characters and bound else WhiteSpace.COMPACT


class Reasoning(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Free text that an output begins with: what a model thinks before its answer."""

    opening: str
    """Tag that begins it."""
    closing: str
    """Tag that ends it."""
    is_open: bool = False
    """True: the prompt ends with the opening tag, so the output begins within. False: it need not think at all."""
    before_answer: str = ""
    """Text that begins the answer. With one there may be several thoughts."""
    behind: str = ""
    """Text that stands behind each of them."""
    excludes: tuple[str, ...] = ()
    """Texts that none of them holds."""


class GuidedDecodingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Equal ones share one compiled grammar."""

    guide_type: GuideType
    guide: str = ""
    """Text of the schema, expression, grammar or tags; empty for GuideType.JSON."""
    reasoning: Reasoning | None = None
    """What the grammar holds behind; None = it holds from the first token on."""
    shown_token_ids: tuple[int, ...] = ()
    """Special tokens that whoever reads the output sees as their text, so that they may stand for it. Without text, as
    all others are, a special token is allowed by no grammar."""
    white_space: WhiteSpace = WhiteSpace.DUMPS
    """Of JSON in the output."""
    is_strict: bool = True
    """Of a schema: True refuses what cannot be enforced; False says of it that it is not."""
    grammar: str = ""
    """What the front has made of it for llguidance (inflight.guides.translate); "" = nothing yet, or XGrammar follows
    the guide as it is."""

    def validate(self) -> None:
        """Raise InvalidRequest, with one sentence, if it is outside the bounds or certainly no such guide."""
        name = self.guide_type.value
        if self.grammar:
            if len(self.grammar) > MAX_GRAMMAR_CHARACTERS:
                raise InvalidRequest(f"the guide needs a grammar of more than {MAX_GRAMMAR_CHARACTERS} characters")
            return  # the front has seen to the rest
        if self.reasoning is not None and not (self.reasoning.opening and self.reasoning.closing):
            raise InvalidRequest("the reasoning before a grammar needs an opening and a closing tag")
        if self.guide_type is GuideType.JSON:
            if self.guide:
                raise InvalidRequest("guided decoding of type json takes no guide: use json_schema for a schema")
            return
        if not self.guide:
            raise InvalidRequest(f"guided decoding of type {name} needs a guide")
        is_json = self.guide_type in (GuideType.JSON_SCHEMA, GuideType.STRUCTURAL_TAG, GuideType.CHOICE)
        num_bytes = len(self.guide.encode("utf-8", "surrogatepass"))
        most = MAX_JSON_GUIDE_BYTES if is_json else MAX_GUIDE_BYTES
        if num_bytes > most:
            raise InvalidRequest(f"the guide has {num_bytes} bytes, more than {most}")
        if "\0" in self.guide:
            raise InvalidRequest("the guide holds a null character")
        depth = json_nesting(self.guide) if is_json else _nesting(self.guide, self.guide_type)
        if depth > MAX_NESTING:
            raise InvalidRequest(f"the guide is nested {depth} levels deep, more than {MAX_NESTING}")
        if is_json:
            self._check_json()

    def _check_json(self) -> None:
        try:
            value = json.loads(self.guide)
        except (ValueError, RecursionError):
            raise InvalidRequest(f"the guide of type {self.guide_type.value} is not valid JSON") from None
        if self.guide_type is GuideType.CHOICE:
            if not isinstance(value, list) or not value or not all(isinstance(each, str) and each for each in value):
                raise InvalidRequest("the guide of type choice must be a JSON list of texts that are not empty")
        elif not isinstance(value, dict):
            raise InvalidRequest(f"the guide of type {self.guide_type.value} must be a JSON object")


def json_nesting(text: str) -> int:
    """Depth of the brackets outside strings."""
    return _deepest(text, opening="[{", closing="]}", quotes='"', sets=False)


def _nesting(text: str, guide_type: GuideType) -> int:
    """Depth of the parentheses outside character sets and, in a grammar, outside literals."""
    quotes = "" if guide_type is GuideType.REGEX else '"'
    return _deepest(text, opening="(", closing=")", quotes=quotes, sets=True)


def _deepest(text: str, *, opening: str, closing: str, quotes: str, sets: bool) -> int:
    depth = deepest = 0
    until = ""  # what ends the literal or the set that the character is in
    characters = iter(text)
    for character in characters:
        if character == "\\":
            next(characters, None)
        elif until:
            until = "" if character == until else until
        elif character in quotes:
            until = character
        elif sets and character == "[":
            until = "]"
        elif character in opening:
            depth += 1
            deepest = max(deepest, depth)
        elif character in closing:
            depth -= 1
    return deepest
