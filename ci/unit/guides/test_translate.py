"""From what a request asks to one grammar: every kind, reasoning before it, guides built to do harm."""

from __future__ import annotations

import json

import msgspec
import pytest
from grammar_acceptance import acceptance
from guides import BOMBS, GUIDES

from inflight.errors import InvalidRequest
from inflight.guided_decoding import GuidedDecodingParams, GuideType, Reasoning, WhiteSpace
from inflight.guides.translate import translate

SAMPLES = {
    "json": '{"a": [1]}',
    "json_schema": '{"name": "Bo", "age": 7, "pets": ["cat"]}',
    "regex": "AB-123x",
    "ebnf_grammar": "1+(2*3)",
    "structural_tag": '<call>"up"</call>',
}
CHOSEN = json.dumps(["a", "ab", 'é\n"/'])


@pytest.mark.parametrize("name", GUIDES)
def test_every_kind_is_translated_to_what_its_output_follows(name: str) -> None:
    params, follows = GUIDES[name]
    guided = acceptance(params.guide_type, params.guide)
    assert follows(SAMPLES[name]) and guided.takes(SAMPLES[name])
    others = [text for text in SAMPLES.values() if text != SAMPLES[name] and not text.startswith(SAMPLES[name][0])]
    assert not any(map(guided.takes, others))


def test_a_choice_is_one_of_its_texts() -> None:
    guided = acceptance(GuideType.CHOICE, CHOSEN)
    texts = ("a", "ab", 'é\n"/', "b", "aab", "")
    assert [text for text in texts if guided.takes(text)] == ["a", "ab", 'é\n"/']


@pytest.mark.parametrize(("white_space", "text"), [("dumps", "[1, 2]"), ("compact", "[1,2]"), ("free", "[1 ,2 ]")])
def test_white_space_between_the_parts_of_json_is_chosen(white_space: str, text: str) -> None:
    guided = acceptance(GuideType.JSON_SCHEMA, '{"type": "array"}', white_space=WhiteSpace(white_space))
    taken = [each for each in ("[1, 2]", "[1,2]", "[1 ,2 ]") if guided.takes(each)]
    assert taken == (["[1, 2]", "[1,2]", "[1 ,2 ]"] if white_space == "free" else [text])


@pytest.mark.parametrize("kind", ["json", "regex", "ebnf_grammar", "structural_tag"])
def test_a_reasoning_is_free_text_that_may_be_left_out(kind: str) -> None:
    params, text = GUIDES[kind][0], SAMPLES[kind]
    guided = acceptance(params.guide_type, params.guide, reasoning=Reasoning(opening="<think>", closing="</think>"))
    thoughts = ("", "<think></think>", "<think>a < </think\n</think>\n\n", "<think>x</think>" + " " * 8)
    assert all(guided.takes(thought + text) for thought in thoughts)
    wrong = ("x", "x</think>", "<think>x", "<think>x</think>" + " " * 9, "<think></think></think>")
    assert not any(guided.takes(thought + text) for thought in wrong)


def test_a_reasoning_that_the_prompt_began_must_end() -> None:
    reasoning = Reasoning(opening="<think>", closing="</think>", is_open=True)
    guided = acceptance(GuideType.JSON, reasoning=reasoning)
    assert guided.takes("so\n</think>\n{}") and guided.takes("</think>{}")
    assert not guided.takes("{}") and not guided.takes("<think>") and guided.begins("<think>")


@pytest.mark.parametrize("is_looped", [True, False])
def test_tags_in_free_text_hold_behind_a_reasoning_and_not_within(is_looped: bool) -> None:
    rules = [["<call>", {"type": "regex", "pattern": "[0-9]"}]]
    guide = json.dumps({"type": "structural_tag", "format": {"type": "dispatch", "rules": rules, "loop": is_looped}})
    guided = acceptance(GuideType.STRUCTURAL_TAG, guide, reasoning=Reasoning(opening="<think>", closing="</think>"))
    free = ("", "so", "<thi", "so <call>1", "<think><call>x</think> so", "<think></think><call>1")
    assert all(map(guided.takes, free)) and guided.takes("<call>1<think>") is is_looped
    assert not any(map(guided.takes, ("<call>x", "<think>so", "so <think>", "<think></think><call>x")))


@pytest.mark.parametrize("name", BOMBS)
def test_a_guide_that_does_harm_is_refused(name: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        translate(BOMBS[name])
    assert len(str(refused.value)) <= 200


def test_masks_never_ask_the_tokenizer_for_its_own_way_of_writing() -> None:
    for params, _ in GUIDES.values():
        assert translate(params).grammar.startswith('%llguidance {"no_forcing": true}\n')


def test_free_white_space_is_within_json_alone() -> None:
    reasoning = Reasoning(opening="<think>", closing="</think>")
    guided = acceptance(GuideType.JSON, reasoning=reasoning, white_space=WhiteSpace.FREE)
    texts = ('{ "a" :1}', "<think></think>\n{ }", " {}", "{} ")
    assert [text for text in texts if guided.takes(text)] == ['{ "a" :1}', "<think></think>\n{ }"]


def test_equal_guides_have_equal_grammars() -> None:
    first = translate(GuidedDecodingParams(guide_type=GuideType.CHOICE, guide=CHOSEN))
    assert first == translate(GuidedDecodingParams(guide_type=GuideType.CHOICE, guide=CHOSEN))


def test_what_is_asked_by_default_is_not_sent() -> None:
    params = GuidedDecodingParams(guide_type=GuideType.JSON)
    assert msgspec.json.decode(msgspec.json.encode(params)) == {"guide_type": "json"}
    strict = msgspec.structs.replace(params, white_space=WhiteSpace.FREE, is_strict=False)
    assert msgspec.json.decode(msgspec.json.encode(strict), type=GuidedDecodingParams) == strict
