"""`embedding` and `rerank`: rows of tensors as requests to the engine, and its rows of numbers as tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import fake_pb_utils as pb
import msgspec
import numpy as np
import pytest
import tokenizers
from fake_executor import FakeExecutor
from fake_tokenizer import byte_tokenizer_with
from played_backend import LONG
from waiting import until

from inflight.asking.prompt_encoder import PromptEncoder
from inflight.asking.served import Served
from inflight.asking.text_prompts import NO_PROMPTS, TextPrompts
from inflight.config import EngineConfig
from inflight.engine_description import EngineDescription
from inflight.errors import ConfigurationError, QueueFull
from inflight.output_config import SCORES
from inflight.request import Request
from inflight.result import FinishReason, NamedTensor, Response, Result
from inflight.server.pooled import ASKS, PooledModel
from inflight.server.pooled_server import PooledServer
from inflight.server.read_limits import read_limits
from inflight.server.start import start_server
from inflight.server.tensors.dialect import Dialect
from inflight.server.tensors.pooled import EMBEDDING, RERANK
from inflight.text.tokenizer import Tokenizer

SIZE = 4
ENCODER = {"pooled": "vectors", "hidden_size": SIZE, "model_outputs": ["hidden_states"]}
CROSS_ENCODER = {"pooled": "scores", "num_labels": 1, "hidden_size": SIZE, "model_outputs": ["hidden_states", SCORES]}
DECODER = {"hidden_size": SIZE, "model_outputs": ["hidden_states"]}
LENGTHS = {"max_seq_len": 16, "max_input_len": 15, "kv_cache_tokens": 64}


def counts(text: bytes) -> np.ndarray:
    """The vector of a text: how often it has each letter."""
    return np.array([text.count(letter) for letter in b"abcd"], np.float32)


def play(request: Request) -> Response:
    """The score of a pair is what its second text begins with, less what its first one does."""
    (asked,) = request.output_config.additional_model_outputs
    ids, start = bytes(request.input_token_ids), request.second_text_start
    if asked.name == SCORES:
        name, row = SCORES, np.array([ids[start] - ids[0]], np.float32)
    else:
        name, row = f"pooled_{asked.name}", counts(ids)
        assert asked.pooling == "mean"
    result = Result(
        output_token_ids=[65] * request.max_tokens,
        tensors=[NamedTensor.of(name, row[None])],
        finish_reason=FinishReason.LENGTH,
        is_final=True,
        is_sequence_final=True,
    )
    return Response(request_id=request.request_id, result=result)


def tokenizer() -> Tokenizer:
    """That says which of a pair's texts a token is of."""
    found = byte_tokenizer_with()
    found._backend.post_processor = tokenizers.processors.TemplateProcessing(single="$A", pair="$A:0 $B:1")
    return found


class Asked:
    """A started PooledServer over an engine that the test plays."""

    def __init__(self, dialect: Dialect, limits: dict[str, Any], prompts: TextPrompts = NO_PROMPTS) -> None:
        self.executor = FakeExecutor()
        changed = msgspec.structs.replace(self.executor.limits, **{**LENGTHS, **limits})
        self.executor._replica_ready(changed, EngineDescription(device="cpu"), max_in_flight=0)
        text = tokenizer()
        served = Served(text, self.executor.generation_defaults, PromptEncoder(text, 2**20))
        self.server = PooledServer(
            pb_utils=pb,
            executor=self.executor,
            dialect=dialect,
            model=PooledModel(served=served, vector_of="mean", score_of="sigmoid", prompts=prompts),
            read_limits=read_limits(EngineConfig(), changed, text),
            instance="embedding_0_0",
            is_unary=True,
            cancellation_check_seconds=0.05,
        )
        self.senders: list[pb.ResponseSender] = []
        self.server.start()
        assert self.server.is_ready()

    def send(self, inputs: dict[str, np.ndarray], **more: Any) -> pb.ResponseSender:
        request = pb.request(inputs, **more)
        self.senders.append(request.sender)
        self.server.accept(request)
        self.server._tokenizing.join()
        return request.sender

    def play(self, *, backwards: bool = False) -> list[Request]:
        """Answer what is in flight."""
        sent = list(self.executor.enqueued.values())
        for request in reversed(sent) if backwards else sent:
            self.executor.push(play(request))
        return sent

    def answer(self, inputs: dict[str, np.ndarray], **more: Any) -> dict[str, np.ndarray]:
        sender = self.send(inputs, **more)
        self.play(backwards=True)
        assert sender.finished.wait(LONG)
        assert sender.error is None, sender.error.message()
        return {tensor.name(): tensor.as_numpy() for tensor in sender.responses[-1].tensors}

    def error(self, inputs: dict[str, np.ndarray], **more: Any) -> str:
        """Of a request that the engine never sees."""
        sender = self.send(inputs, **more)
        assert sender.finished.wait(LONG) and not self.executor.enqueued
        return message(sender)


