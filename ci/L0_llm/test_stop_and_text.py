"""Text as readers see it: golden outputs, whole characters, stop strings, reasons and log probabilities.

pytest ci/L0_llm/test_stop_and_text.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from inflight_client import Client

GOLDENS: list[dict[str, Any]] = json.loads((Path(__file__).parents[1] / "golden/default_model.json").read_text("utf-8"))
UNICODE = "<|begin_of_text|><|user|>Show me a fox emoji.<|end_of_turn|><|assistant|>"
END_IDS = (2, 3)
"""End of text and end of turn."""
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


@pytest.mark.parametrize("golden", GOLDENS, ids=lambda golden: golden["name"])
def test_greedy_outputs_are_those_of_transformers(client: Client, golden: dict[str, Any]) -> None:
    stream = client.stream(golden["prompt_ids"], max_tokens=48)
    pieces = [chunk.text for chunk in stream]
    answer = stream.completion
    ends = golden["token_ids"][-1] in END_IDS
    assert answer.finish_reason == ("stop" if ends else "length")
    assert list(answer.token_ids) == golden["token_ids"]
    assert "".join(pieces) == golden["text"] == client.generate(golden["prompt_ids"], max_tokens=48).text
    assert answer.num_input_tokens == len(golden["prompt_ids"])


@pytest.mark.parametrize("golden", GOLDENS[:5], ids=lambda golden: golden["name"])
def test_a_prompt_as_text_is_the_same_as_its_tokens(client: Client, golden: dict[str, Any]) -> None:
    answer = client.generate(golden["prompt"], max_tokens=48)
    assert answer.text == golden["text"] and answer.num_input_tokens == len(golden["prompt_ids"])


@pytest.mark.parametrize("prompt", ["Show me a 🦊, a 🐻 and a 🐸:", "José and Zoë saw", UNICODE])
@pytest.mark.parametrize("temperature", [0.0, 1.0, 20.0])
def test_no_piece_holds_half_a_character(client: Client, prompt: str, temperature: float) -> None:
    """Emojis take several tokens each. At 20 tokens are near random, so broken characters are generated: they come as
    replacement characters, in the same places streamed or not."""
    options: dict[str, Any] = {"max_tokens": 60, "temperature": temperature, "seed": 11, "end_id": -1}
    whole = client.generate(prompt, **options).text
    pieces = [chunk.text for chunk in client.stream(prompt, **options)]
    assert "".join(pieces) == whole
    if REPLACEMENT not in whole:
        assert all(REPLACEMENT not in piece for piece in pieces)
    if temperature == 0.0 and prompt is UNICODE:
        assert "🦊" in whole


def test_a_stop_string_is_found_wherever_it_lies_between_tokens(client: Client) -> None:
    """Every substring of the answer is tried as stop string; most cross the borders of tokens."""
    prompt = "Once upon a time there was a little duck named"
    text = client.generate(prompt, max_tokens=24, end_id=-1).text
    tried = [text[start : start + length] for length in (1, 2, 5, 11) for start in range(0, len(text) - length, 7)]
    for stop in tried:
        stream = client.stream(prompt, max_tokens=24, end_id=-1, stop_words=["never so", stop])
        pieces = [chunk.text for chunk in stream]
        assert "".join(pieces) == text[: text.index(stop)], stop
        assert stream.completion.finish_reason == "stop"
        whole = client.generate(prompt, max_tokens=24, end_id=-1, stop_words=[stop])
        assert (whole.text, whole.finish_reason) == ("".join(pieces), "stop")


def test_an_emoji_as_stop_string(client: Client) -> None:
    answer = client.generate(UNICODE, max_tokens=20, stop_words=["🦊"])
    assert answer.text == "Here is a fox: " and answer.finish_reason == "stop"


def test_every_reason_to_end(client: Client) -> None:
    golden = next(golden for golden in GOLDENS if golden["name"] == "chat")
    ids = golden["prompt_ids"]
    assert client.generate(ids, max_tokens=48).finish_reason == "stop"
    assert client.generate(ids, max_tokens=3).finish_reason == "length"
    assert client.generate(ids, max_tokens=48, stop_words=["capital"]).finish_reason == "stop"
    own_end = golden["token_ids"][2]
    assert client.generate(ids, max_tokens=48, end_id=own_end).num_output_tokens <= 3
    beyond = client.generate(ids, max_tokens=20, end_id=-1)
    assert (beyond.num_output_tokens, beyond.finish_reason) == (20, "length")


def test_log_probs_are_one_for_each_token(client: Client) -> None:
    for options in ({}, {"temperature": 1.0, "seed": 3}):
        stream = client.stream("Once upon a time", max_tokens=12, end_id=-1, return_log_probs=True, **options)  # type: ignore[arg-type]
        for chunk in stream:
            assert len(chunk.log_probs) == len(chunk.token_ids)
        answer = stream.completion
        assert len(answer.log_probs) == 12 and all(value <= 0 for value in answer.log_probs)
        assert answer.cum_log_probs == pytest.approx(sum(answer.log_probs), rel=1e-4)
    assert client.generate("Once upon a time", max_tokens=4).log_probs == ()


def test_words_that_must_not_come(client: Client) -> None:
    plain = client.generate("Once upon a time", max_tokens=40, end_id=-1)
    assert "fox" in plain.text
    answer = client.generate("Once upon a time", max_tokens=40, end_id=-1, bad_words=[" fox"])
    assert " fox" not in answer.text and answer.num_output_tokens == 40
