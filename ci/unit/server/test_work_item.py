"""One request's way back: merged tokens, the prompt's echo, stop strings, and exactly one final response."""

from __future__ import annotations

import fake_pb_utils as pb
import fake_tokenizer
import numpy as np
import pytest

from inflight.request import Request
from inflight.result import FinishReason, NamedTensor, Result
from inflight.server.reply import Reply
from inflight.server.sequence_output import Prompt, SequenceOutput
from inflight.server.tensors.client_request import ClientRequest
from inflight.server.tensors.dialects import LLM
from inflight.server.work_item import WorkItem
from inflight.text.detokenizer import Detokenizer
from inflight.text.stop_strings import StopStrings
from inflight.text.text_decoder import make_text_decoder


def make(
    client: ClientRequest, *, requested=None, echo: Prompt | None = None, repeats: tuple[str, ...] = (), **more
) -> tuple[WorkItem, pb.ResponseSender]:
    tokenizer = fake_tokenizer.byte_tokenizer()
    sender = pb.ResponseSender()
    item = WorkItem(
        request=Request(request_id=1, input_token_ids=[], max_tokens=100),
        client=client,
        dialect=LLM,
        reply=Reply(pb, sender),
        requested=requested,
        **more,
    )
    request = Request(request_id=1, input_token_ids=[65, 66], max_tokens=100)
    stop_strings = StopStrings(client.stop_words) if client.stop_words else None
    outputs = [
        SequenceOutput(
            index,
            Detokenizer(make_text_decoder(tokenizer, [65, 66]), stop_strings),
            echo,
            client.additional_outputs or (),
            repeats=repeats,
        )
        for index in range(client.num_return_sequences or 1)
    ]
    item.prepare(request, outputs)
    return item, sender


def result(text: bytes, finish: FinishReason = FinishReason.NOT_FINISHED, **more) -> Result:
    final = finish is not FinishReason.NOT_FINISHED
    return Result(output_token_ids=list(text), finish_reason=finish, is_final=final, is_sequence_final=final, **more)


def test_tokens_that_wait_go_out_together() -> None:
    item, sender = make(ClientRequest(text="AB", stream=True))
    for piece in (b"a", b"bc"):
        item.add(result(piece))
    item.deliver()
    item.deliver()
    item.add(result(b"d", FinishReason.LENGTH))
    item.deliver()
    assert [response["text_output"] for response in sender.responses] == ["abc", "d"]
    assert [response["output_ids"] for response in sender.responses] == [[[97, 98, 99]], [[100]]]
    assert [response["sequence_length"] for response in sender.responses] == [[3], [1]]
    assert [response["finish_reason"] for response in sender.responses] == ["", "length"]
    assert sender.num_finals == 1


def test_responses_of_a_stream_may_repeat_what_was_sent() -> None:
    client = ClientRequest(text="AB", stream=True, return_log_probs=True, return_context_logits=True)
    item, sender = make(client, repeats=("text", "log_probs", "context_logits"))
    logits = NamedTensor.of("context_logits", np.ones((2, 3), np.float32))
    item.add(result(b"a", log_probs=[-1.0], tensors=[logits]))
    item.deliver()
    item.add(result(b"bc", log_probs=[-2.0, -3.0]))
    item.deliver()
    item.add(result(b"", FinishReason.LENGTH))
    item.deliver()
    assert [response["text_output"] for response in sender.responses] == ["a", "abc", "abc"]
    assert [response["output_ids"] for response in sender.responses] == [[[97]], [[98, 99]], [[]]]
    whole = [[-1.0, -2.0, -3.0]]
    assert [response["output_log_probs"] for response in sender.responses] == [[[-1.0]], whole, whole]
    assert ["context_logits" in response.names() for response in sender.responses] == [True, False, True]
    assert sender.responses[0]["context_logits"] == sender.responses[-1]["context_logits"]


def test_a_text_client_is_not_sent_half_a_character() -> None:
    item, sender = make(ClientRequest(text="AB", stream=True))
    for byte in "é!".encode():
        item.add(result(bytes([byte])))
        item.deliver()
    assert [response["text_output"] for response in sender.responses] == ["é", "!"]
    assert [response["output_ids"] for response in sender.responses] == [[[0xC3, 0xA9]], [[0x21]]]


@pytest.mark.parametrize(
    "client",
    [ClientRequest(input_ids=[65, 66], stream=True), ClientRequest(text="AB", stream=True)],
    ids=["ids", "text"],
)
def test_a_token_client_gets_each_token_at_once(client: ClientRequest) -> None:
    requested = frozenset({"output_ids"}) if client.text else None
    item, sender = make(client, requested=requested)
    item.add(result(b"\xc3"))
    item.deliver()
    assert sender.responses[0]["output_ids"] == [[0xC3]]


