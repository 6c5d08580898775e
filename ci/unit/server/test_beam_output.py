"""A beam's way back: each response holds all of it, and only the newest is sent."""

from __future__ import annotations

import fake_tokenizer

from inflight.result import FinishReason, Result
from inflight.server.beam_output import BeamOutput
from inflight.server.sequence_output import Prompt
from inflight.text.detokenizer import Detokenizer
from inflight.text.text_decoder import make_text_decoder


def make_detokenizer() -> Detokenizer:
    return Detokenizer(make_text_decoder(fake_tokenizer.byte_tokenizer(), [65, 66]))


def result(text: bytes, finish: FinishReason = FinishReason.NOT_FINISHED) -> Result:
    return Result(
        output_token_ids=list(text),
        log_probs=[-1.0] * len(text),
        cum_log_prob=-float(len(text)),
        finish_reason=finish,
        is_sequence_final=finish is not FinishReason.NOT_FINISHED,
    )


def test_a_chunk_replaces_the_one_before() -> None:
    output = BeamOutput(1, make_detokenizer, None)
    assert not output.has_something_to_show(True)
    for text in (b"a", b"ab"):
        output.add(result(text))
    chunk = output.take_chunk(2, "")
    assert (chunk.text, chunk.token_ids, chunk.log_probs, chunk.cum_log_prob) == ("ab", [97, 98], [-1.0, -1.0], -2.0)
    assert (chunk.sequence_index, chunk.num_output_tokens, chunk.finish_reason) == (1, 2, "")
    assert output.has_streamed and not output.is_delivered and not output.has_something_to_show(True)
    output.add(result("xé".encode()[:2]))
    assert output.take_chunk(2, "").text == "x", "half a character is held back"
    output.add(result(b"xyz", FinishReason.END_ID))
    assert output.is_finished and output.num_tokens == 3
    output.add(result(b"late"))
    chunk = output.take_chunk(2, "")
    assert (chunk.text, chunk.finish_reason) == ("xyz", "stop") and output.is_delivered


def test_without_a_stream_the_prompt_comes_first() -> None:
    output = BeamOutput(0, make_detokenizer, Prompt(text="AB", token_ids=(65, 66)))
    output.add(result(b"c", FinishReason.LENGTH))
    chunk = output.take_chunk(2, "")
    assert (chunk.text, chunk.token_ids, chunk.num_output_tokens) == ("ABc", [65, 66, 99], 1)
