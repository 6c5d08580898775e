"""The future of a request: what readers see of it, whoever reads and whenever; text, stop strings, errors."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from fake_tokenizer import byte_tokenizer, sentencepiece_tokenizer
from harness import make_request

from inflight.errors import (
    DuplicateRequest,
    EngineUnavailable,
    InflightError,
    InvalidRequest,
    QueueFull,
    RequestCancelled,
    RequestTimedOut,
    StepFailed,
)
from inflight.executor.front.generation_result import GenerationResult
from inflight.executor.front.sequence_output import SequenceOutput
from inflight.result import FinishReason, NamedTensor, Response, Result
from inflight.text.detokenizer import Detokenizer
from inflight.text.stop_strings import StopStrings
from inflight.text.text_decoder import make_text_decoder
from inflight.text.tokenizer import Tokenizer


class Generation:
    """A result, and the engine behind it: `aborted` holds the ids that it was asked to end."""

    def __init__(
        self,
        *,
        num_sequences: int = 1,
        stop: list[str] | None = None,
        tokenizer: Tokenizer | None = None,
        streaming: bool = True,
    ) -> None:
        self.aborted: list[int] = []
        self.aborted_sequences: list[tuple[int, int]] = []
        tokenizer = tokenizer or byte_tokenizer()
        self.result = GenerationResult(
            make_request(1, 2, streaming=True, num_return_sequences=num_sequences),
            self.aborted.append,
            abort_sequence=lambda *sequence: self.aborted_sequences.append(sequence),
            streaming=streaming,
            sequences=[
                SequenceOutput(
                    index,
                    Detokenizer(make_text_decoder(tokenizer, []), StopStrings(stop) if stop else None),
                    has_stop_strings=bool(stop),
                )
                for index in range(num_sequences)
            ],
        )
        self._num_open = num_sequences

    def say(self, text: bytes | list[int], end: FinishReason = FinishReason.NOT_FINISHED, **fields: Any) -> None:
        """One response with these tokens; `end` ends the sequence."""
        is_end = end is not FinishReason.NOT_FINISHED
        self._num_open -= is_end
        result = Result(
            output_token_ids=list(text),
            finish_reason=end,
            is_sequence_final=is_end,
            is_final=self._num_open == 0,
            **fields,
        )
        self.result.add(Response(request_id=1, result=result))


def test_each_reader_sees_all_and_what_is_new_to_it() -> None:
    generation = Generation()
    early = iter(generation.result)
    generation.say(b"On")
    first = next(early)
    assert (first.text, first.text_diff, first.token_ids_diff) == ("On", "On", [79, 110])
    generation.say(b"ce")
    generation.say(b" upon")
    second = next(early)
    assert (second.text, second.text_diff, second.token_ids_diff) == ("Once upon", "ce upon", list(b"ce upon"))
    late = iter(generation.result)
    assert next(late).text_diff == "Once upon"
    generation.say(b".", FinishReason.LENGTH)
    assert [output.text_diff for output in early] == [output.text_diff for output in late] == ["."]
    final = generation.result.result()
    assert (final.text, final.text_diff, final.finished) == ("Once upon.", "Once upon.", True)
    assert first.text == "On" and not first.finished, "an output stays as it was"


def test_characters_are_shown_when_they_are_whole() -> None:
    generation = Generation()
    reader = iter(generation.result)
    shown = []
    for byte in "é🙂".encode():
        generation.say([byte])
        shown.append(next(reader).text_diff)
    assert shown == ["", "é", "", "", "", "🙂"]
    generation.say(b"\xf0\x9f", FinishReason.LENGTH)
    assert generation.result.result().text == "é🙂�", "what the end cuts off shows as a replacement"


def test_text_does_not_depend_on_when_somebody_looks() -> None:
    tokenizer = sentencepiece_tokenizer()
    ids = tokenizer.encode_plain("the cat sat 日本")
    looked_at, left_alone = Generation(tokenizer=tokenizer), Generation(tokenizer=tokenizer)
    reader = iter(looked_at.result)
    pieces = []
    for token_id in ids[:-1]:
        for generation in (looked_at, left_alone):
            generation.say([token_id])
        pieces.append(next(reader).text_diff)
    for generation in (looked_at, left_alone):
        generation.say(ids[-1:], FinishReason.LENGTH)
    pieces += [output.text_diff for output in reader]
    assert "".join(pieces) == looked_at.result.result().text == left_alone.result.result().text


def test_a_result_that_does_not_stream_yields_its_end_only() -> None:
    generation = Generation(streaming=False)
    generation.say(b"a")
    generation.say(b"b", FinishReason.LENGTH)
    assert [output.text for output in generation.result] == ["ab"]


@pytest.mark.parametrize(
    "pieces", [[b"one two three"], [b"one t", b"wo three"], [bytes([c]) for c in b"one two three"]]
)
def test_a_stop_string_ends_the_request_and_is_cut_off(pieces: list[bytes]) -> None:
    generation = Generation(stop=["two", "zz"])
    for piece in pieces:
        generation.say(piece, log_probs=[-1.0] * len(piece), cum_log_prob=0.0)
    output = generation.result.result(timeout=0)
    assert (output.text, output.finish_reason) == ("one ", FinishReason.STOP_WORDS)
    assert bytes(output.token_ids) == b"one two" and len(output.log_probs) == 7
    assert generation.aborted == [1], "the ranks are told once"
    generation.say(b" more", FinishReason.CANCELLED)
    assert generation.result.result().text == "one "


def test_the_sum_of_log_probabilities_ends_with_the_stop_string() -> None:
    generation = Generation(stop=["b"])
    generation.say(b"ab", log_probs=[-1.0, -2.0], cum_log_prob=-3.0)
    assert generation.result.result().cumulative_logprob == -3.0
    generation = Generation(stop=["b"])
    generation.say(b"abcd", log_probs=[-1.0, -2.0, -4.0, -8.0], cum_log_prob=-15.0)
    assert generation.result.result().cumulative_logprob == -3.0


def test_tensors_end_with_the_response_that_holds_the_stop_string() -> None:
    """What the ranks had computed by the time they heard of it depends on chance."""
    generation = Generation(stop=["b"], num_sequences=2)
    for text in (b"a", b"b", b"c"):
        generation.say(text, tensors=[NamedTensor.of("numbers", np.array(list(text), np.int32))])
    assert generation.result.tensors()["numbers"].tolist() == list(b"ab")


def test_a_stop_string_at_the_engines_end_is_not_aborted() -> None:
    generation = Generation(stop=["two"])
    generation.say(b"one two", FinishReason.LENGTH)
    assert generation.result.result().finish_reason is FinishReason.STOP_WORDS
    assert generation.aborted == generation.aborted_sequences == []


def test_each_sequence_has_its_own_text_and_end() -> None:
    generation = Generation(num_sequences=3, stop=["!"])
    reader = iter(generation.result)
    generation.say(b"a", sequence_index=0)
    generation.say(b"bb!b", sequence_index=1)
    generation.say(b"c", FinishReason.END_ID, sequence_index=2)
    assert [output.text for output in next(reader).outputs] == ["a", "bb", "c"]
    assert not generation.result.done
    generation.say(b"bbb", sequence_index=1)
    assert generation.aborted_sequences == [(1, 1)] and generation.aborted == []
    generation.say(b"A", FinishReason.LENGTH, sequence_index=0)
    assert generation.result.done and generation.aborted == [1], "only the ranks think that sequence 1 goes on"
    *_, last = reader
    assert [output.text for output in last.outputs] == ["aA", "bb", "c"]
    assert [output.text_diff for output in last.outputs] == ["A", "", ""]
    assert [output.index for output in last.outputs] == [0, 1, 2]
    assert [output.finish_reason for output in last.outputs] == [
        FinishReason.LENGTH,
        FinishReason.STOP_WORDS,
        FinishReason.END_ID,
    ]


def test_without_a_tokenizer_there_are_tokens_only() -> None:
    result = GenerationResult(make_request(1, 2), lambda request_id: None)
    result.add(Response(request_id=1, result=Result(output_token_ids=[5, 6], is_final=True)))
    output = result.result()
    assert (output.text, output.token_ids) == ("", [5, 6])


def test_outputs_can_be_looked_at_without_waiting() -> None:
    generation = Generation()
    assert [output.text for output in generation.result.outputs] == [""]
    generation.say(b"ab")
    assert [output.text for output in generation.result.outputs] == ["ab"]
    generation.result.fail(EngineUnavailable("gone"))
    assert [output.text for output in generation.result.outputs] == ["ab"]


@pytest.mark.parametrize(
    "kind",
    [InvalidRequest, DuplicateRequest, QueueFull, RequestCancelled, RequestTimedOut, StepFailed, EngineUnavailable],
)
def test_an_error_is_of_the_kind_that_ended_the_request(kind: type[InflightError]) -> None:
    generation = Generation()
    generation.result.add(Response.of_error(1, kind("a sentence")))
    with pytest.raises(kind, match="a sentence"):
        generation.result.result()
    with pytest.raises(kind, match="a sentence"):
        next(iter(generation.result))


def test_an_error_reaches_everybody_who_waits() -> None:
    generation = Generation()
    heard: list[str] = []

    def wait() -> None:
        with pytest.raises(EngineUnavailable) as caught:
            generation.result.result()
        heard.append(str(caught.value))

    threads = [threading.Thread(target=wait) for _ in range(4)]
    for thread in threads:
        thread.start()
    generation.result.fail(EngineUnavailable("the thread has died"))
    for thread in threads:
        thread.join(30)
    assert heard == ["the thread has died"] * 4
    generation.say(b"too late", FinishReason.LENGTH)
    with pytest.raises(EngineUnavailable):
        generation.result.result()


def test_a_finished_result_is_not_failed_any_more() -> None:
    generation = Generation()
    generation.say(b"done", FinishReason.LENGTH)
    generation.result.fail(EngineUnavailable("gone"))
    assert generation.result.result().text == "done"


def test_waiting_has_an_end() -> None:
    generation = Generation()
    with pytest.raises(TimeoutError):
        generation.result.result(timeout=0)


def test_a_response_costs_what_it_brings() -> None:
    """What has come is not copied again for each response: of a long answer that would be most of the work."""
    result = GenerationResult(make_request(1, 2), lambda request_id: None)
    (sequence,) = result._sequences
    kept = sequence._token_ids
    result.add(Response(request_id=1, result=Result(output_token_ids=[1, 2])))
    result.add(Response(request_id=1, result=Result(output_token_ids=[3], is_final=True)))
    assert sequence._token_ids is kept and result.result().token_ids == [1, 2, 3]
