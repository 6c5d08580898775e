"""XGrammar's structural tags (its 0.2.8, xgrammar.structural_tag): a JSON description of tags in text, and of what is
in each. Tags are text; what asks for tokens is refused, as are the styles of schemas that are not JSON.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from inflight.errors import InvalidRequest
from inflight.guided_decoding import GuidedDecodingParams, GuideType
from inflight.guides.lark.ebnf import read_ebnf
from inflight.guides.lark.expression import (
    ANY_TEXT,
    NOTHING,
    Characters,
    Either,
    Grammar,
    Json,
    Node,
    Reference,
    Repeat,
    Sequence,
    Text,
    Until,
    Without,
    children,
    is_regular,
    optional,
)
from inflight.guides.lark.python_regex import read_regex
from inflight.guides.limits import MAX_EXPANDED
from inflight.guides.refusal import GuideRefused

Form = dict[str, Any]


class JsonOf(Protocol):
    """What becomes of a schema, and where that is refused."""

    def __call__(self, schema: Any, pointer: str, *, is_compact: bool) -> Json: ...


FIELDS = {
    "const_string": {"value"},
    "json_schema": {"json_schema", "style", "any_order", "max_whitespace_cnt", "excludes"},
    "any_text": {"excludes", "max_tokens", "max_chars"},
    "grammar": {"grammar"},
    "regex": {"pattern"},
    "sequence": {"elements"},
    "or": {"elements"},
    "tag": {"begin", "content", "end"},
    "triggered_tags": {"triggers", "tags", "at_least_one", "stop_after_first", "excludes"},
    "tags_with_separator": {"tags", "separator", "at_least_one", "stop_after_first"},
    "optional": {"content"},
    "plus": {"content"},
    "star": {"content"},
    "repeat": {"min", "max", "content"},
    "dispatch": {"rules", "loop", "excludes"},
}
"""What each kind of a format may have besides its type."""
NEEDS_TOKENS = ("token", "exclude_token", "any_tokens", "token_triggered_tags", "token_dispatch")


def read_structural_tag(given: Form, json_of: JsonOf) -> Grammar:
    """Raises GuideRefused with the pointer of the format that is refused."""
    reader = _Reader(json_of)
    if "structures" in given:
        form: Any = _older(given)
        at = ""
    else:
        form, at = given.get("format"), "/format"
        if given.get("type") != "structural_tag" or not isinstance(form, dict):
            raise GuideRefused("is no structural tag: it needs type structural_tag and a format")
    return Grammar(reader.form(form, at, ()), reader.rules)


def _older(given: Form) -> Form:
    """The form with `structures` and `triggers`, as the later one."""
    structures, triggers = given["structures"], given.get("triggers")
    if not isinstance(structures, list) or not isinstance(triggers, list):
        raise GuideRefused("needs lists of structures and of triggers")
    tags = []
    for place, each in enumerate(structures):
        if not isinstance(each, dict) or not {"begin", "schema", "end"} <= each.keys():
            raise GuideRefused("needs begin, schema and end", pointer=f"/structures/{place}")
        content = {"type": "json_schema", "json_schema": each["schema"]}
        tags.append({"type": "tag", "begin": each["begin"], "content": content, "end": each["end"]})
    return {"type": "triggered_tags", "triggers": triggers, "tags": tags}


class _Reader:
    def __init__(self, json_of: JsonOf) -> None:
        self._json_of = json_of
        self.rules: dict[str, Node] = {}

    def form(self, form: Any, at: str, ends: tuple[str, ...]) -> Node:
        """`ends`: what follows the format in its tag; free text ends before the first of them, and the result then
        includes it. () = nothing does."""
        kind = form.get("type") if isinstance(form, dict) else None
        if kind in NEEDS_TOKENS:
            raise GuideRefused("asks for tokens instead of text, which is not served", pointer=at, keyword=str(kind))
        if kind == "qwen_xml_parameter":
            raise GuideRefused("asks for a style of parameters that is not served", pointer=at, keyword=kind)
        if kind not in FIELDS:
            raise GuideRefused("has a format of an unknown type", pointer=at, keyword="type")
        unknown = sorted(form.keys() - FIELDS[kind] - {"type"})
        if unknown:
            raise GuideRefused("has a field that is not known", pointer=at, keyword=unknown[0][:40])
        node: Node = getattr(self, f"_{kind}")(form, at, ends)
        if kind in ("any_text", "triggered_tags", "dispatch", "sequence"):
            return node
        return _closed(node, ends)

    def _const_string(self, form: Form, at: str, ends: tuple[str, ...]) -> Node:
        return Text(_text(form, "value", at))

    def _regex(self, form: Form, at: str, ends: tuple[str, ...]) -> Node:
        node: Node = _inner(GuideType.REGEX, _text(form, "pattern", at), at, read_regex)
        return node

    def _grammar(self, form: Form, at: str, ends: tuple[str, ...]) -> Node:
        grammar = _inner(GuideType.EBNF_GRAMMAR, _text(form, "grammar", at), at, read_ebnf)
        prefix = f"{len(self.rules)} "
        self.rules |= {prefix + name: _renamed(node, prefix) for name, node in grammar.rules.items()}
        return _renamed(grammar.start, prefix)

    def _json_schema(self, form: Form, at: str, ends: tuple[str, ...]) -> Node:
        for name, default in (("style", "json"), ("any_order", False), ("excludes", [])):
            if form.get(name, default) != default:
                raise GuideRefused("asks for JSON in a way that is not served", pointer=at, keyword=name)
        return self._json_of(
            _value(form, "json_schema", (dict, bool), at),
            f"{at}/json_schema",
            is_compact=form.get("max_whitespace_cnt") == 0,
        )

    def _any_text(self, form: Form, at: str, ends: tuple[str, ...]) -> Node:
        if form.get("max_tokens") is not None:
            raise GuideRefused("bounds the tokens of a text, which is not served", pointer=at, keyword="max_tokens")
        excludes = _texts(form, "excludes", at)
        most = form.get("max_chars")
        if most is None:
            return _free(ends, excludes, at)
        if excludes or len(ends) > 1 or not isinstance(most, int) or not 0 <= most <= MAX_EXPANDED:
            raise GuideRefused(
                "bounds the characters of a text in a way that is not served", pointer=at, keyword="max_chars"
            )
        return _closed(Repeat(Characters(is_negated=True), 0, most), ends)

    def _sequence(self, form: Form, at: str, ends: tuple[str, ...]) -> Node:
        elements = _value(form, "elements", list, at)
        parts: list[Node] = []
        for place, each in enumerate(elements):
            is_last = place == len(elements) - 1
            inner = f"{at}/elements/{place}"
            follower = elements[place + 1] if not is_last else None
            # Free text before a text ends where that begins: so excludes say, and so XGrammar reads it.
            parts.append(self.form(each, inner, ends if is_last else _marks_before(each, follower)))
        skipped = [
            part
            for place, part in enumerate(parts)
            if not (place and _marks_before(elements[place - 1], elements[place]))
        ]
        return Sequence(tuple(skipped)) if elements else _closed(NOTHING, ends)

    def _or(self, form: Form, at: str, ends: tuple[str, ...]) -> Node:
        elements = _value(form, "elements", list, at)
        if not elements:
            raise GuideRefused("needs a format", pointer=at, keyword="elements")
        return Either(tuple(self.form(each, f"{at}/elements/{place}", ()) for place, each in enumerate(elements)))

    def _tag(self, form: Form, at: str, ends: tuple[str, ...]) -> Node:
        return Sequence((Text(_text(form, "begin", at)), self._behind_begin(form, at)))

    def _behind_begin(self, form: Any, at: str) -> Node:
        """A tag's content and end."""
        if not isinstance(form, dict) or form.get("type", "tag") != "tag":
            raise GuideRefused("needs a tag", pointer=at, keyword="type")
        unknown = sorted(form.keys() - FIELDS["tag"] - {"type"})
        if unknown:
            raise GuideRefused("has a field that is not known", pointer=at, keyword=unknown[0][:40])
        end = form.get("end")
        if isinstance(end, dict):
            raise GuideRefused("asks for tokens instead of text, which is not served", pointer=at, keyword="end")
        marks = _texts(form, "end", at) if isinstance(end, list) else (_text(form, "end", at),)
        if not marks:
            raise GuideRefused("needs an end", pointer=at, keyword="end")
        return self.form(form.get("content"), f"{at}/content", marks if any(marks) else ())

    def _triggered_tags(self, form: Form, at: str, ends: tuple[str, ...]) -> Node:
        triggers = _texts(form, "triggers", at)
        tags = _value(form, "tags", list, at)
        rules: dict[str, list[Node]] = {trigger: [] for trigger in triggers}
        whole: list[Node] = []
        for place, each in enumerate(tags):
            inner = f"{at}/tags/{place}"
            begin = _text(each, "begin", inner) if isinstance(each, dict) else ""
            fitting = [trigger for trigger in triggers if begin.startswith(trigger)]
            if len(fitting) != 1:
                raise GuideRefused(
                    "needs a tag that begins with exactly one of the triggers", pointer=inner, keyword="begin"
                )
            content = self._behind_begin(each, inner)
            rules[fitting[0]].append(Sequence((Text(begin[len(fitting[0]) :]), content)))
            whole.append(Sequence((Text(begin), content)))
        for trigger, nodes in rules.items():
            if not nodes:
                raise GuideRefused(f"has the trigger {trigger[:40]!r} without a tag", pointer=at, keyword="triggers")
        found: dict[str, Node] = {trigger: Either(tuple(nodes)) for trigger, nodes in rules.items()}
        is_one = _is(form, "stop_after_first", False, at)
        excludes = _texts(form, "excludes", at)
        if not _is(form, "at_least_one", False, at):
            return self._dispatched(found, excludes, ends, at, loop=not is_one)
        if is_one:
            return _closed(Either(tuple(whole)), ends)
        return Sequence((Either(tuple(whole)), self._dispatched(found, excludes, ends, at, loop=True)))

    def _dispatch(self, form: Form, at: str, ends: tuple[str, ...]) -> Node:
        rules: dict[str, Node] = {}
        for place, each in enumerate(_value(form, "rules", list, at)):
            inner = f"{at}/rules/{place}"
            if not isinstance(each, list) or len(each) != 2 or not isinstance(each[0], str) or not each[0]:
                raise GuideRefused("needs a text and its format", pointer=inner)
            if each[0] in rules:
                raise GuideRefused("has two formats for one text", pointer=inner)
            rules[each[0]] = self.form(each[1], f"{inner}/1", ())
        return self._dispatched(rules, _texts(form, "excludes", at), ends, at, loop=_is(form, "loop", True, at))

    def _dispatched(
        self, rules: dict[str, Node], excludes: tuple[str, ...], ends: tuple[str, ...], at: str, *, loop: bool
    ) -> Node:
        """Free text in which the texts of `rules` are followed by what these say."""
        if any(a != b and a in b for a in (*rules, *excludes) for b in (*rules, *excludes)):
            raise GuideRefused("has one text that begins something within another", pointer=at)
        stops = frozenset((*rules, *excludes, *ends))
        calls = Either(tuple(Sequence((Until(text, stops), node)) for text, node in rules.items()))
        last = _free(ends, (*rules, *excludes), at)
        if not rules:
            return last
        if loop:
            return Sequence((Repeat(calls), last))
        return Either((Sequence((calls, _closed(NOTHING, ends))), last))

    def _tags_with_separator(self, form: Form, at: str, ends: tuple[str, ...]) -> Node:
        tags = _value(form, "tags", list, at)
        if not tags:
            raise GuideRefused("needs a tag", pointer=at, keyword="tags")
        made = []
        for place, each in enumerate(tags):
            inner = f"{at}/tags/{place}"
            begin = _text(each, "begin", inner) if isinstance(each, dict) else ""
            made.append(Sequence((Text(begin), self._behind_begin(each, inner))))
        one: Node = Either(tuple(made))
        if not _is(form, "stop_after_first", False, at):
            one = Sequence((one, Repeat(Sequence((Text(_text(form, "separator", at)), one)))))
        return one if _is(form, "at_least_one", False, at) else optional(one)

    def _optional(self, form: Form, at: str, ends: tuple[str, ...]) -> Node:
        return optional(self._content(form, at))

    def _plus(self, form: Form, at: str, ends: tuple[str, ...]) -> Node:
        return Repeat(self._content(form, at), 1)

    def _star(self, form: Form, at: str, ends: tuple[str, ...]) -> Node:
        return Repeat(self._content(form, at))

    def _repeat(self, form: Form, at: str, ends: tuple[str, ...]) -> Node:
        low, high = _value(form, "min", int, at), _value(form, "max", int, at)
        if not (0 <= low <= MAX_EXPANDED and (high == -1 or low <= high <= MAX_EXPANDED)):
            raise GuideRefused("has bounds of a repetition that are not served", pointer=at, keyword="min")
        return Repeat(self._content(form, at), low, None if high == -1 else high)

    def _content(self, form: Form, at: str) -> Node:
        return self.form(form.get("content"), f"{at}/content", ())


