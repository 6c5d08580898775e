"""Outputs that follow grammars, through tritonserver: streamed and whole, beside free ones, and refusals.

pytest ci/L0_llm/test_guided.py
"""

from __future__ import annotations

import json

import pytest
from guides import BOMBS, GUIDES, PERSON, is_person
from server_metrics import Metrics
from server_process import ServerProcess
from waiting import until

from inflight_client import Client, InvalidRequest

PROMPT = "Once upon a time there was a little duck named"


def test_a_streamed_answer_follows_its_json_schema(client: Client, server: ServerProcess) -> None:
    """The server says so, too: its last check has seen them."""
    num_checked = Metrics(server).of("inflight_guided_answers_checked_total")
    free = client.generate(PROMPT, max_tokens=24, temperature=0.0).text

    def pieces(seed: int) -> list[str]:
        stream = client.stream(
            PROMPT,
            max_tokens=400,
            temperature=1.0,
            seed=seed,
            guided_decoding_guide_type="json_schema",
            guided_decoding_guide=json.dumps(PERSON),
        )
        found = [chunk.text for chunk in stream]
        assert stream.completion.finish_reason == "stop"
        return found

    for seed in range(4):
        assert is_person("".join(pieces(seed)))
    until(lambda: Metrics(server).of("inflight_guided_answers_checked_total") >= num_checked + 4, "all are checked")
    # A server whose sender is behind puts many tokens into one piece.
    until(lambda: len(pieces(0)) > 1, "an answer comes in pieces")
    assert client.generate(PROMPT, max_tokens=24, temperature=0.0).text == free


@pytest.mark.parametrize("name", ["regex", "ebnf_grammar", "structural_tag"])
def test_every_type_is_served(client: Client, name: str) -> None:
    params, follows = GUIDES[name]
    answer = client.generate(
        PROMPT, max_tokens=200, guided_decoding_guide_type=name, guided_decoding_guide=params.guide, temperature=0.0
    )
    assert answer.finish_reason == "stop" and follows(answer.text)


def test_what_is_not_strict_is_followed_as_far_as_it_can_be_and_the_rest_is_named(client: Client) -> None:
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}, "a": {"type": "string", "pattern": "(?=x)y"}}}
    guided = {
        "guided_decoding_guide_type": "json_schema",
        "guided_decoding_guide": json.dumps({**schema, "required": ["ok"]}),
        "guided_decoding_white_space": "compact",
        "max_tokens": 200,
        "temperature": 1.0,
        "seed": 3,
    }
    with pytest.raises(InvalidRequest, match="pattern of /properties/a"):
        client.generate(PROMPT, **guided)
    answer = client.generate(PROMPT, **guided, guided_decoding_strict=False)
    assert answer.guide_not_enforced == ("#/properties/a pattern",)
    assert answer.finish_reason == "length" or isinstance(json.loads(answer.text)["ok"], bool)
    assert answer.text.startswith('{"ok":')


@pytest.mark.parametrize(
    ("guide_type", "guide", "words"),
    [
        ("xml", "", "must be one of json, json_schema"),
        ("json_schema", "{", "not valid JSON"),
        ("regex", BOMBS["nested repetitions"].guide, "more than 20000 parts"),
        ("", "x", "needs guided_decoding_guide_type"),
    ],
)
def test_what_cannot_be_followed_is_an_invalid_argument(
    client: Client, guide_type: str, guide: str, words: str
) -> None:
    with pytest.raises(InvalidRequest, match=words):
        client.generate(PROMPT, guided_decoding_guide_type=guide_type, guided_decoding_guide=guide)
