"""How a family of models writes calls of tools, as data: parser and grammar are both made from it.

Texts here are as the family's chat templates have them. The grammar writes exactly that. The parser takes any white
space where a text has some at its edges or at an end of line, and any of the other beginnings.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterator
from dataclasses import dataclass, fields, is_dataclass

_TAG = re.compile(r"<[^<>]+>|\[[A-Z_]+\]|｜\w+｜")
"""What may be one token of its own."""


@dataclass(frozen=True)
class JsonArguments:
    """One JSON object."""


@dataclass(frozen=True, kw_only=True)
class TaggedArguments:
    """Each between tags, behind its key. A text stands as it is, up to the tag behind it; other values are JSON. Which
    of both it is follows from the tool's schema, or from the tag behind the key."""

    before_key: str
    behind_key: str
    behind_value: str
    behind_json_key: str = ""
    """Stands in the place of `behind_key`, which then means text, before any value as JSON; "" = the schema decides."""
    pad: str = ""
    """"\\n" if a value stands on lines of its own: one at each of its ends is not a part of it."""


@dataclass(frozen=True)
class PythonArguments:
    """By keyword, in round brackets, with literals as values."""


@dataclass(frozen=True, kw_only=True)
class BareArguments:
    """As JSON, but with keys as they are and texts between two of the same tag, within which nothing is escaped."""

    quote: str


Arguments = JsonArguments | TaggedArguments | PythonArguments | BareArguments


@dataclass(frozen=True, kw_only=True)
class ObjectCall:
    """{"name": "f", "arguments": {…}}"""

    key: str = "arguments"
    """Of the arguments, as the grammar has it. The parser takes "arguments" and "parameters"."""


@dataclass(frozen=True, kw_only=True)
class NamedCall:
    """A name, then the arguments."""

    arguments: Arguments
    before_name: str = ""
    behind_name: str = ""
    may_omit_behind_name: bool = False
    """Whether the parser takes arguments right behind the name, too."""
    before_id: str = ""
    """Stands between the name and the model's own id of the call."""
    id_pattern: str = ""
    id_token: str = ""
    """Special token without which the grammar has no id; "" = it always has one."""
    kept_id: str = ""
    """What becomes the call's id: a format of `name` and `id`; "" = the server's own."""
    behind_arguments: str = ""


Call = ObjectCall | NamedCall


@dataclass(frozen=True, kw_only=True)
class CallForm:
    """What stands behind the tag that begins calls."""

    call: Call
    in_list: bool = False
    """Whether brackets are around the calls."""
    between: str | None = None
    """Stands between calls that follow one tag; None = there is one."""
    needs: str = ""
    """Special token of the checkpoint without which its models write another form."""


@dataclass(frozen=True, kw_only=True)
class CallSyntax:
    """Of one family."""

    forms: tuple[CallForm, ...]
    """The parser takes each: a list by its bracket. The grammar takes the first whose token the checkpoint has."""
    begin: str = ""
    """Begins calls, anywhere in the text, with the bracket of a list if it ends so; "" = they are the whole text."""
    also_begins: tuple[str, ...] = ()
    """What the parser takes in its place."""
    end: str = ""
    """May be missing."""
    joint: str | None = None
    """Stands between an end and the next beginning; None = nothing follows calls."""
    is_bare: bool = False
    """Whether a text that is calls alone may have no beginning."""
    in_messages: bool = False
    """Whether all of the output is messages, and calls are some of them: their headers as channels.py hands them on."""
    within_text: tuple[str, ...] = ()
    """Beginnings of a call without a tag by which it is known behind other text."""

    @property
    def begins(self) -> tuple[str, ...]:
        """The tags that begin calls, without white space."""
        return tuple(text.strip() for text in (self.begin, *self.also_begins) if text)

    def form(self, special_tokens: Container[str]) -> CallForm:
        """The one that a checkpoint with these special tokens writes."""
        return next(form for form in self.forms if not form.needs or form.needs in special_tokens)

    def head(self, name: str) -> list[str]:
        """How calls of a tool may begin, each as the grammar has it."""
        return [
            self.begin + ("[" if form.in_list else "") + form.call.before_name + name + form.call.behind_name
            for form in self.forms
            if isinstance(form.call, NamedCall)
        ]

    def tags(self) -> frozenset[str]:
        """All that may be special tokens: the text has to be made with them."""
        return frozenset(tag for text in _texts(self) for tag in _TAG.findall(text))


def pieces_of(text: str) -> tuple[str, ...]:
    """What is left of a text where white space at the ends of its lines does not matter."""
    return tuple(line.strip() for line in text.split("\n") if line.strip())


def _texts(part: object) -> Iterator[str]:
    """All texts of a description."""
    if isinstance(part, str):
        yield part
    elif isinstance(part, tuple):
        for each in part:
            yield from _texts(each)
    elif is_dataclass(part):
        for field in fields(part):
            yield from _texts(getattr(part, field.name))
