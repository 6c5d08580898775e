"""gpt-oss's output is messages in channels: what each is, in any pieces, and what a grammar makes of them."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable
from typing import Any

import pytest
from grammar_acceptance import Acceptance, acceptance
from hypothesis import given
from hypothesis import strategies as st

from inflight.asking.chat_format import ChatFormat, ChatReader, Piece
from inflight.asking.tools.channels import MAX_HEADER_CHARS, Channels
from inflight.asking.tools.chosen_guide import chosen_call_guide
from inflight.asking.tools.events import Content, Reasoning, ToolCallArguments, ToolCallStarted
from inflight.asking.tools.message_guide import forced_message_guide
from inflight.asking.tools.parser import make_tool_parser
from inflight.asking.tools.tool import Tool
from inflight.guided_decoding import GuidedDecodingParams, GuideType
from inflight.guides.translate import translate

PROMPT = "<|start|>user<|message|>hi<|end|><|start|>assistant"
THOUGHT = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
PREAMBLE = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
CALL = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}'
FINAL = "<|channel|>final<|message|>Done."
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
LIST = {"type": "object", "properties": {"b": {"type": "array"}}, "additionalProperties": False}
TOOLS = [Tool(name="f", parameters=SCHEMA, strict=True), Tool(name="fg", parameters=LIST)]

FRAGMENTS = [
    "<|start|>", "assistant", "<|channel|>", "analysis", "commentary", "final", " to=functions.f", " to=python", "json",
    "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>", "<|", "text", " ", "\n", '{"a": 1}',
    THOUGHT, PREAMBLE, CALL, FINAL, "x" * MAX_HEADER_CHARS,
]  # fmt: skip
TEXTS = st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=5), max_size=12).map("".join)


def reading(prompt: str = PROMPT) -> ChatFormat:
    numbers = itertools.count()
    return ChatFormat(
        make_tool_parser=lambda: make_tool_parser("harmony", TOOLS, lambda: f"id-{next(numbers)}"),
        make_splitter=Channels().splitter_maker(prompt),
    )


def read(text: str, cuts: Iterable[int] = (), prompt: str = PROMPT) -> list[Piece]:
    reader = ChatReader(reading(prompt))
    edges = sorted({min(cut, len(text)) for cut in cuts} | {0, len(text)})
    pieces = [piece for start, end in itertools.pairwise(edges) for piece in reader.feed(text[start:end])]
    found: list[Piece] = []
    for piece in [*pieces, *reader.finish()]:
        last = found[-1] if found else None
        if isinstance(piece, ToolCallArguments) and isinstance(last, ToolCallArguments) and piece.index == last.index:
            found[-1] = ToolCallArguments(piece.index, last.text + piece.text)
        elif isinstance(piece, (Reasoning, Content)) and isinstance(last, type(piece)):
            found[-1] = type(piece)(last.text + piece.text)
        else:
            found.append(piece)
    return found


def called(*arguments: str, name: str = "f") -> list[Piece]:
    return [
        event
        for index, text in enumerate(arguments)
        for event in (ToolCallStarted(index, f"id-{index}", name), ToolCallArguments(index, text))
    ]


@given(TEXTS, st.lists(st.integers(0, 300), max_size=12))
def test_pieces_do_not_matter(text: str, cuts: list[int]) -> None:
    assert read(text, cuts) == read(text)
    assert read(text, range(len(text))) == read(text)


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        (THOUGHT + FINAL, [Reasoning("Hm."), Content("Done.")]),
        (FINAL, [Content("Done.")]),
        (f"{THOUGHT}{FINAL}<|return|>", [Reasoning("Hm."), Content("Done.")]),
        (THOUGHT + CALL, [Reasoning("Hm."), *called('{"a": 1}')]),
        (f"{THOUGHT}{CALL}<|call|>", [Reasoning("Hm."), *called('{"a": 1}')]),
        (f"{CALL}<|call|><|start|>assistant{CALL}<|end|>", called('{"a": 1}', '{"a": 1}')),
        (THOUGHT + PREAMBLE + CALL, [Reasoning("Hm."), Content("I look."), *called('{"a": 1}')]),
        (THOUGHT + PREAMBLE + THOUGHT + FINAL, [Reasoning("Hm."), Content("I look."), Reasoning("\nHm."),
                                                Content("\nDone.")]),
        (THOUGHT + THOUGHT + FINAL, [Reasoning("Hm.\nHm."), Content("Done.")]),
        (" to=functions.f<|channel|>commentary json<|message|>{}<|call|>", called("{}")),
        ("<|channel|>commentary to=functions.f<|constrain|>json<|message|>{}", called("{}")),
        ("<|channel|>commentary to=functions.f code<|message|>{}", called("{}")),
        ("<|channel|>commentary to=functions.f<|channel|>commentary json<|message|>{}", called("{}")),
        ("<|channel|>analysis to=functions.f<|message|>{}", called("{}")),
        ("<|start|>assistant<|channel|>commentary to=functions.fg <|message|>{}", called("{}", name="fg")),
        ("<|channel|>analysis to=python code<|message|>1 + 1<|call|>", [Reasoning("1 + 1")]),
        ("<|channel|>commentary to=browser.open<|message|>{}<|call|>", [Reasoning("{}")]),
        (CALL.replace("functions.f", "functions.rm"), [Content(CALL.replace("functions.f", "functions.rm"))]),
        ("<|channel|>final<|message|>a < b <|start", [Content("a < b <|start")]),
        ("<|channel|>analysis<|message|>Hm.<|channel|>final<|message|>4", [Reasoning("Hm."), Content("4")]),
        ("<|message|>4", [Content("4")]),
        ("no message at all", [Content("no message at all")]),
        ("  to whom?", [Content("  to whom?")]),
        ("<|channel|>analy", []),
        (f"<|channel|>{'x' * MAX_HEADER_CHARS}", [Content(f"<|channel|>{'x' * MAX_HEADER_CHARS}")]),
    ],
)  # fmt: skip
def test_what_a_message_is(text: str, pieces: list[Piece]) -> None:
    assert read(text) == pieces


@pytest.mark.parametrize(("text", "whole"), [(THOUGHT + PREAMBLE + CALL, "Hm.I look."), (THOUGHT + FINAL, "Hm.Done.")])
def test_no_part_of_a_tag_is_shown(text: str, whole: str) -> None:
    for length in range(len(text)):
        reader = ChatReader(reading())
        pieces = reader.feed(text[:length])
        assert whole.startswith("".join(piece.text for piece in pieces if isinstance(piece, (Reasoning, Content))))


def test_a_message_that_the_prompt_began_is_continued() -> None:
    assert read(" Rome.<|return|>", prompt=f"{PROMPT}<|channel|>final<|message|>In") == [Content(" Rome.")]
    assert read("<|start|>assistant" + FINAL, prompt="<|start|>user<|message|>hi<|end|>") == [Content("Done.")]
    assert read("Done.", prompt="user: hi") == [Content("Done.")]


def test_what_follows_a_header_comes_at_once() -> None:
    splitter = Channels().splitter_maker(PROMPT)()
    assert splitter.feed("<|channel|>analysis<|message|>H") == [Reasoning("H")]
    assert splitter.is_reasoning and splitter.may_reason
    assert splitter.feed("m<|end|><|start|>assistant<|channel|>final<|message|>") == [Reasoning("m")]
    assert not splitter.is_reasoning and not splitter.may_reason
    assert splitter.feed("4 <") == [Content("4 ")]


# -- grammars ----------------------------------------------------------------------------------------------------------


def taking(params: GuidedDecodingParams) -> Acceptance:
    return Acceptance(translate(params).grammar)


def both(params: GuidedDecodingParams, text: str) -> bool:
    """What llguidance and XGrammar say alike."""
    import xgrammar
    from grammar_acceptance import xgrammar_takes

    found = taking(params).takes(text)
    assert xgrammar_takes(xgrammar.Grammar.from_structural_tag(params.guide), text) is found
    return found


BAD_CALL = CALL.replace("1", '"x"')
OTHER = '<|channel|>commentary to=functions.fg <|constrain|>json<|message|>{"b": [2]}'


@pytest.mark.slow
@pytest.mark.parametrize(
    ("texts", "chosen", "alone", "required", "answer"),
    [
        ([FINAL, THOUGHT + FINAL, THOUGHT + PREAMBLE + THOUGHT + FINAL], True, True, False, False),
        ([CALL, THOUGHT + CALL, f"{THOUGHT}{OTHER}<|call|>"], True, True, True, True),
        ([THOUGHT + PREAMBLE + CALL], True, True, False, False),
        ([f"{CALL}<|call|><|start|>assistant{OTHER}", f"{CALL}<|end|><|start|>assistant{CALL}<|call|>"],
         True, False, True, True),
        (['<|channel|>final<|message|>{"a": 1}', THOUGHT + '<|channel|>final<|message|>{"a": 1}'],
         True, True, False, True),
        ([BAD_CALL, THOUGHT + BAD_CALL, "Done.", THOUGHT, CALL + FINAL, CALL.replace("functions.f", "functions.rm"),
          CALL.replace("functions.f", "python"), CALL.replace(" <|constrain|>json", ""), "<|start|>assistant" + FINAL,
          THOUGHT.replace("Hm.", "Hm.<|channel|>final<|message|>") + FINAL], False, False, False, False),
    ],
    ids=["answers", "calls", "a call behind a preamble", "two calls", "an answer in its form", "no such messages"],
)  # fmt: skip
def test_a_grammar_has_messages(texts: list[str], chosen: bool, alone: bool, required: bool, answer: bool) -> None:
    schema = {"type": "json_schema", "json_schema": SCHEMA}
    free, one = (chosen_call_guide("harmony", TOOLS, parallel_tool_calls=several) for several in (True, False))
    for text in texts:
        assert both(free, text) is chosen, text
        assert both(one, text) is alone, text
        assert both(forced_message_guide(TOOLS), text) is required, text
        assert both(chosen_call_guide("harmony", TOOLS, answer=schema), text) is answer, text


@pytest.mark.slow
def test_a_forced_call_follows_its_schema_and_a_named_one_is_one() -> None:
    params = forced_message_guide(TOOLS, name="fg")
    assert both(params, OTHER) and not both(params, OTHER.replace("[2]", "2")) and not both(params, CALL)
    assert not both(params, f"{OTHER}<|call|><|start|>assistant{OTHER}")


@pytest.mark.slow
def test_the_form_of_an_answer_is_that_of_the_final_message() -> None:
    reasoning = Channels().thought(PROMPT, is_of_calls=False)
    guided = acceptance(GuideType.JSON_SCHEMA, json.dumps(SCHEMA), reasoning=reasoning)
    whole = FINAL.replace("Done.", '{"a": 1}')
    assert all(guided.takes(before + whole) for before in ("", THOUGHT, THOUGHT + THOUGHT))
    wrong = ("{}", FINAL, '{"a": 1}', PREAMBLE + whole, THOUGHT, THOUGHT.replace("Hm.", "<|channel|>") + whole)
    assert not any(map(guided.takes, wrong))
    assert Channels().thought(PROMPT, is_of_calls=True) is None
    assert Channels().thought(f"{PROMPT}{FINAL}", is_of_calls=False) is None, "the prompt has begun the answer"


def test_a_forced_call_that_is_cut_has_its_name() -> None:
    parser: Any = make_tool_parser("harmony", TOOLS, lambda: "id", is_forced=True)
    assert [*parser.feed(CALL[: CALL.index("{")]), *parser.finish()] == [ToolCallStarted(0, "id", "f")]