def test_without_streaming_one_response_holds_everything() -> None:
    item, sender = make(ClientRequest(text="AB"), echo=Prompt(text="AB", token_ids=(65, 66)))
    item.add(result(b"cd"))
    item.deliver()
    assert not sender.responses
    item.add(result(b"e", FinishReason.END_ID))
    item.deliver()
    (response,) = sender.responses
    assert response["text_output"] == "ABcde"
    assert response["output_ids"] == [[65, 66, 99, 100, 101]]
    assert response["sequence_length"] == [5]
    assert response["finish_reason"] == "stop"


def test_a_stop_string_ends_the_request_before_the_engine_does() -> None:
    client = ClientRequest(
        text="AB", stream=True, stop_words=["..."], return_log_probs=True, return_num_output_tokens=True
    )
    item, sender = make(client)
    item.add(result(b"x.", log_probs=[-1.0, -1.0], cum_log_prob=-2.0))
    item.deliver()
    item.add(result(b"..yz", log_probs=[-2.0, -4.0, -8.0, -16.0], cum_log_prob=-32.0))
    item.deliver()
    item.add(result(b"w", FinishReason.CANCELLED))
    item.deliver()
    assert [response["text_output"] for response in sender.responses] == ["x", ""]
    last = sender.responses[-1]
    assert last["output_ids"] == [[0x2E, 0x2E]]
    assert last["output_log_probs"] == [[-2.0, -4.0]] and last["cum_log_probs"] == [-8.0]
    assert last["num_output_tokens"] == [2] and last["finish_reason"] == "stop"
    assert sender.num_finals == 1 and not sender.misuse and item.num_output_tokens == 4


def part(index: int, text: bytes, finish: FinishReason = FinishReason.NOT_FINISHED, *, final: bool = False) -> Result:
    """New tokens of one sequence of several."""
    ends = finish is not FinishReason.NOT_FINISHED
    return Result(
        output_token_ids=list(text),
        finish_reason=finish,
        is_final=final,
        sequence_index=index,
        is_sequence_final=ends,
    )


def by_sequence(sender: pb.ResponseSender, name: str) -> list[tuple[int, str]]:
    return [(response["sequence_index"][0], response[name]) for response in sender.responses]


def test_each_response_of_a_stream_holds_one_sequence() -> None:
    item, sender = make(ClientRequest(text="AB", stream=True, num_return_sequences=3))
    for index, text in ((0, b"a"), (1, b"x"), (0, b"b")):
        item.add(part(index, text))
    item.deliver()
    item.add(part(1, b"y", FinishReason.END_ID))
    item.deliver()
    item.add(part(2, "é".encode(), FinishReason.LENGTH))
    item.deliver()
    assert not item.is_finished and not sender.num_finals
    item.add(part(0, b"c", FinishReason.LENGTH, final=True))
    item.deliver()
    item.deliver()
    assert by_sequence(sender, "text_output") == [(0, "ab"), (1, "x"), (1, "y"), (2, "é"), (0, "c")]
    assert by_sequence(sender, "finish_reason") == [(0, ""), (1, ""), (1, "stop"), (2, "length"), (0, "length")]
    assert sender.num_finals == 1 and not sender.misuse
    assert (item.num_output_tokens, item.longest_output) == (7, 3)


def test_without_streaming_each_sequence_is_answered_when_it_ends() -> None:
    item, sender = make(ClientRequest(text="AB", num_return_sequences=3), echo=Prompt(text="AB", token_ids=(65, 66)))
    item.add(part(0, b"ab"))
    item.deliver()
    assert not sender.responses
    item.add(part(1, b"xy", FinishReason.END_ID))
    item.deliver()
    assert by_sequence(sender, "text_output") == [(1, "ABxy")] and not sender.num_finals
    item.add(part(0, b"c", FinishReason.LENGTH))
    item.add(part(2, b"z", FinishReason.LENGTH, final=True))
    item.deliver()
    assert by_sequence(sender, "text_output") == [(1, "ABxy"), (0, "ABabc"), (2, "ABz")]
    assert sender.responses[1]["output_ids"] == [[65, 66, 97, 98, 99]]
    assert sender.num_finals == 1 and not sender.misuse


