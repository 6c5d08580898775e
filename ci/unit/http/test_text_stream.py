"""The short way to a chunk makes the bytes of the long one."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from fake_tokenizer import byte_tokenizer, sentencepiece_tokenizer
from hypothesis import given
from hypothesis import strategies as st
from openai_server import result

from inflight.asking.ask import Ask
from inflight.asking.chat import Chat
from inflight.asking.chat_format import ChatFormat
from inflight.asking.prepared import Prepared, PreparedPrompt
from inflight.asking.show import Show
from inflight.http.call import Call
from inflight.http.choice import Choice
from inflight.http.dialects.openai.responses.fields import ResponseBody
from inflight.http.dialects.openai.responses.rendering import ResponseCall, StreamedResponse
from inflight.http.dialects.openai.responses.response_object import ResponseObject
from inflight.http.dialects.openai.stream import StreamedAnswer
from inflight.http.generation import Generation
from inflight.http.log_probs import LogProbWriter
from inflight.http.rendering import Streamed
from inflight.request import Request
from inflight.result import FinishReason, Response
from inflight.text.detokenizer import Detokenizer
from inflight.text.stop_strings import StopStrings
from inflight.text.text_decoder import make_text_decoder
from inflight.text.token_texts import TokenTexts
from inflight.text.tokenizer import Tokenizer

REQUEST = Request(request_id=1, input_token_ids=[5], max_tokens=100)


class Stream:
    """One stream without a server: what is heard becomes bytes."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        is_chat: bool = False,
        stop: str = "",
        format: ChatFormat | None = None,
        ask: Ask | None = None,
        make_answer: Callable[[Call, Generation], Streamed] = StreamedAnswer,
        begun_with: Sequence[int] = (),
        **options: Any,
    ) -> None:
        """`begun_with`: tokens that come before there is a short way."""

        def make_detokenizer() -> Detokenizer:
            return Detokenizer(make_text_decoder(tokenizer, [5]), StopStrings([stop]) if stop else None)

        prompt = PreparedPrompt(request=REQUEST, make_detokenizer=make_detokenizer)
        call = Call(
            ask=ask or Ask(prompt=Chat(messages=[]) if is_chat else [[5]]),
            prepared=Prepared(prompts=[prompt], format=format),
            model="m",
            **{"id_prefix": "cmpl-", "client_id": "id", "created": 1, **options},
        )
        self.generation = Generation(call, [1], None)  # type: ignore[arg-type]
        self.answer = make_answer(call, self.generation)
        self.begun = self.long_way([result(REQUEST, [*begun_with])]) if begun_with else b""
        self.failures: list[Exception] = []
        self.short = self.answer.text_stream(self.long_way, self._fail)

    def long_way(self, responses: list[Response]) -> bytes:
        return self.answer.add(self.generation.add(responses))

    def _fail(self, error: Exception) -> bytes:
        self.failures.append(error)
        return b"failed"


@pytest.mark.parametrize("tokenizer", [byte_tokenizer(), sentencepiece_tokenizer()], ids=["bytes", "sentencepiece"])
@pytest.mark.parametrize("is_chat", [True, False])
@given(st.lists(st.lists(st.lists(st.integers(0, 255), max_size=3), min_size=1, max_size=2), max_size=12))
def test_it_makes_the_same_bytes(tokenizer: Tokenizer, is_chat: bool, steps: list[list[list[int]]]) -> None:
    """Also of halves of characters, of invalid ones, and where several responses come at once."""
    one, other = Stream(tokenizer, is_chat=is_chat), Stream(tokenizer, is_chat=is_chat)
    assert one.short is not None
    batches = [[result(REQUEST, ids) for ids in groups] for groups in steps]
    batches.append([result(REQUEST, [72, 105], finish=FinishReason.LENGTH, is_final=True)])
    for batch in batches:
        assert one.short.hear(batch) == other.long_way(batch)
    assert one.generation.is_done and one.generation.num_tokens == other.generation.num_tokens


def response(call: Call, generation: Generation) -> Streamed:
    body = ResponseBody(model="m", input="a")
    return StreamedResponse(ResponseCall(call, ResponseObject(body, call), None, lambda _: None), generation)


def test_events_of_a_response_have_the_same_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secrets, "token_hex", lambda count: "5" * count)
    one, other = (Stream(byte_tokenizer(), make_answer=response, begun_with=[72]) for _ in range(2))
    assert one.short is not None and one.begun == other.begun != b""
    batches = [[result(REQUEST, ids)] for ids in ([105], [195], [164, 33], [], [34])]
    batches += [[result(REQUEST, [65]), result(REQUEST, [66])]]
    batches += [[result(REQUEST, [67], finish=FinishReason.LENGTH, is_final=True)]]
    heard = [one.short.hear(batch) for batch in batches]
    assert heard == [other.long_way(batch) for batch in batches]
    assert heard[2] and not heard[1] and b'"text":"Hi' in heard[-1]


def test_a_response_without_text_yet_goes_the_long_way() -> None:
    """Its next event opens an item."""
    assert Stream(byte_tokenizer(), make_answer=response, begun_with=[195]).short is None


MORE_THAN_TEXT: list[dict[str, Any]] = [
    {"ask": Ask(prompt=[[5]], choices=2)},
    {"stop": "x"},
    {"ask": Ask(prompt=[[5]], show=Show(token_ids=True))},
    {"log_probs": LogProbWriter(TokenTexts(byte_tokenizer()))},
    {"scores_only": True},
    {"is_chat": True, "format": ChatFormat()},
]


@pytest.mark.parametrize("options", MORE_THAN_TEXT, ids=lambda options: next(reversed(options)))
def test_chunks_with_more_than_text_go_the_long_way(options: dict[str, Any]) -> None:
    assert Stream(byte_tokenizer(), **options).short is None


def test_a_text_that_cannot_be_made_fails_its_own_stream_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Stream(byte_tokenizer())
    assert stream.short is not None

    def fail(self: Choice, token_ids: list[int]) -> str:
        raise ValueError

    monkeypatch.setattr(Choice, "extend", fail)
    assert stream.short.hear([result(REQUEST, [72])]) == b"failed"
    assert len(stream.failures) == 1
