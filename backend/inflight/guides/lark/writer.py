"""From expressions to llguidance's Lark (its page on syntax, at https://github.com/guidance-ai/llguidance)."""

from __future__ import annotations

from inflight.guides.lark.expression import (
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
    expanded,
    is_regular,
    references,
)
from inflight.guides.lark.lexemes import Terminals, is_nullable
from inflight.guides.lark.python_regex import set_source
from inflight.guides.limits import MAX_EXPANDED, MAX_RULE_TIMES, MAX_RULES, MAX_TERMINAL
from inflight.guides.refusal import GuideRefused

HEADER = '%llguidance {"no_forcing": true}\n'
"""Masks allow all tokens whose bytes fit: the library need not ask the tokenizer in Python what it would write."""
ANY = "(?s:.*)"


def write_lark(grammar: Grammar) -> str:
    """Raises GuideRefused if it is beyond the bounds, or ambiguous in a way that the library cannot read."""
    if grammar.rules:
        return _Writer(_ending(_inlined(grammar))).text()
    _check_size(expanded(grammar.start))
    return _Writer(grammar).text()


def _ending(grammar: Grammar) -> Grammar:
    """Without what never ends, as in `x ::= "a" x`: an output that began it could not be finished."""
    found: dict[str, Node] = {}
    users: dict[str, list[str]] = {name: [] for name in grammar.rules}
    for name, node in grammar.rules.items():
        for other in dict.fromkeys(references(node)):
            users[other].append(name)
    waiting = dict.fromkeys(grammar.rules)
    while waiting:
        name, _ = waiting.popitem()
        if name not in found and _that_ends(grammar.rules[name], found) is not None:
            found[name] = grammar.rules[name]
            waiting |= dict.fromkeys(users[name])
    start = _that_ends(grammar.start, found)
    if start is None:
        raise GuideRefused("allows no text that ends")
    kept = {name: _that_ends(node, found) for name, node in found.items()}
    rules = {name: node for name, node in kept.items() if node is not None}
    return Grammar(start, {name: rules[name] for name in _reached(start, rules)})


def _that_ends(node: Node, rules: dict[str, Node]) -> Node | None:
    """The part without alternatives that use other rules than these; None if none is left."""
    if isinstance(node, Reference):
        return node if node.name in rules else None
    if isinstance(node, Repeat):
        part = _that_ends(node.part, rules)
        return Repeat(part, node.low, node.high) if part is not None else None if node.low else NOTHING
    if not isinstance(node, (Sequence, Either)):
        return node
    inner = [_that_ends(part, rules) for part in node.parts]
    able = tuple(part for part in inner if part is not None)
    if isinstance(node, Sequence):
        return Sequence(able) if len(able) == len(inner) else None
    return Either(able) if able else None


def _inlined(grammar: Grammar) -> Grammar:
    """Rules that a lexer can read take the place of what refers to them."""
    if len(grammar.rules) > MAX_RULES:
        raise GuideRefused(f"has {len(grammar.rules)} rules, more than {MAX_RULES}")
    done: dict[str, Node] = {}
    sizes: dict[str, int] = {}
    open_rules = {name: set(references(node)) for name, node in grammar.rules.items()}
    users: dict[str, list[str]] = {}
    for name, used in open_rules.items():
        for other in used:
            users.setdefault(other, []).append(name)
    ready = [name for name, used in open_rules.items() if not used]
    while ready:
        name = ready.pop()
        size = expanded(grammar.rules[name], sizes)
        node = _replaced(grammar.rules[name], done) if size <= MAX_TERMINAL else grammar.rules[name]
        if size <= MAX_TERMINAL and is_regular(node):
            done[name], sizes[name] = node, size
        for user in users.get(name, ()):
            open_rules[user].discard(name)
            if not open_rules[user]:
                ready.append(user)
    total = expanded(grammar.start, sizes)
    for name, node in grammar.rules.items():
        total += 0 if name in done else expanded(node, sizes)
    _check_size(total)
    start = _replaced(grammar.start, done)
    rest = {name: _replaced(node, done) for name, node in grammar.rules.items() if name not in done}
    return Grammar(start, {name: rest[name] for name in _reached(start, rest)})


def _check_size(size: int) -> None:
    if size > MAX_EXPANDED:
        raise GuideRefused(f"has more than {MAX_EXPANDED} parts, counting each as often as it is repeated")


def _reached(start: Node, rules: dict[str, Node]) -> list[str]:
    found = list(dict.fromkeys(references(start)))
    for name in found:
        found += [each for each in dict.fromkeys(references(rules[name])) if each not in found]
    return found


