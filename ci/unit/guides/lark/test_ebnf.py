"""Grammars in EBNF and GBNF."""

from __future__ import annotations

import pytest
import xgrammar
from grammar_acceptance import acceptance, xgrammar_takes

from inflight.guided_decoding import GuideType
from inflight.guides.refusal import GuideRefused

JSON = r"""
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::= "{" ws ( string ":" ws value ("," ws string ":" ws value)* )? "}" ws   # an object
array  ::= "[" ws ( value
     ("," ws value)*
  )? "]" ws
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
ws ::= | " " | "\n" [ \t]{0,20}
"""
SUM = 'root ::= root "+" term | term\nterm ::= [0-9]+ | "(" root ")"'

CASES = [
    (
        JSON,
        ['{"a": 1}', '{"a":[true,-1.5e3,{"b":"é\\n\\u00e9"}] }', "{}", "{\n\t}"],
        ['{"a":01', '{"a" , 1}', "[]", ""],
    ),
    (SUM, ["1", "1+22", "(1+2)+3", "((1))"], ["", "1+", "(1", "1++2"]),
    ("root ::= [^a-c\\n]", ["d", "é", "-"], ["a", "\n", ""]),
    ("root ::= [a\\-z] [\\]\\[^-] [-a]", ["-]-", "z^a", "a-a"], ["b]a", "a]b"]),
    (r'root ::= "\x41\u00e9\t\"\\" [\u0041-\u0043]', ['Aé\t"\\B'], ["Aé"]),
    ('root ::= "a" {2} "b"{1,} "c"{0,2} ', ["aab", "aabbcc"], ["ab", "aabccc"]),
    ('root ::= ("a" | ) "b" | ""', ["ab", "b", ""], ["a"]),
    ('root-x ::= "a"\nroot_x ::= "b"\nroot ::= root-x root_x', ["ab"], ["aa", "ba"]),
    ('root ::= "a" # "b"\n  | "c"\n\n# end', ["a", "c"], ["b"]),
    ('root ::= "/" "\\n" "//" [/]', ["/\n///"], ["/n///"]),
    ('root ::= "(" root ")" | x\nx ::= x "a" | ""', ["", "a", "((aa))"], ["(", "(a"]),
]


@pytest.mark.parametrize(("grammar", "taken", "not_taken"), CASES)
def test_a_grammar_takes_its_texts_alone(grammar: str, taken: list[str], not_taken: list[str]) -> None:
    guided = acceptance(GuideType.EBNF_GRAMMAR, grammar)
    assert [text for text in [*taken, *not_taken] if guided.takes(text)] == taken


@pytest.mark.parametrize(("grammar", "taken", "not_taken"), CASES)
def test_xgrammar_reads_the_same(grammar: str, taken: list[str], not_taken: list[str]) -> None:
    try:
        oracle = xgrammar.Grammar.from_ebnf(grammar)
    except RuntimeError as error:
        assert "Expect element, but got" in str(error)  # it takes no empty alternatives, as GBNF does
        return
    assert [text for text in [*taken, *not_taken] if xgrammar_takes(oracle, text)] == taken


def test_a_point_is_any_character() -> None:
    guided = acceptance(GuideType.EBNF_GRAMMAR, "root ::= . [x]")
    assert [text for text in ("\nx", "éx", "x", "\U0001f600x") if guided.takes(text)] == ["\nx", "éx", "\U0001f600x"]


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        ('root ::= "a" (="b")', "line 1, column 14: look-ahead"),
        ("root ::= <think>", "line 1, column 10: tokens such as"),
        ("root ::= !<[10]>", "tokens such as"),
        ("\nroot ::= x", "line 2, column 10: there is no rule x"),
        ('start ::= "a"', "has no rule named root"),
        ('root ::= "a"\nroot ::= "b"', "line 2, column 1: the rule root is defined twice"),
        ('root ::= "a', "line 1, column 10: a literal is not closed"),
        ("root ::= [a", "line 1, column 10: a set of characters is not closed"),
        ("root ::= [b-a]", "ends below its beginning"),
        ("root ::= []", "holds no character"),
        ('root ::= ("a"', "a parenthesis is not closed"),
        ('root ::= "a")', "line 1, column 13: a parenthesis closes nothing"),
        ('root ::= "a"{2,1}', "ends below its beginning"),
        ('root ::= "a"{x}', r"must be \{m\}"),
        ('root ::= "a"{1,99999}', "a repetition of more than"),
        (r'root ::= "\q"', "the escape"),
        (r'root ::= "\ud800"', "stands for no character"),
        ("root = a", "a rule must begin with its name and ::="),
        ('root ::= "a" ; "b"', "column 14: ';' is not expected here"),
        ("root ::= TagDispatch(x)", "the macro TagDispatch"),
        ("root ::= root", "allows no text that ends"),
        ('root ::= "a" root', "allows no text that ends"),
        ('root ::= (("a" root?){0,200}){0,200}', "more than 20000 parts"),
        ('root ::= (("a" root?){0,40}){0,40}', "more than 1000 times"),
        ("root ::= " + " | ".join(f'"w{number}" root' for number in range(500)) + ' | ""', "too many parts"),
    ],
)
def test_what_is_not_served_is_refused_with_its_place(grammar: str, words: str) -> None:
    with pytest.raises(GuideRefused, match=words) as refused:
        acceptance(GuideType.EBNF_GRAMMAR, grammar)
    assert len(str(refused.value)) <= 200