def message(sender: pb.ResponseSender) -> str:
    assert sender.finished.wait(LONG)
    error = sender.error
    assert error is not None
    return error.message()


@pytest.fixture
def start() -> Iterator[Callable[..., Asked]]:
    """Starts a server; at the end each of its requests must have had one final response and no misuse."""
    started: list[Asked] = []

    def start(dialect: Dialect, limits: dict[str, Any], prompts: TextPrompts = NO_PROMPTS) -> Asked:
        started.append(Asked(dialect, limits, prompts))
        return started[-1]

    yield start
    for asked in started:
        asked.server.close(drain_seconds=0.0)
        assert [sender.num_finals for sender in asked.senders] == [1] * len(asked.senders)
        assert not [sender.misuse for sender in asked.senders if sender.misuse]
        assert asked.server._open_requests._number == 0
        assert not asked.server._open


def texts(*rows: Sequence[str]) -> np.ndarray:
    return np.array([[text.encode() for text in row] for row in rows], object)


def unit(vector: np.ndarray) -> np.ndarray:
    return vector / np.linalg.norm(vector)


@pytest.mark.parametrize("limits", [ENCODER, DECODER], ids=["encoder", "decoder"])
def test_each_row_has_a_vector_of_length_1_and_its_number_of_tokens(start, limits: dict[str, Any]) -> None:
    asked = start(EMBEDDING, limits)
    found = asked.answer({"text": texts(["ab"], ["cca"])})
    np.testing.assert_allclose(found["embeddings"], [unit(counts(b"ab")), unit(counts(b"cca"))], rtol=1e-6)
    assert found["embeddings"].dtype == np.float32
    assert found["token_count"].dtype == np.int32 and found["token_count"].tolist() == [2, 3]


def test_an_encoder_is_asked_for_no_token(start) -> None:
    for limits, max_tokens in ((ENCODER, 0), (DECODER, 1)):
        asked = start(EMBEDDING, limits)
        asked.send(
            {"text": texts(["ab"])}, request_id="mine", parameters='{"request_priority": 0.75, "timeout": 5000000}'
        )
        (request,) = asked.executor.enqueued.values()
        assert (request.max_tokens, request.client_id, request.priority) == (max_tokens, "mine", 0.75)
        assert request.allotted_time_ms == 5000
        asked.play()


def test_dimensions_as_a_tensor_and_as_a_parameter(start) -> None:
    asked = start(EMBEDDING, ENCODER)
    expected = [unit(counts(b"abccc")[:2])]
    by_tensor = asked.answer({"text": texts(["abccc"]), "dimensions": np.array([[2]], np.int32)})
    by_parameter = asked.answer({"text": texts(["abccc"])}, parameters='{"dimensions": 2}')
    for found in (by_tensor, by_parameter):
        np.testing.assert_allclose(found["embeddings"], expected, rtol=1e-6)


PROMPTS = TextPrompts(by_name={"query": "dd ", "document": "c "}, default_name="document")


@pytest.mark.parametrize("limits", [ENCODER, DECODER], ids=["encoder", "decoder"])
def test_a_prompt_before_each_text_by_its_name_or_by_what_the_text_is(start, limits: dict[str, Any]) -> None:
    asked, plain = start(EMBEDDING, limits, PROMPTS), start(EMBEDDING, limits)
    inputs = {"text": texts(["ab"], ["ab"], ["cca"])}
    for chosen, parameters, befores in (
        ({}, "{}", ("c ", "c ", "c ")),
        ({}, '{"input_type": "query"}', ("dd ", "dd ", "dd ")),
        ({}, '{"prompt_name": "query"}', ("dd ", "dd ", "dd ")),
        ({"input_type": texts(["query"], ["passage"], [""])}, "{}", ("dd ", "c ", "c ")),
        ({"prompt_name": texts(["document"], ["query"], [""])}, "{}", ("c ", "dd ", "c ")),
    ):
        found = asked.answer({**inputs, **chosen}, parameters=parameters)
        both = [[before + text[0].decode()] for before, text in zip(befores, inputs["text"], strict=True)]
        expected = plain.answer({"text": texts(*both)})
        for name, tensor in expected.items():
            np.testing.assert_array_equal(found[name], tensor)
        assert found["token_count"].tolist() == [len(each) for (each,) in both]


def test_without_prompts_what_a_text_is_has_no_effect(start) -> None:
    inputs = {"text": texts(["ab"])}
    found = start(EMBEDDING, ENCODER).answer(inputs, parameters='{"input_type": "query"}')
    assert found["token_count"].tolist() == [2]


