"""What readers of the library see of a beam: everything, each time, and what it holds in the end."""

from __future__ import annotations

from fake_tokenizer import byte_tokenizer
from harness import make_request

from inflight.config import EngineConfig
from inflight.executor.front.beam_output import BeamOutput
from inflight.executor.front.journal_entry import JournalEntry
from inflight.executor.front.sequence_output import Seen
from inflight.result import FinishReason, Response, Result
from inflight.text.detokenizer import Detokenizer
from inflight.text.text_decoder import make_text_decoder


def make_detokenizer() -> Detokenizer:
    return Detokenizer(make_text_decoder(byte_tokenizer(), [65]))


def test_each_result_replaces_the_one_before() -> None:
    output = BeamOutput(2, make_detokenizer)
    output.add(Result(output_token_ids=list(b"ab"), log_probs=[-1.0, -2.0], cum_log_prob=-3.0))
    first, seen = output.look(Seen())
    assert (first.text, first.text_diff, first.token_ids_diff, first.log_probs) == ("ab", "ab", [97, 98], [-1.0, -2.0])
    output.add(Result(output_token_ids=list(b"xyz"), cum_log_prob=-2.5))
    second, seen = output.look(seen)
    assert (second.index, second.text, second.text_diff, second.cumulative_logprob) == (2, "xyz", "xyz", -2.5)
    output.add(
        Result(output_token_ids=list(b"x"), finish_reason=FinishReason.END_ID, is_sequence_final=True, is_final=True)
    )
    last, _ = output.look(seen)
    assert (last.text, last.token_ids, last.finish_reason) == ("x", [120], FinishReason.END_ID)
    assert output.is_finished and BeamOutput(0).look(Seen())[0].text == ""


def test_a_front_passes_beams_on_as_they_are() -> None:
    request = make_request(1, 2, beam_width=2, streaming=True, return_all_generated_tokens=True)
    entry = JournalEntry(request, EngineConfig())
    for tokens in ([1], [2, 3]):
        response = Response(request_id=1, result=Result(output_token_ids=tokens, log_probs=[-1.0] * len(tokens)))
        (noted,) = (each.result for each in entry.note(response))
        assert noted is not None and noted.output_token_ids == tokens and len(noted.log_probs) == len(tokens)
