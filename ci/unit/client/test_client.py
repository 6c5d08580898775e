"""The clients against a model that is a function: what is sent, what comes back, what is cancelled, what is raised.

pytest ci/unit/client/test_client.py
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator

import numpy as np
import pytest

from inflight_client import (
    AsyncClient,
    AsyncMockTransport,
    Call,
    Cancelled,
    Client,
    ConnectionLost,
    InvalidRequest,
    MockTransport,
    NotReady,
    Reply,
    RequestRefused,
    text_reply,
)


def three_words(call: Call) -> Iterator[Reply]:
    yield text_reply("one", token_ids=(1,))
    yield text_reply(" two three", token_ids=(2, 3), finish_reason="stop")
    yield Reply(final=True)


def endless(call: Call) -> Iterator[Reply]:
    while True:
        yield text_reply("again ", token_ids=(0,))


def test_generate_joins_all_replies() -> None:
    completion = Client(transport=MockTransport(three_words)).generate("count")
    assert completion.text == "one two three"
    assert completion.token_ids == (1, 2, 3)
    assert completion.finish_reason == "stop"
    assert completion.num_output_tokens == 3


def test_async_generate_gives_the_same() -> None:
    client = AsyncClient(transport=AsyncMockTransport(three_words))
    assert asyncio.run(client.generate("count")) == Client(transport=MockTransport(three_words)).generate("count")


def two_sequences(call: Call) -> Iterator[Reply]:
    yield text_reply("a", token_ids=(1,), sequence_index=1)
    yield text_reply("one", token_ids=(2, 3), finish_reason="stop", sequence_index=0)
    yield text_reply("b", token_ids=(4,), finish_reason="length", sequence_index=1)
    yield Reply(final=True)


def test_each_sequence_is_joined_from_its_own_replies() -> None:
    transport = MockTransport(two_sequences)
    stream = Client(transport=transport).stream("x", num_return_sequences=2)
    assert [chunk.sequence_index for chunk in stream] == [1, 0, 1]
    completion = stream.completion
    assert transport.calls[0].inputs["num_return_sequences"].tolist() == [2]
    assert [(s.text, s.token_ids, s.finish_reason) for s in completion.sequences] == [
        ("one", (2, 3), "stop"),
        ("ab", (1, 4), "length"),
    ]
    assert (completion.text, completion.finish_reason, completion.num_output_tokens) == ("one", "stop", 4)
    remote = AsyncClient(transport=AsyncMockTransport(two_sequences))
    assert asyncio.run(remote.generate("x", num_return_sequences=2)) == completion


@pytest.mark.parametrize(("chunks", "cancelled"), [(1, True), (2, True), (3, False)])
def test_an_answer_of_several_sequences_is_cancelled_until_all_have_ended(chunks: int, cancelled: bool) -> None:
    transport = MockTransport(two_sequences)
    with Client(transport=transport).stream("x", num_return_sequences=2) as stream:
        for _ in range(chunks):
            next(stream)
    assert transport.streams[0].cancelled is cancelled


def test_an_answer_without_any_reply_has_one_empty_sequence() -> None:
    stream = Client(transport=MockTransport(endless)).stream("x", num_return_sequences=2**31 - 1)
    assert [sequence.text for sequence in stream.completion.sequences] == [""]


def test_biases_travel_as_ids_and_values() -> None:
    transport = MockTransport(three_words)
    Client(transport=transport).generate("x", logit_bias={5: 1, 7: -100.0})
    inputs = transport.calls[0].inputs
    assert "logit_bias" not in inputs
    ids, values = inputs["logit_bias_ids"], inputs["logit_bias_values"]
    assert (ids.dtype, ids.tolist()) == (np.int32, [5, 7])
    assert (values.dtype, values.tolist()) == (np.float32, [1.0, -100.0])


def test_final_flag_on_the_last_data_reply_ends_the_stream() -> None:
    transport = MockTransport(lambda call: [text_reply("all", finish_reason="length", final=True)])
    assert [chunk.finish_reason for chunk in Client(transport=transport).stream("x")] == ["length"]


def test_every_option_travels_with_its_type() -> None:
    transport = MockTransport(three_words)
    Client(transport=transport).generate(
        "prompt",
        max_tokens=7,
        temperature=0.5,
        top_k=3,
        seed=2**64 - 1,
        stop_words=["é", "end"],
        end_id=-1,
        return_log_probs=True,
    )
    inputs = transport.calls[0].inputs
    expected = {
        "text_input": np.array([b"prompt"], np.object_),
        "max_tokens": np.array([7], np.int32),
        "temperature": np.array([0.5], np.float32),
        "top_k": np.array([3], np.int32),
        "seed": np.array([2**64 - 1], np.uint64),
        "stop_words": np.array(["é".encode(), b"end"], np.object_),
        "end_id": np.array([-1], np.int32),
        "return_log_probs": np.array([True]),
        "stream": np.array([False]),
    }
    for name, array in expected.items():
        assert inputs[name].dtype == array.dtype, name
        np.testing.assert_array_equal(inputs[name], array)


def test_options_that_are_not_given_are_not_sent() -> None:
    transport = MockTransport(three_words)
    Client(transport=transport).generate("prompt", temperature=None)
    assert not {"temperature", "seed", "stop_words", "end_id"} & set(transport.calls[0].inputs)


def test_token_ids_travel_as_input_ids() -> None:
    transport = MockTransport(three_words)
    Client(transport=transport).generate([5, 6])
    inputs = transport.calls[0].inputs
    assert "text_input" not in inputs
    assert inputs["input_ids"].tolist() == [5, 6] and inputs["input_ids"].dtype == np.int32


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"seed": -1}, "seed"),
        ({"max_tokens": 2**31}, "max_tokens"),
        ({"top_k": 1.5}, "top_k"),
        ({"top_k": float("nan")}, "top_k"),
        ({"temperature": "hot"}, "temperature"),
        ({"stop_words": [1]}, "stop_words"),
        ({"stop_words": ["\ud800"]}, "stop_words"),
        ({"logit_bias": [5]}, "logit_bias must map token ids to numbers, got \\[5\\]"),
        ({"logit_bias": {5: "much"}}, "logit_bias must map token ids to numbers, got the bias 'much'"),
        ({"logit_bias": {"5": 1.0}}, "a token id of logit_bias must be a whole number, got '5'"),
        ({"num_return_sequences": 1.5}, "num_return_sequences must be a whole number"),
    ],
)
def test_values_that_no_tensor_holds_are_refused_before_sending(options: dict[str, object], word: str) -> None:
    transport = MockTransport(three_words)
    with pytest.raises(InvalidRequest, match=word):
        Client(transport=transport).generate("prompt", **options)  # type: ignore[arg-type]
    assert not transport.calls


def test_an_unknown_option_names_the_nearest() -> None:
    with pytest.raises(TypeError, match="did you mean max_tokens"):
        Client(transport=MockTransport(three_words)).generate("prompt", max_token=3)  # type: ignore[call-arg]


def test_requests_have_ids_of_their_own_unless_told() -> None:
    transport = MockTransport(three_words)
    client = Client(transport=transport)
    client.generate("a"), client.generate("b"), client.generate("c", request_id="mine")
    first, second, third = (call.request_id for call in transport.calls)
    assert first != second and int(first) > 0
    assert third == "mine"


def test_leaving_a_stream_early_cancels_it() -> None:
    transport = MockTransport(endless)
    with Client(transport=transport).stream("x") as stream:
        next(stream)
    assert transport.streams[0].cancelled
    assert list(stream) == []
    assert stream.completion.text == "again "


def test_a_stream_that_nobody_holds_is_cancelled() -> None:
    transport = MockTransport(endless)
    for _ in Client(transport=transport).stream("x"):
        break
    gc.collect()
    assert transport.streams[0].cancelled


def test_an_exhausted_stream_is_not_cancelled() -> None:
    transport = MockTransport(three_words)
    with Client(transport=transport).stream("x") as stream:
        assert len(list(stream)) == 2
    assert not transport.streams[0].cancelled


class ReadToTheEnd:
    """A model that notes that its last reply was read and the next one asked for."""

    def __init__(self, *replies: Reply) -> None:
        self.replies, self.is_read = replies, False

    def __call__(self, call: Call) -> Iterator[Reply]:
        yield from self.replies
        self.is_read = True


ENDINGS = [
    (text_reply("all", finish_reason="stop", final=True),),
    (text_reply("all", finish_reason="stop"), Reply(final=True)),
]


@pytest.mark.parametrize("replies", ENDINGS)
def test_leaving_a_stream_after_its_last_chunk_reads_to_its_end(replies: tuple[Reply, ...]) -> None:
    """To drop a gRPC stream is to cancel it, and a cancel that meets the final response is what servers die of."""
    model = ReadToTheEnd(*replies)
    transport = MockTransport(model)
    with Client(transport=transport).stream("x") as stream:
        assert next(stream).finish_reason == "stop"
    assert model.is_read and not transport.streams[0].cancelled


@pytest.mark.parametrize("replies", ENDINGS)
def test_leaving_an_async_stream_after_its_last_chunk_reads_to_its_end(replies: tuple[Reply, ...]) -> None:
    model = ReadToTheEnd(*replies)
    transport = AsyncMockTransport(model)

    async def leave() -> None:
        async with AsyncClient(transport=transport).stream("x") as stream:
            async for _ in stream:
                break

    asyncio.run(leave())
    assert model.is_read and not transport.streams[0].cancelled


def test_leaving_an_async_stream_early_cancels_it() -> None:
    transport = AsyncMockTransport(endless)

    async def leave_early() -> None:
        async with AsyncClient(transport=transport).stream("x") as stream:
            async for _ in stream:
                break

    asyncio.run(leave_early())
    assert transport.streams[0].cancelled


def test_an_error_in_the_callers_loop_cancels_the_stream() -> None:
    transport = MockTransport(endless)
    with pytest.raises(KeyError), Client(transport=transport).stream("x"):
        raise KeyError
    assert transport.streams[0].cancelled


def test_cancelling_from_outside_reaches_the_reader() -> None:
    transport = MockTransport(endless)
    stream = Client(transport=transport).stream("x")
    next(stream)
    transport.streams[0].cancel()
    with pytest.raises(Cancelled):
        next(stream)


def test_an_answer_without_its_last_part_is_an_error() -> None:
    client = Client(transport=MockTransport(lambda call: [text_reply("half")]))
    with pytest.raises(ConnectionLost, match="before the answer was complete"):
        client.generate("x")


def test_errors_of_the_server_reach_the_caller_after_the_chunks_before() -> None:
    def refuse_after_one(call: Call) -> Iterator[Reply]:
        yield text_reply("one")
        raise RequestRefused("Exceeds maximum queue size", code="UNAVAILABLE", request_id=call.request_id)

    stream = Client(transport=MockTransport(refuse_after_one)).stream("x", request_id="7")
    assert next(stream).text == "one"
    with pytest.raises(RequestRefused) as caught:
        next(stream)
    assert caught.value.request_id == "7"


def test_the_requests_deadline_wins_over_the_clients() -> None:
    transport = MockTransport(three_words)
    client = Client(transport=transport, timeout=30)
    client.generate("x"), client.generate("x", timeout=2)
    assert [call.timeout for call in transport.calls] == [30, 2]


def test_stop_sends_the_id_and_the_flag() -> None:
    transport = MockTransport(lambda call: [Reply(final=True)])
    Client(transport=transport).stop("42")
    call = transport.calls[0]
    assert call.request_id == "42"
    assert call.inputs["stop"].tolist() == [True]


def test_chunks_of_beams_replace_each_other() -> None:
    def texts(call: Call) -> list[Reply]:
        sent = [text_reply(text) for text in ("a", "b c")]
        return [*sent, text_reply("b d", finish_reason="length", final=True)]

    with Client(transport=MockTransport(texts)).stream("x", beam_width=2) as stream:
        assert [chunk.text for chunk in stream] == ["a", "b c", "b d"]
    assert stream.completion.text == "b d"


def test_orders_of_adapters_are_requests_without_a_prompt() -> None:
    transport = MockTransport(lambda call: [Reply(final=True)])
    client = Client(transport=transport)
    client.load_lora("pirate")
    client.unload_lora("pirate")
    sent = [{name: value.tolist() for name, value in call.inputs.items()} for call in transport.calls]
    assert sent == [{"lora_order": [order], "lora_name": [b"pirate"]} for order in (b"load", b"unload")]


def test_waiting_for_a_model_that_never_comes() -> None:
    transport = MockTransport(three_words, ready=False)
    with pytest.raises(NotReady, match=r"llm at .* was not ready within 0 s"):
        Client(transport=transport).wait_until_ready(0)
    transport.ready = True
    Client(transport=transport).wait_until_ready(0)


def test_closing_the_client_closes_its_transport() -> None:
    transport = MockTransport(three_words)
    with Client(transport=transport):
        pass
    assert transport.closed