def test_a_prompt_is_kept_where_a_text_is_cut(start) -> None:
    asked = start(EMBEDDING, ENCODER, PROMPTS)
    inputs = {"text": texts(["ab" * 30])}
    assert "maximum context length" in asked.error({"text": texts(["ab" * 7])})
    asked.send(inputs, parameters='{"truncate": "END", "input_type": "query"}')
    (request,) = asked.play()
    assert bytes(request.input_token_ids) == b"dd ab" + b"ab" * 5
    sentence = start(EMBEDDING, DECODER, PROMPTS).error(inputs, parameters='{"truncate": "START"}')
    assert "truncate is not supported here: this model keeps the end of a text that is too long" in sentence


@pytest.mark.parametrize("limits", [ENCODER, DECODER], ids=["encoder", "decoder"])
def test_queries_and_passages_have_their_own_prompts_where_vectors_are_compared(start, limits: dict[str, Any]) -> None:
    asked = start(RERANK, limits, PROMPTS)
    found = asked.answer({"query": texts(["ab"]), "passage": texts(["ab", "c"])})
    question = unit(counts(b"dd ab"))
    expected = [[question @ unit(counts(b"c ab")), question @ unit(counts(b"c c"))]]
    np.testing.assert_allclose(found["scores"], expected, rtol=1e-6)
    assert found["token_count"].tolist() == [5 + 4 + 3]


def test_a_cross_encoder_reads_its_texts_without_prompts(start) -> None:
    asked = start(RERANK, CROSS_ENCODER, PROMPTS)
    asked.send({"query": texts(["ab"]), "passage": texts(["c"])})
    (request,) = asked.play()
    assert bytes(request.input_token_ids) == b"abc"


def test_named_outputs_alone_are_sent(start) -> None:
    found = start(EMBEDDING, ENCODER).answer({"text": texts(["ab"])}, outputs=("token_count",))
    assert found.keys() == {"token_count"}


def test_scores_of_a_network_in_the_order_of_the_passages(start) -> None:
    asked = start(RERANK, CROSS_ENCODER)
    found = asked.answer({"query": texts(["b"], ["c"]), "passage": texts(["bx", "c", "a"], ["c", "d", "aa"])})
    logits = np.array([[0, 1, -1], [0, 1, -2]], np.float32)
    np.testing.assert_array_equal(found["logit"], logits)
    np.testing.assert_allclose(found["scores"], 1 / (1 + np.exp(-logits)), rtol=1e-6)
    assert found["token_count"].tolist() == [3 + 4, 3 + 4]


@pytest.mark.parametrize("limits", [ENCODER, DECODER], ids=["encoder", "decoder"])
def test_without_a_head_the_cosine_of_two_vectors_is_the_score(start, limits: dict[str, Any]) -> None:
    asked = start(RERANK, limits)
    inputs = {"query": texts(["ab"]), "passage": texts(["c", "ab", "b", "ab"])}
    found = asked.answer(inputs)
    np.testing.assert_allclose(found["scores"], [[0, 1, math.sqrt(0.5), 1]], atol=1e-6)
    assert found["logit"].tobytes() == found["scores"].tobytes()
    assert found["token_count"].tolist() == [4], "of each text one vector is enough"


@pytest.mark.parametrize(
    ("limits", "long", "side", "other", "kept"),
    [
        (ENCODER, "d" + "ab" * 30 + "c", "END", "START", "d" + "ab" * 6 + "ac"),
        (ENCODER, "d" + "ab" * 300, "end", "start", "d" + "ab" * 7),
        (DECODER, "d" + "ab" * 30 + "c", "START", "END", "ab" * 7 + "c"),
    ],
    ids=["encoder", "unread", "decoder"],
)
def test_what_is_too_long_is_cut_where_the_network_may_be_cut(
    start, limits: dict[str, Any], long: str, side: str, other: str, kept: str
) -> None:
    asked = start(EMBEDDING, limits)
    assert "maximum context length" in asked.error({"text": texts([long])})
    asked.send({"text": texts([long]), "truncate": texts([side])})
    (request,) = asked.play()
    assert bytes(request.input_token_ids).decode() == kept
    sentence = f"truncate must be NONE or {side.upper()}: this model keeps the "
    assert sentence in asked.error({"text": texts(["ab"])}, parameters=f'{{"truncate": "{other}"}}')