def test_each_sequence_has_its_own_stop_string_and_its_own_broken_characters() -> None:
    item, sender = make(ClientRequest(text="AB", stream=True, stop_words=["--"], num_return_sequences=2))
    for byte in b"a-", b"\xc3":
        item.add(part(0, byte))
        item.add(part(1, byte))
    item.add(part(0, b"-b"))
    item.deliver()
    assert not item.is_answered, "the other one goes on"
    item.add(part(0, b"more"))
    item.add(part(1, b"\xa9"))
    item.deliver()
    item.add(part(1, b"--"))
    item.deliver()
    texts = {index: "".join(text for i, text in by_sequence(sender, "text_output") if i == index) for index in (0, 1)}
    assert texts == {0: "a-\N{REPLACEMENT CHARACTER}-bmore", 1: "a-é"}
    item.add(part(0, b"", FinishReason.LENGTH, final=True))
    item.deliver()
    assert sender.num_finals == 1 and not sender.misuse
    assert by_sequence(sender, "finish_reason")[-2:] == [(1, "stop"), (0, "length")]


def test_each_sequences_first_and_last_response_cannot_wait() -> None:
    item, _ = make(ClientRequest(text="AB", stream=True, num_return_sequences=2))
    waits = []
    for result in (part(0, b"a"), part(0, b"b"), part(1, b"x"), part(1, b"y"), part(1, b"z", FinishReason.END_ID)):
        item.add(result)
        waits.append((item.num_responses_ready, item.can_wait))
        item.deliver()
    assert waits == [(1, False), (1, True), (1, False), (1, True), (1, False)]
    item.add(part(0, b"c"))
    assert item.can_wait
    item.add(part(0, b"", FinishReason.LENGTH, final=True))
    assert not item.can_wait and item.num_responses_ready == 1
    item.deliver()
    assert item.num_responses_ready == 0


def test_a_request_that_was_stopped_counts_as_cancelled_although_a_sequence_had_ended() -> None:
    item, sender = make(ClientRequest(text="AB", num_return_sequences=2))
    item.add(part(0, b"ab", FinishReason.END_ID))
    item.deliver()
    item.add(part(1, b"x", FinishReason.CANCELLED, final=True))
    item.deliver()
    assert item.finish_reason == "cancelled" and sender.num_finals == 1
    assert by_sequence(sender, "finish_reason") == [(0, "stop"), (1, "cancelled")]


def test_an_error_after_a_sequence_was_answered_is_the_only_final_response() -> None:
    item, sender = make(ClientRequest(text="AB", num_return_sequences=2))
    item.add(part(0, b"ab", FinishReason.END_ID))
    item.deliver()
    item.fail("INTERNAL", "the step failed")
    item.deliver()
    assert sender.num_finals == 1 and not sender.misuse
    assert len(sender.responses) == 2 and sender.error.message().startswith("the step failed")


def test_a_client_that_left_gets_nothing_more_of_any_sequence() -> None:
    item, sender = make(ClientRequest(text="AB", stream=True, num_return_sequences=2))
    item.add(part(0, b"a"))
    item.deliver()
    sender.client_left = True
    item.poll_cancelled()
    item.add(part(1, b"x"))
    item.deliver()
    for index in (0, 1):
        item.add(part(index, b"", FinishReason.CANCELLED, final=index == 1))
    item.deliver()
    assert len(sender.responses) == 2 and sender.num_finals == 1
    assert sender.error.code() == pb.TritonError.CANCELLED


def test_tensors_go_with_their_tokens() -> None:
    """Those of the prompt once; of the output as many as there are tokens, up to a stop string's last."""
    client = ClientRequest(text="AB", stream=True, stop_words=["..."], num_log_probs=2, return_context_logits=True)
    item, sender = make(client)

    def top(text: bytes) -> list[NamedTensor]:
        pairs = np.array([[byte, byte + 1] for byte in text], dtype=np.int32)
        return [NamedTensor.of("top_token_ids", pairs), NamedTensor.of("top_log_probs", -pairs.astype(np.float32))]

    of_prompt = NamedTensor.of("context_logits", np.eye(2, dtype=np.float32))
    item.add(result(b"x", tensors=[of_prompt, *top(b"x")]))
    item.add(result(b"y", tensors=top(b"y")))
    item.deliver()
    item.add(result(b"...zz", tensors=top(b"...zz")))
    item.deliver()
    first, last = sender.responses
    assert first["context_logits"] == [[1, 0], [0, 1]] and "context_logits" not in last
    assert first["top_token_ids"] == [[[0x78, 0x79], [0x79, 0x7A]]]
    assert first["top_log_probs"] == [[[-0x78, -0x79], [-0x79, -0x7A]]]
    assert last["top_token_ids"] == [[[0x2E, 0x2F]] * 3]