def _replaced(node: Node, rules: dict[str, Node]) -> Node:
    if isinstance(node, Reference):
        return rules.get(node.name, node)
    if isinstance(node, Sequence):
        return Sequence(tuple(_replaced(part, rules) for part in node.parts))
    if isinstance(node, Either):
        return Either(tuple(dict.fromkeys(_replaced(part, rules) for part in node.parts)))
    return Repeat(_replaced(node.part, rules), node.low, node.high) if isinstance(node, Repeat) else node


class _Writer:
    def __init__(self, grammar: Grammar) -> None:
        self._grammar = grammar
        self._terminals = Terminals(grammar)
        self._names = {name: f"r{number}" for number, name in enumerate(grammar.rules)}
        self._written: dict[Node, str] = {}
        self._lines: list[str] = []

    def text(self) -> str:
        lines = [f"start: {self._rule(self._grammar.start)}"]
        lines += [f"{self._names[name]}: {self._rule(node)}" for name, node in self._grammar.rules.items()]
        return HEADER + "\n".join([*lines, *self._lines]) + "\n"

    def _rule(self, node: Node, times: int = 1) -> str:
        """`times`: that the repetitions around it repeat it."""
        if isinstance(node, Reference):
            return self._names[node.name]
        if node == NOTHING:
            return '""'
        if isinstance(node, Json):
            return self._named(node, "j", f"%json {node.schema}")
        if self._terminals.are(node):
            if isinstance(node, Repeat) and node.low == 0 and not is_nullable(node.part):
                if node.high == 0:
                    return '""'
                return self._rule_of(Repeat(node.part, 1, node.high)) + "?"
            if is_nullable(node):
                return self._named(node, "T", f"({_terminal(node)}) & /(?s:.+)/") + "?"
            return self._rule_of(node)
        if isinstance(node, Text):
            return f"({' '.join(map(self._rule, map(Text, node.value)))})"
        if isinstance(node, Repeat):
            times *= max(node.low, node.high or 1)
            if times > MAX_RULE_TIMES:
                raise GuideRefused(f"repeats parts that are no single expression more than {MAX_RULE_TIMES} times")
        inner = [self._rule(child, times) for child in children(node)]
        if isinstance(node, Sequence):
            return f"({' '.join(inner)})" if inner else '""'
        if isinstance(node, Either):
            return f"({' | '.join(inner)})"
        assert isinstance(node, Repeat)
        return f"({inner[0]}){_times(node)}" if node.high != 0 else '""'

    def _rule_of(self, terminal: Node) -> str:
        return self._named(terminal, "T", _terminal(terminal))

    def _named(self, node: Node, prefix: str, body: str) -> str:
        if node not in self._written:
            self._written[node] = f"{prefix}{len(self._written)}"
            self._lines.append(f"{self._written[node]}: {body}")
        return self._written[node]


def _terminal(node: Node) -> str:
    """A regular part in the syntax of terminals."""
    if not _has_free_text(node):
        return f"/{_regex(node)}/"
    if isinstance(node, Until):
        stops = "|".join(map(_escaped, sorted({node.mark, *node.stops})))
        return f"(/{ANY}{_escaped(node.mark)}/ & ~/{ANY}({stops})(?s:.+)/)"
    if isinstance(node, Without):
        if not node.stops:
            return f"/{ANY}/"
        return f"(/{ANY}/ & ~/{ANY}({'|'.join(map(_escaped, sorted(node.stops)))}){ANY}/)"
    inner = [_terminal(child) for child in children(node)]
    if isinstance(node, Sequence):
        return f"({' '.join(inner)})"
    if isinstance(node, Either):
        return f"({' | '.join(inner)})"
    assert isinstance(node, Repeat)
    return f"({inner[0]}){_times(node)}"


def _has_free_text(node: Node) -> bool:
    return isinstance(node, (Until, Without)) or any(map(_has_free_text, children(node)))


def _regex(node: Node) -> str:
    """In the syntax of Rust's crate regex-syntax."""
    if isinstance(node, Characters):
        return set_source(node)
    if isinstance(node, Text):
        return _escaped(node.value) or "(?:)"
    inner = [_regex(child) for child in children(node)]
    if isinstance(node, Sequence):
        return "".join(inner) or "(?:)"
    if isinstance(node, Either):
        return f"(?:{'|'.join(inner)})"
    assert isinstance(node, Repeat)
    return f"(?:{inner[0]}){_times(node)}"


def _times(node: Repeat) -> str:
    if node.low == node.high == 1:
        return ""
    if node.high is None:
        return {0: "*", 1: "+"}.get(node.low, f"{{{node.low},}}")
    return "?" if (node.low, node.high) == (0, 1) else f"{{{node.low},{node.high}}}"


def _escaped(text: str) -> str:
    return "".join(c if c.isascii() and c.isalnum() else rf"\x{{{ord(c):x}}}" for c in text)