@pytest.mark.parametrize(
    ("dialect", "inputs", "parameters", "words"),
    [
        (EMBEDDING, {"text": texts(["ab"], [""])}, "{}", "prompt 1: text is empty"),
        (EMBEDDING, {}, "{}", "text is required"),
        (EMBEDDING, {"text": texts(["ab"]), "dimensions": np.array([[5]], np.int32)}, "{}", "between 1 and 4"),
        (EMBEDDING, {"text": texts(["ab"])}, '{"dimensions": "2"}', "dimensions must be a whole number"),
        (EMBEDDING, {"text": texts(["ab"])}, '{"truncate": 1}', "truncate must be text"),
        (EMBEDDING, {"text": texts(["ab"])}, '{"input_type": 1}', "input_type must be text"),
        (EMBEDDING, {"text": texts(["ab"])}, '{"input_type": "image"}', "input_type must be one of query, search_"),
        (EMBEDDING, {"text": texts(["ab"]), "prompt_name": texts(["query"])}, "{}", "no such prompt: it has none"),
        (EMBEDDING, {"text": texts(["ab"])}, '{"embedding_type": "binary"}', "embedding_type must be float"),
        (EMBEDDING, {"text": texts(["ab"])}, '{"request_type": "context_only"}', "is about generated tokens"),
        (RERANK, {"query": texts([""]), "passage": texts(["a"])}, "{}", "query is empty"),
        (RERANK, {"query": texts(["a"]), "passage": np.empty((1, 0), object)}, "{}", "passage is empty"),
        (RERANK, {"query": texts(["a"]), "passage": texts(["b", ""])}, "{}", "passage 1 is empty"),
        (RERANK, {"query": texts(["a"])}, "{}", "passage is required"),
        (RERANK, {"query": texts(*[["a"]] * 2), "passage": texts(*[["b"] * 600] * 2)}, "{}", "1200 texts, more than"),
    ],
)
def test_what_cannot_be_served_is_said(
    start, dialect: Dialect, inputs: dict[str, np.ndarray], parameters: str, words: str
) -> None:
    assert words in start(dialect, CROSS_ENCODER).error(inputs, parameters=parameters)


def test_several_scores_of_a_pair_are_no_answer(start) -> None:
    asked = start(RERANK, {**CROSS_ENCODER, "num_labels": 3})
    assert "3 scores of a pair" in asked.error({"query": texts(["a"]), "passage": texts(["b"])})


def test_a_full_engine_refuses(start) -> None:
    asked = start(EMBEDDING, ENCODER)
    asked.executor.refusal = QueueFull()
    assert asked.error({"text": texts(["ab"])}).endswith("[UNAVAILABLE]")


def test_the_first_error_of_the_engine_is_the_answer_to_all_rows(start) -> None:
    asked = start(EMBEDDING, ENCODER)
    sender = asked.send({"text": texts(["a"], ["b"], ["c"])})
    first, second, third = asked.executor.enqueued.values()
    asked.executor.push(play(first))
    asked.executor.push(
        Response(request_id=second.request_id, error_msg="it was lost", error_code="INTERNAL", outcome="failed")
    )
    assert message(sender) == "prompt 1: it was lost [INTERNAL]"
    until(lambda: asked.executor.cancelled == [third.request_id])


def test_what_is_cut_before_its_numbers_are_there_fails_with_a_sentence(start) -> None:
    asked = start(EMBEDDING, ENCODER)
    sender = asked.send({"text": texts(["a"])})
    (request,) = asked.executor.enqueued.values()
    ended = Result(finish_reason=FinishReason.TIMED_OUT, is_final=True, is_sequence_final=True)
    asked.executor.push(Response(request_id=request.request_id, result=ended))
    assert "the engine's time for this request was over" in message(sender)


def test_what_nobody_waits_for_is_cancelled(start) -> None:
    asked = start(RERANK, ENCODER)
    sender = asked.send({"query": texts(["a"]), "passage": texts(["b"])})
    sent = list(asked.executor.enqueued)
    sender.client_left = True
    assert message(sender).endswith("[CANCELLED]")
    until(lambda: asked.executor.cancelled == sent)


def test_what_is_in_flight_at_the_end_is_answered(start) -> None:
    asked = start(EMBEDDING, ENCODER)
    sender = asked.send({"text": texts(["a"])})
    asked.server.close(drain_seconds=0.0)
    assert message(sender).endswith("[UNAVAILABLE]")
    assert not asked.server.is_ready()


@pytest.mark.parametrize("name", ASKS)
def test_without_an_engine_there_are_no_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr("inflight.server.start.start_logging", lambda: None)  # later tests of this process read its log
    args = {"model_config": '{"parameters": {}, "output": []}', "model_repository": str(tmp_path), "model_version": "1"}
    with pytest.raises(ConfigurationError, match=f"model {name} needs the parameter engine"):
        start_server(pb, args | {"model_name": name, "model_instance_name": f"{name}_0_0"})