def test_outputs_of_the_network_lie_side_by_side_in_the_order_asked_for() -> None:
    client = ClientRequest(text="AB", additional_outputs=["hidden_states.1", "hidden_states"], gather_context=True)
    item, sender = make(client)
    last, layer = np.full((1, 2), 7, np.float32), np.full((1, 2), 1, np.float32)
    tensors = [NamedTensor.of("hidden_states", last), NamedTensor.of("hidden_states.1", layer)]
    of_prompt = [NamedTensor.of(f"context_{tensor.name}", tensor.array()) for tensor in tensors]
    item.add(result(b"x", FinishReason.LENGTH, tensors=[*of_prompt, *tensors]))
    item.deliver()
    (response,) = sender.responses
    assert response["hidden_states"] == [[[1, 1, 7, 7]]]
    assert response["context_hidden_states"] == [[1, 1, 7, 7]]


def test_a_stop_request_answers_with_what_there_is() -> None:
    item, sender = make(ClientRequest(text="AB"))
    item.add(result(b"abc", FinishReason.CANCELLED))
    item.deliver()
    assert sender.text == "abc" and sender.responses[-1]["finish_reason"] == "cancelled"


def test_only_the_outputs_asked_for_are_sent() -> None:
    item, sender = make(ClientRequest(text="AB"), requested=frozenset({"finish_reason"}))
    item.add(result(b"abc", FinishReason.LENGTH))
    item.deliver()
    assert sender.responses[0].names() == ["finish_reason"]


def test_a_client_that_left_gets_one_cancelled_response() -> None:
    item, sender = make(ClientRequest(text="AB", stream=True))
    sender.client_left = True
    assert item.poll_cancelled() and not item.poll_cancelled()
    item.add(result(b"a"))
    item.deliver()
    assert not sender.responses
    item.add(result(b"", FinishReason.CANCELLED))
    item.deliver()
    item.fail("INTERNAL", "too late")
    assert sender.num_finals == 1 and sender.error.code() == pb.TritonError.CANCELLED


def test_nobody_asks_after_the_final_response() -> None:
    item, sender = make(ClientRequest(text="AB"))
    item.fail("UNAVAILABLE", "gone")
    sender.client_left = True
    assert not item.poll_cancelled() and not sender.misuse
    assert sender.error.code() == pb.TritonError.UNAVAILABLE


def test_a_chunk_that_could_not_be_sent_is_not_passed_over() -> None:
    """Its text would be missing between two others."""
    item, sender = make(ClientRequest(text="AB", stream=True))
    sender.raises = RuntimeError("no shared memory left")
    item.add(result(b"a"))
    with pytest.raises(RuntimeError):
        item.deliver()
    assert not item.is_answered and not sender.num_finals


def test_a_final_send_that_raises_counts_as_an_answer() -> None:
    item, sender = make(ClientRequest(text="AB"))
    sender.raises = RuntimeError("the client is gone")
    item.add(result(b"a", FinishReason.LENGTH))
    item.deliver()
    item.deliver()
    assert item.is_answered and sender.num_finals == 1 and not sender.misuse


def test_an_error_code_that_the_server_lacks_is_still_an_error() -> None:
    sender = pb.ResponseSender()
    Reply(pb, sender).fail("NO_SUCH_CODE", "sentence")
    assert sender.error.message() == "sentence [NO_SUCH_CODE]" and sender.num_finals == 1


def test_gathered_sequences_are_answered_together() -> None:
    item, sender = make(ClientRequest(text="AB", num_return_sequences=2), gathers=True)
    item.add(result(b"long", FinishReason.LENGTH, sequence_index=1))
    assert not item.has_news and item.num_responses_ready == 0
    item.add(result(b"x", FinishReason.END_ID))
    item.deliver()
    (response,) = sender.responses
    assert response.tensors[0].as_numpy().tolist() == [b"x", b"long"]
    assert response["output_ids"] == [[120, -1, -1, -1], [108, 111, 110, 103]]
    assert response["sequence_length"] == [1, 4]
    assert sender.num_finals == 1 and item.is_completed


def test_a_gathered_stream_says_of_each_sequence_what_is_new() -> None:
    item, sender = make(ClientRequest(text="AB", num_return_sequences=2, stream=True), gathers=True)
    item.add(result(b"a"))
    item.deliver()
    item.add(result(b"b", FinishReason.LENGTH))
    assert not item.can_wait, "the end of a sequence"
    item.deliver()
    item.add(result(b"c", sequence_index=1))
    assert item.can_wait
    item.deliver()
    item.add(result(b"d", FinishReason.LENGTH, sequence_index=1))
    item.deliver()
    texts = [response.tensors[0].as_numpy().tolist() for response in sender.responses]
    assert texts == [[b"a", b""], [b"b", b""], [b"", b"c"], [b"", b"d"]]
    assert sender.num_finals == 1
