"""A refusal is told in a dialect's words, and the engine's sentences find their field."""

from __future__ import annotations

import pytest

from inflight.asking.prepared import Prepared
from inflight.asking.refusal import Refusal


def test_each_field_has_the_dialects_word_and_what_a_client_wrote_stays_as_it_is() -> None:
    refusal = Refusal("tool_choice", "{0} allows {name}, which is not in {1}", "tools", name="{0} tools")
    assert str(refusal) == "tool_choice allows {0} tools, which is not in tools"
    words = {"tool_choice": "toolConfig", "tools": "toolSpecs"}
    assert refusal.said(words) == "toolConfig allows {0} tools, which is not in toolSpecs"


@pytest.mark.parametrize(
    ("sentence", "field"),
    [
        ("the prompt has 7 tokens, more than max_input_len 6", "prompt"),
        ("token id 300 is outside the vocabulary [0, 300)", "prompt"),
        ("the guide holds a null character", "tools"),
        ("embedding_bias must hold numbers", "embedding_bias"),
        ("there is no LoRA adapter x", "adapter"),
        ("min_tokens (9) must not be above max_tokens (4)", "min_tokens"),
        ("something else went wrong", ""),
    ],
)
def test_the_engines_sentence_is_about_a_field(sentence: str, field: str) -> None:
    refusal = Prepared(prompts=[], guide_field="tools").refusal(sentence)
    assert (refusal.field, str(refusal)) == (field, sentence)
