"""What travels between front, leader and ranks."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from harness import make_request
from hypothesis import given
from hypothesis import strategies as st

from inflight.engine_description import EngineDescription
from inflight.executor.wire.messages import (
    NO_INPUT,
    BadMessage,
    Cancel,
    Fatal,
    Goodbye,
    Heartbeat,
    Hello,
    Occupied,
    RankInput,
    Responses,
    Shutdown,
    Started,
    Stats,
    Submit,
    Welcome,
    decode_frames,
    decode_from_front,
    decode_from_leader,
    decode_rank_input,
    encode,
    encode_frames,
    encode_rank_input,
)
from inflight.request_limits import RequestLimits
from inflight.result import FinishReason, NamedTensor, PerfMetrics, Response, Result

LIMITS = RequestLimits(vocab_size=97, max_seq_len=64, max_input_len=63, kv_cache_tokens=256)
REQUEST = make_request(2**64 - 1, 4, seed=2**64 - 1, min_tokens=2, stop_words=[[1, 2]], priority=0.9, cache_salt="s")
RESULT = Result(
    output_token_ids=[1, 2],
    log_probs=[-1.5, -2.0],
    finish_reason=FinishReason.STOP_WORDS,
    is_final=True,
    request_perf_metrics=PerfMetrics(arrival_time_ns=2**62),
)


@pytest.mark.parametrize(
    "message", [Hello(front_id=3, pid=7), Submit([REQUEST]), Cancel([1, 2**64 - 1]), Goodbye(), Shutdown()]
)
def test_what_a_front_says_arrives_as_it_was(message: Hello | Submit | Cancel | Goodbye | Shutdown) -> None:
    assert decode_from_front(encode(message)) == message


@pytest.mark.parametrize(
    "message",
    [
        Occupied(),
        Started([1, 2**64 - 1]),
        Welcome(limits=LIMITS, description=EngineDescription(device="cpu"), max_in_flight=9, pid=1),
        Responses(
            [Response(request_id=1, result=RESULT), Response(request_id=2, error_msg="e", error_code="INTERNAL")]
        ),
        Stats("{}", 3),
        Heartbeat(),
        Fatal("gone"),
    ],
)
def test_what_the_leader_says_arrives_as_it_was(message: Welcome | Responses | Stats | Heartbeat | Fatal) -> None:
    assert decode_from_leader(encode(message)) == message


LOGITS = np.arange(12, dtype=np.float32).reshape(3, 4)
IDS = np.array([[7, -1]], dtype=np.int32)
WITH_TENSORS = Responses(
    [
        Response(request_id=1, result=RESULT),
        Response(request_id=2, result=Result(tensors=[NamedTensor.of("a", LOGITS), NamedTensor.of("b", IDS)])),
        Response(request_id=3, error_msg="e", error_code="INTERNAL"),
        Response(request_id=4, result=Result(output_token_ids=[1], tensors=[NamedTensor.of("a", LOGITS[:0])])),
    ]
)


def test_numbers_travel_behind_the_message_in_frames_of_their_own() -> None:
    message, *numbers = encode_frames(WITH_TENSORS)
    assert numbers == [LOGITS.tobytes(), IDS.tobytes(), b""]
    assert LOGITS.tobytes() not in message
    arrived = decode_frames([message, *numbers])
    assert arrived == WITH_TENSORS
    assert isinstance(arrived, Responses) and arrived.responses[1].result is not None
    first, second = arrived.responses[1].result.tensors
    np.testing.assert_array_equal(first.array(), LOGITS)
    np.testing.assert_array_equal(second.array(), IDS)
    assert (first.array().dtype, second.array().dtype) == (np.float32, np.int32)


def test_messages_without_tensors_are_one_frame() -> None:
    for message in (Heartbeat(), Responses([Response(request_id=1, result=RESULT)])):
        assert encode_frames(message) == [encode(message)]
        assert decode_frames([encode(message)]) == message


def test_frames_that_do_not_fit_are_a_bad_message() -> None:
    message, *numbers = encode_frames(WITH_TENSORS)
    for wrong in (numbers[:2], [*numbers, b""], [numbers[0][:-1], *numbers[1:]], [numbers[0][:-4], *numbers[1:]]):
        with pytest.raises(BadMessage):
            decode_frames([message, *wrong])
    with pytest.raises(BadMessage):
        decode_frames([encode(Heartbeat()), b"1234"])
    odd = msgspec.msgpack.encode({"type": "Responses", "responses": [
        {"request_id": 1, "result": {"tensors": [{"name": "a", "dtype": "object", "shape": [1]}]}}
    ]})  # fmt: skip
    with pytest.raises(BadMessage):
        decode_frames([odd, bytes(8)])


def test_an_iteration_without_input_costs_no_bytes() -> None:
    assert encode_rank_input(RankInput()) == b""
    assert decode_rank_input(b"") is NO_INPUT
    rank_input = RankInput(requests=[REQUEST], stops={5: FinishReason.TIMED_OUT}, tick=True, shutdown=True)
    assert decode_rank_input(encode_rank_input(rank_input)) == rank_input


@given(st.binary(max_size=300))
def test_garbage_is_a_bad_message_and_nothing_else(frame: bytes) -> None:
    for decode in (decode_from_front, decode_from_leader):
        with pytest.raises(BadMessage):
            decode(frame)


@given(st.integers(0), st.integers(0, 255))
def test_a_damaged_message_is_read_with_right_types_or_not_at_all(place: int, byte: int) -> None:
    frame = bytearray(encode(Submit([REQUEST])))
    frame[place % len(frame)] = byte
    try:
        message = decode_from_front(bytes(frame))
    except BadMessage:
        return
    assert decode_from_front(encode(message)) == message


def test_a_deeply_nested_message_does_not_exhaust_the_stack() -> None:
    with pytest.raises(BadMessage):
        decode_from_front(b"\x91" * 1_000_000 + b"\x00")


def test_a_front_cannot_speak_as_the_leader() -> None:
    with pytest.raises(BadMessage):
        decode_from_front(encode(Fatal("stop")))


def test_bad_values_are_not_quoted() -> None:
    frame = msgspec.msgpack.encode({"type": "Submit", "requests": "the secret prompt"})
    with pytest.raises(BadMessage) as caught:
        decode_from_front(frame)
    assert "secret" not in str(caught.value)