def _closed(node: Node, ends: tuple[str, ...]) -> Node:
    if not ends:
        return node
    end = Text(ends[0]) if len(ends) == 1 else Either(tuple(map(Text, ends)))
    return end if node == NOTHING else Sequence((node, end))


def _free(ends: tuple[str, ...], excludes: tuple[str, ...], at: str) -> Node:
    """Text without `excludes` up to the first of `ends`, which it includes."""
    stops = frozenset((*excludes, *ends))
    if "" in excludes or ("" in ends and any(ends)):
        raise GuideRefused("has an empty text that free text would end with", pointer=at)
    if not ends or not any(ends):
        return Without(frozenset(excludes)) if excludes else ANY_TEXT
    return Either(tuple(Until(end, stops) for end in ends)) if len(ends) > 1 else Until(ends[0], stops)


def _marks_before(form: Any, follower: Any) -> tuple[str, ...]:
    """The text behind a free text that says itself, by its excludes, that it ends there."""
    if not isinstance(form, dict) or not isinstance(follower, dict) or follower.get("type") != "const_string":
        return ()
    value, excludes = follower.get("value"), form.get("excludes")
    if form.get("type") not in ("any_text", "triggered_tags", "dispatch") or not isinstance(excludes, list):
        return ()
    return (value,) if isinstance(value, str) and value and value in excludes else ()


