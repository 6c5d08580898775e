"""No text is lost between terminals: random grammars held against XGrammar's parser, which reads bytes."""

from __future__ import annotations

import itertools
import random

import pytest
import xgrammar
from grammar_acceptance import acceptance, xgrammar_takes

from inflight.guided_decoding import GuideType

TEXTS = ["".join(letters) for length in range(6) for letters in itertools.product("abc", repeat=length)]


def random_grammar(seed: int) -> str:
    """Rules that overlap as much as possible; each ends, because its first alternative is a literal."""
    chosen = random.Random(seed)

    def part(depth: int) -> str:
        kind = chosen.randrange(8 if depth else 5)
        if kind < 2:
            return '"' + "".join(chosen.choices("abc", k=chosen.randint(1, 3))) + '"'
        if kind == 2:
            return chosen.choice(["[ab]", "[bc]", "[^a]", "[a-c]"])
        if kind < 5:
            return chosen.choice(["root", "x", "y"])
        if kind == 5:
            return f"({part(depth - 1)} {part(depth - 1)})"
        if kind == 6:
            return f"({part(depth - 1)} | {part(depth - 1)})"
        return f"({part(depth - 1)}){chosen.choice(['*', '+', '?', '{1,2}', '{2}'])}"

    def rule(name: str) -> str:
        literal = '"' + "".join(chosen.choices("abc", k=chosen.randint(1, 2))) + '"'
        return f"{name} ::= {literal} | {part(2)} {part(2)} | {part(2)}"

    return "\n".join(map(rule, ("root", "x", "y")))


@pytest.mark.parametrize("seed", range(40))
def test_random_grammars_take_what_a_parser_of_bytes_takes(seed: int) -> None:
    text = random_grammar(seed)
    guided, oracle = acceptance(GuideType.EBNF_GRAMMAR, text), xgrammar.Grammar.from_ebnf(text)
    chosen = random.Random(seed).sample(TEXTS, 80)
    assert [each for each in chosen if guided.takes(each)] == [each for each in chosen if xgrammar_takes(oracle, each)]


def test_what_never_ends_is_not_begun() -> None:
    guided = acceptance(GuideType.EBNF_GRAMMAR, 'root ::= "a" | "b" x | "c" x* root\nx ::= "x" x')
    assert [text for text in ("a", "ca", "b", "cx") if guided.begins(text)] == ["a", "ca"]


@pytest.mark.parametrize(
    ("grammar", "taken", "not_taken"),
    [
        ('root ::= x "ab" | "(" root ")"\nx ::= "a"*', ["ab", "aab", "(aab)"], ["a", "abb"]),
        ('root ::= "a" x | "ab" | "(" root ")"\nx ::= "bd"', ["abd", "ab", "(abd)"], ["abb", "a"]),
        ('root ::= word " " root | word\nword ::= "if" | [a-z]+', ["if x", "iffy if", "i"], ["if ", ""]),
        ('root ::= "if" word | "(" root ")"\nword ::= [a-z]+', ["ifx", "(iffy)"], ["if", "x"]),
        ('root ::= n "." n | "(" root ")"\nn ::= [0-9]+ ("." [0-9]+)?', ["1.2", "1.2.3", "(1.2.3.4)"], ["1", "1."]),
        ('root ::= [a-z]{0,3} "z" root | "z"', ["z", "zz", "abcz" * 3 + "z"], ["abcd", ""]),
    ],
)
def test_what_a_greedy_lexer_would_lose_is_taken(grammar: str, taken: list[str], not_taken: list[str]) -> None:
    guided = acceptance(GuideType.EBNF_GRAMMAR, grammar)
    assert [text for text in [*taken, *not_taken] if guided.takes(text)] == taken
