"""Which prompt stands before a text: by its name, by what the text is, or the checkpoint's default."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from inflight.asking.ask import Prompt
from inflight.asking.limit import Limit
from inflight.asking.refusal import Refusal
from inflight.asking.sentence_files import find_prompts
from inflight.asking.text_prompts import INPUT_TYPES, ChosenPrompt, TextPrompts, check_kept
from inflight.checkpoint_files import PROMPTS
from inflight.errors import ConfigurationError
from inflight.hub.wanted_files import small_files
from inflight.request_limits import RequestLimits

ALL = {"query": "q: ", "passage": "p: ", "Classification": "c: ", "clustering": "k: ", "STS": ""}
MODEL = TextPrompts(by_name=ALL)


@pytest.mark.parametrize(("input_type", "names"), INPUT_TYPES.items())
def test_what_a_text_is_chooses_the_first_prompt_that_the_model_has_for_it(
    input_type: str, names: tuple[str, ...]
) -> None:
    for place, name in enumerate(names):
        others = {other: "no" for other in names[place + 1 :]} | {"STS": "no"}
        found = TextPrompts(by_name={**others, name: "yes "}).chosen(input_type=input_type)
        assert found == ChosenPrompt("yes ", "input_type")


def test_names_types_and_defaults() -> None:
    assert MODEL.chosen("passage").text == MODEL.chosen(input_type="search_document").text == "p: "
    assert MODEL.chosen("STS").text == MODEL.chosen().text == ""
    with_default = TextPrompts(by_name=ALL, default_name="passage")
    assert with_default.chosen() == ChosenPrompt("p: ")
    assert with_default.chosen(input_type="query").text == "q: "
    assert TextPrompts().chosen(input_type="query") == TextPrompts().chosen() == ChosenPrompt()
    of_queries = {"query": "q: "}
    assert TextPrompts(by_name=of_queries).chosen(input_type="passage") == ChosenPrompt()
    assert TextPrompts(by_name=of_queries, default_name="query").chosen(input_type="passage") == ChosenPrompt("q: ")


@pytest.mark.parametrize(
    ("model", "name", "input_type", "sentence"),
    [
        (
            MODEL,
            "document",
            None,
            "prompt_name is document, and this model has no such prompt: it has query, passage, Classification, "
            "clustering, STS",
        ),
        (MODEL, "", None, "prompt_name is , and this model"),
        (MODEL, "a\n{0}", None, r"prompt_name is a\n{0}, and this model"),
        (TextPrompts(), "query", None, "this model has no such prompt: it has none"),
        (
            TextPrompts(by_name={"query": "q"}),
            None,
            "clustering",
            "input_type is clustering, and this model has no such",
        ),
        (TextPrompts(), None, "image", "input_type must be one of query, search_query, passage, document, search_"),
        (MODEL, "query", "query", "prompt_name and input_type both choose a prompt: give one of them"),
    ],
)
def test_refusals(model: TextPrompts, name: str | None, input_type: str | None, sentence: str) -> None:
    with pytest.raises(Refusal) as refusal:
        model.chosen(name, input_type)
    assert sentence in str(refusal.value)
    assert refusal.value.field == ("prompt_name" if name is not None else "input_type")


@pytest.mark.parametrize(
    ("by_name", "default", "expected"),
    [
        ({}, None, ("", "")),
        ({"query": "q: ", "passage": "p: "}, None, ("q: ", "p: ")),
        ({"query": "q: "}, None, ("q: ", "")),
        ({"query": "q: ", "text": "t: "}, "text", ("q: ", "t: ")),
        ({"corpus": "c: ", "passage": "p: ", "document": "d: "}, "corpus", ("c: ", "d: ")),
    ],
)
def test_questions_and_answers_have_their_own_else_the_default(
    by_name: dict[str, str], default: str | None, expected: tuple[str, str]
) -> None:
    assert TextPrompts(by_name=by_name, default_name=default).of_pairs() == expected


def test_token_ids_stay_as_they_are_unless_a_prompt_was_chosen_for_them() -> None:
    mixed: list[Prompt] = ["a", [1, 2]]
    assert ChosenPrompt("q: ").put_before(mixed) == ["q: a", [1, 2]]
    assert ChosenPrompt("", "input_type").put_before(mixed) == mixed
    with pytest.raises(Refusal, match="input_type is for texts: prompt holds token ids"):
        ChosenPrompt("q: ", "input_type").put_before(mixed)


@pytest.mark.parametrize(
    ("before", "kept", "pooled", "is_refused"),
    [("q: ", -1, "", True), ("q: ", None, "", False), ("", -1, "", False), ("q: ", -1, "vectors", False)],
)
def test_a_prompt_is_never_cut_off(before: str, kept: int | None, pooled: Any, is_refused: bool) -> None:
    limits = RequestLimits(vocab_size=256, max_seq_len=8, max_input_len=8, kv_cache_tokens=8, pooled=pooled)
    limit = Limit(truncate_prompt_tokens=kept)
    if not is_refused:
        check_kept(before, limit, limits)
        return
    with pytest.raises(Refusal, match="truncate_prompt_tokens is not supported here: this model keeps the end"):
        check_kept(before, limit, limits)


def write(folder: Path, settings: object, pooling: object = None) -> Path:
    """As sentence-transformers does."""
    (folder / PROMPTS).write_text(json.dumps(settings))
    if pooling is not None:
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return folder


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"prompts": ALL, "default_prompt_name": "query"}, TextPrompts(by_name=ALL, default_name="query")),
        (
            {"__version__": {"pytorch": "2"}, "prompts": {}, "default_prompt_name": None, "similarity_fn_name": "dot"},
            TextPrompts(),
        ),
        ({"prompts": None}, TextPrompts()),
    ],
)
def test_prompts_are_what_the_checkpoints_file_says(tmp_path: Path, settings: object, expected: TextPrompts) -> None:
    assert find_prompts(tmp_path, is_pooling_set=False) == TextPrompts()
    assert find_prompts(write(tmp_path, settings), is_pooling_set=False) == expected


def test_the_file_comes_with_a_model_of_the_hub() -> None:
    assert small_files([PROMPTS, "README.md"]) == [PROMPTS]


@pytest.mark.parametrize(
    ("settings", "pooling", "sentence"),
    [
        ([], None, "config_sentence_transformers.json cannot be read"),
        ({"prompts": ["query"]}, None, "config_sentence_transformers.json cannot be read: Expected `object"),
        ({"prompts": {"query": 1}}, None, "config_sentence_transformers.json cannot be read: Expected `str`"),
        ({"default_prompt_name": 1}, None, "config_sentence_transformers.json cannot be read: Expected `str"),
        (
            {"prompts": ALL, "default_prompt_name": "a\nb"},
            None,
            r"config_sentence_transformers.json of the checkpoint has no prompt of the name that its "
            r"default_prompt_name is: a\\nb",
        ),
        (
            {"prompts": ALL},
            {"pooling_mode": "mean", "include_prompt": 0},
            "include_prompt in 1_Pooling/config.json of the checkpoint is neither true nor false",
        ),
    ],
)
def test_a_malformed_file_is_refused_by_name(tmp_path: Path, settings: object, pooling: object, sentence: str) -> None:
    with pytest.raises(ConfigurationError, match=sentence):
        find_prompts(write(tmp_path, settings, pooling), is_pooling_set=False)


@pytest.mark.parametrize(
    ("pooling", "is_pooling_set", "are_pooled"),
    [
        ({"pooling_mode": "mean", "include_prompt": False}, False, False),
        ({"pooling_mode": "mean", "include_prompt": True}, False, True),
        ({"pooling_mode_max_tokens": True}, False, True),
        ({"pooling_mode": "lasttoken", "include_prompt": False}, False, True),
        ({"pooling_mode": "cls", "include_prompt": False}, False, True),
        ({"pooling_mode": "mean", "include_prompt": False}, True, True),
    ],
)
def test_a_vector_may_leave_prompts_out(
    tmp_path: Path, pooling: object, is_pooling_set: bool, are_pooled: bool
) -> None:
    settings = {"prompts": ALL, "default_prompt_name": "query"}
    found = find_prompts(write(tmp_path, settings, pooling), is_pooling_set=is_pooling_set)
    assert found.are_pooled == are_pooled
    assert found.chosen("passage") == ChosenPrompt("p: ", "prompt_name", are_pooled)
    assert (found.chosen(), found.of_pairs()) == (ChosenPrompt("q: ", counts=are_pooled), ("q: ", "p: "))
