"""A played engine that writes no text: it gives scores of pairs of texts, or vectors of texts, by their letters."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import tokenizers
from fake_tokenizer import byte_tokenizer_with
from openai_server import PlayedEngine

from inflight.engine_description import EngineDescription
from inflight.output_config import SCORES
from inflight.request import Request
from inflight.result import FinishReason, NamedTensor, Response, Result
from inflight.text.tokenizer import Tokenizer


def halves(request: Request) -> tuple[bytes, bytes]:
    ids, start = request.input_token_ids, request.second_text_start
    return bytes(ids[:start]), bytes(ids[start:])


def likeness(first: bytes, second: bytes) -> float:
    """How many letters of the first text the second one has, less those that it has besides."""
    return float(sum(letter in second for letter in first) - sum(letter not in first for letter in second))


def play(request: Request) -> list[Response]:
    """The score of a pair, or the numbers of a text's letters as its vector."""
    (asked,) = request.output_config.additional_model_outputs
    if asked.name == SCORES:
        row = np.array([[likeness(*halves(request))]], np.float32)
    else:
        row = np.array([[request.input_token_ids.count(letter) for letter in b"abcd"]], np.float32)
    name = SCORES if asked.name == SCORES else f"pooled_{asked.name}"
    result = Result(
        tensors=[NamedTensor.of(name, row)],
        finish_reason=FinishReason.LENGTH,
        is_final=True,
        is_sequence_final=True,
    )
    return [Response(request_id=request.request_id, result=result)]


def tokenizer() -> Tokenizer:
    """That says which of a pair's texts a token is of."""
    found = byte_tokenizer_with()
    found._backend.post_processor = tokenizers.processors.TemplateProcessing(single="$A", pair="$A:0 $B:1")
    return found


def engine(**changes: Any) -> PlayedEngine:
    """`changes`: of its limits."""
    played = PlayedEngine(play)
    given = {"pooled": "scores", "num_labels": 1, "hidden_size": 4, "model_outputs": ["hidden_states", SCORES]}
    limits = msgspec.structs.replace(played.limits, **{**given, **changes})
    played._replica_ready(limits, EngineDescription(device="cpu"), max_in_flight=0)
    return played
