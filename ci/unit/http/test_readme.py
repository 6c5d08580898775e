"""The reference of OpenAI's API, README.md of its room, says what the code says."""

from __future__ import annotations

from pathlib import Path

from inflight.asking.text_prompts import INPUT_TYPES
from inflight.http.dialects.anthropic import fields as of_messages
from inflight.http.dialects.ollama import fields as of_ollama
from inflight.http.dialects.openai import rerank
from inflight.http.dialects.openai.embeddings import EmbeddingBody
from inflight.http.dialects.openai.fields import ACCEPTED_UNUSED, REFUSED, ChatBody, CompletionBody
from inflight.http.dialects.openai.responses import fields as of_responses
from inflight.openai_options import SETTABLE, OpenAIOptions

ROOT = Path(__file__).resolve().parents[3]
REFERENCE = (ROOT / "backend" / "inflight" / "http" / "README.md").read_text(encoding="utf-8")
WELL_KNOWN = """
    model messages prompt max_tokens max_completion_tokens n best_of stream stream_options temperature top_p seed stop
    frequency_penalty presence_penalty logit_bias response_format echo logprobs top_logprobs
    tools tool_choice parallel_tool_calls input
    system stop_sequences
"""
"""Fields that it does not name, because they are OpenAI's and are honoured."""


def rows(first_column: str) -> list[list[str]]:
    lines = REFERENCE.split(f"| {first_column} |")[1].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip().strip("`") for cell in line.strip("| ").split(" | ")] for line in lines]


def test_refused_fields() -> None:
    assert rows("field") == [[name, why] for name, (_, why) in REFUSED.items()]
    assert rows("field of a response") == [[name, why] for name, (_, why) in of_responses.REFUSED.items()]
    assert rows("field of a rerank") == [[name, why] for name, why in rerank.REFUSED.items()]
    assert rows("field of a message") == [[name, why] for name, (_, why) in of_messages.REFUSED.items()]
    assert rows("field of a text") == [[name, why] for name, (_, why) in of_ollama.REFUSED.items()]


def test_input_types() -> None:
    told = {}
    for types, prompts in rows("`input_type`"):
        told |= dict.fromkeys(types.split("`, `"), tuple(prompts.split("`, `")))
    assert told == INPUT_TYPES


def test_settings() -> None:
    assert sorted(row[0] for row in rows("setting")) == sorted(SETTABLE)
    for name, shown, _ in rows("setting"):
        default = getattr(OpenAIOptions(), name)
        if isinstance(default, int | float):
            assert float({"false": "0"}.get(shown, shown)) == default


def test_every_field_is_named() -> None:
    bodies = (ChatBody, CompletionBody, of_responses.ResponseBody, of_messages.MessagesBody, of_ollama.Options)
    bodies = (*bodies, EmbeddingBody, rerank.RerankBody, rerank.ScoreBody)
    names = {name for body in bodies for name in body.__struct_fields__} - {*WELL_KNOWN.split()} - {*ACCEPTED_UNUSED}
    assert sorted(name for name in names if f"`{name}`" not in REFERENCE) == []