def _inner(kind: GuideType, text: str, at: str, read: Callable[[str], Any]) -> Any:
    try:
        GuidedDecodingParams(guide_type=kind, guide=text).validate()
        return read(text)
    except GuideRefused as error:
        raise GuideRefused(str(error).removeprefix("the guide "), pointer=at, keyword="") from None
    except InvalidRequest as error:
        raise GuideRefused(f"has one that is not served: {error}", pointer=at) from None


def _renamed(node: Node, prefix: str) -> Node:
    if isinstance(node, Reference):
        return Reference(prefix + node.name)
    if isinstance(node, Repeat):
        return Repeat(_renamed(node.part, prefix), node.low, node.high)
    if is_regular(node):
        return node
    parts = tuple(_renamed(part, prefix) for part in children(node))
    return Sequence(parts) if isinstance(node, Sequence) else Either(parts)


def _value(form: Form, name: str, kind: Any, at: str) -> Any:
    value = form.get(name)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise GuideRefused("lacks what its type needs", pointer=at, keyword=name)
    return value


def _text(form: Form, name: str, at: str) -> str:
    if isinstance(form.get(name), dict):
        raise GuideRefused("asks for tokens instead of text, which is not served", pointer=at, keyword=name)
    value: str = _value(form, name, str, at)
    return value


def _texts(form: Form, name: str, at: str) -> tuple[str, ...]:
    value = form.get(name, [])
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise GuideRefused("needs a list of texts", pointer=at, keyword=name)
    if name in ("triggers", "excludes") and not all(value):
        raise GuideRefused("has an empty text", pointer=at, keyword=name)
    return tuple(dict.fromkeys(value))


def _is(form: Form, name: str, default: bool, at: str) -> bool:
    value = form.get(name, default)
    if not isinstance(value, bool):
        raise GuideRefused("needs true or false", pointer=at, keyword=name)
    return value
