"""A request of several prompts: each is served as one of its own, and the reply is shared."""

from __future__ import annotations

from collections.abc import Sequence

import fake_pb_utils as pb
import fake_tokenizer
import numpy as np
import pytest
from fake_executor import FakeExecutor, tokens
from msgspec import structs
from played_backend import LONG

from inflight.config import EngineConfig
from inflight.engine_description import EngineDescription
from inflight.errors import InvalidRequest
from inflight.result import FinishReason
from inflight.server.backend_server import BackendServer
from inflight.server.tensors import tensor_values
from inflight.server.tensors.dialects import ENSEMBLE, TENSORRT_LLM
from inflight.server.tensors.tensor_values import gather, split

PROMPTS = (b"ab", b"cde", b"f")
NAMED = {"output_ids", "sequence_length", "batch_index"}


@pytest.fixture
def executor() -> FakeExecutor:
    executor = FakeExecutor()
    executor._replica_ready(
        structs.replace(executor.limits, max_batch_size=4), EngineDescription(device="cuda"), max_in_flight=0
    )
    return executor


@pytest.fixture(params=[False, True], ids=["decoupled", "unary"])
def server(executor: FakeExecutor, request: pytest.FixtureRequest) -> BackendServer:
    server = BackendServer(
        pb_utils=pb,
        executor=executor,
        tokenizer=fake_tokenizer.byte_tokenizer(),
        dialect=TENSORRT_LLM,
        config=EngineConfig(cancellation_check_period_ms=3_600_000),
        model_name="tensorrt_llm",
        model_version="1",
        instance="tensorrt_llm_0_0",
        is_unary=request.param,
    )
    server.start()
    return server


decoupled = pytest.mark.parametrize("server", [False], indirect=True)
unary = pytest.mark.parametrize("server", [True], indirect=True)


def column(values: Sequence[object], kind: type = np.int32) -> np.ndarray:
    return np.array(values, kind).reshape(-1, 1)


def inputs(prompts: Sequence[bytes] = PROMPTS, **more: np.ndarray) -> dict[str, np.ndarray]:
    """Rows of token ids, padded with 7."""
    longest = max(map(len, prompts))
    return {
        "input_ids": np.array([[*prompt, *[7] * (longest - len(prompt))] for prompt in prompts], np.int32),
        "input_lengths": column([len(prompt) for prompt in prompts]),
        "request_output_len": column(range(4, 4 + len(prompts))),
        "exclude_input_in_output": column([True] * len(prompts), np.bool_),
        **more,
    }


def by_prompt(sender: pb.ResponseSender) -> list[tuple[int, list[int]]]:
    return [(response["batch_index"][0][0], response["output_ids"][0][0]) for response in sender.responses]


@decoupled
def test_each_prompt_is_a_request_of_the_engine_with_its_own_row(ask, executor: FakeExecutor) -> None:
    sender = ask(inputs(runtime_top_k=column([1, 2, 3])))
    requests = list(executor.enqueued.values())
    assert [bytes(request.input_token_ids) for request in requests] == list(PROMPTS), "padding is cut off"
    assert [request.max_tokens for request in requests] == [4, 5, 6]
    assert [request.sampling_config.top_k for request in requests] == [1, 2, 3]
    executor.push(*[tokens(request.request_id, [65 + n], FinishReason.LENGTH) for n, request in enumerate(requests)])
    assert sender.finished.wait(LONG)
    assert by_prompt(sender) == [(0, [65]), (1, [66]), (2, [67])]
    assert all(set(response.names()) == NAMED for response in sender.responses)


@decoupled
def test_prompts_stream_side_by_side_until_the_last_has_ended(ask, executor: FakeExecutor) -> None:
    sender = ask(inputs(streaming=column([True] * 3, np.bool_)))
    first, second, third = executor.enqueued
    executor.push(tokens(second, [66]), tokens(first, [65], FinishReason.LENGTH))
    executor.push(tokens(third, [67], FinishReason.LENGTH))
    while len(sender.responses) < 3:
        assert not sender.finished.wait(0.01)
    executor.push(tokens(second, [68], FinishReason.LENGTH))
    assert sender.finished.wait(LONG)
    found = by_prompt(sender)
    assert sorted(found[:3]) == [(0, [65]), (1, [66]), (2, [67])] and found[3:] == [(1, [68])]


@unary
def test_one_response_has_a_padded_row_for_each_prompt(ask, executor: FakeExecutor) -> None:
    sender = ask(inputs())
    for number, request_id in enumerate(reversed(list(executor.enqueued))):
        executor.push(tokens(request_id, [*range(number + 1)], FinishReason.LENGTH))
    assert sender.finished.wait(LONG)
    (response,) = sender.responses
    assert response["output_ids"] == [[[0, 1, 2]], [[0, 1, -1]], [[0, -1, -1]]]
    assert response["sequence_length"] == [[3], [2], [1]] and response["batch_index"] == [[0], [1], [2]]


@decoupled
def test_an_error_ends_its_own_prompt(ask, executor: FakeExecutor) -> None:
    sender = ask(inputs(runtime_top_p=column([0.5, 7.0, 0.5], np.float32)))
    first, third = executor.enqueued
    (refused,) = sender.responses
    assert refused.error().message().startswith("prompt 1: top_p must be") and not sender.num_finals
    executor.push(tokens(third, [67], FinishReason.LENGTH), tokens(first, [65], FinishReason.LENGTH))
    assert sender.finished.wait(LONG)
    assert sorted((r["batch_index"][0][0], r["output_ids"][0][0]) for r in sender.responses[1:]) == [
        (0, [65]),
        (2, [67]),
    ]


@decoupled
def test_when_every_prompt_is_wrong_the_last_error_is_final(ask, executor: FakeExecutor) -> None:
    sender = ask(inputs(input_lengths=column([9, 9, 9])))
    messages = [response.error().message() for response in sender.responses]
    assert [message[:9] for message in messages] == ["prompt 0:", "prompt 1:", "prompt 2:"]
    assert all("input_lengths is 9" in message for message in messages) and not executor.enqueued


@unary
def test_the_one_response_is_the_first_error_and_the_others_are_cancelled(
    ask, server: BackendServer, executor: FakeExecutor
) -> None:
    sender = ask(inputs(request_output_len=column([4, 0, 4])))
    assert sender.error.message().startswith("prompt 1: max_tokens must be") and sender.finished.is_set()
    server._watch.look()
    assert sorted(executor.cancelled) == sorted(executor.enqueued)
    executor.push(*[tokens(each, [65], FinishReason.LENGTH) for each in list(executor.enqueued)])


@pytest.mark.parametrize("server", [False, True], indirect=True)
def test_a_stop_reaches_every_prompt(ask, executor: FakeExecutor) -> None:
    sender = ask(inputs(), request_id="17")
    ids = list(executor.enqueued)
    again = ask(inputs(), request_id="17")
    assert again.error.code() == pb.TritonError.ALREADY_EXISTS
    ask({"stop": True}, request_id="17")
    assert executor.cancelled == ids
    executor.push(*[tokens(each, [65], FinishReason.CANCELLED) for each in ids])
    assert sender.finished.wait(LONG) and sender.error is None
    ask(inputs(input_lengths=column([0] * 3)), request_id="17")


@decoupled
def test_the_id_is_taken_until_the_last_prompt_has_ended(ask, executor: FakeExecutor) -> None:
    sender = ask(inputs(), request_id="17")
    *others, last = executor.enqueued
    executor.push(*[tokens(each, [65], FinishReason.LENGTH) for each in others])
    while len(sender.responses) < 2:
        assert not sender.finished.wait(0.01)
    assert ask(inputs(), request_id="17").error.code() == pb.TritonError.ALREADY_EXISTS
    executor.push(tokens(last, [65], FinishReason.LENGTH))
    assert sender.finished.wait(LONG)


@pytest.mark.parametrize("server", [False, True], indirect=True)
def test_who_leaves_takes_every_prompt_along(ask, server: BackendServer, executor: FakeExecutor) -> None:
    sender = ask(inputs())
    sender.client_left = True
    server._watch.look()
    assert executor.cancelled == list(executor.enqueued)
    executor.push(*[tokens(each, [65], FinishReason.CANCELLED) for each in list(executor.enqueued)])
    assert sender.finished.wait(LONG) and sender.error.code() == pb.TritonError.CANCELLED


@decoupled
def test_only_the_first_open_prompt_asks_whether_the_client_has_left(
    ask, server: BackendServer, executor: FakeExecutor
) -> None:
    sender = ask(inputs())
    asked = []
    sender.is_cancelled = lambda: bool(asked.append(1))
    server._watch.look()
    executor.push(tokens(next(iter(executor.enqueued)), [65], FinishReason.LENGTH))
    while not sender.responses:
        assert not sender.finished.wait(0.01)
    server._watch.look()
    assert len(asked) == 2
    executor.push(*[tokens(each, [65], FinishReason.LENGTH) for each in list(executor.enqueued)])
    assert sender.finished.wait(LONG)


@decoupled
def test_a_stop_among_prompts_is_refused(ask, executor: FakeExecutor) -> None:
    sender = ask(inputs(stop=column([True] * 3, np.bool_)))
    assert "stop stands in a request of its own" in sender.error.message() and not executor.enqueued


def test_rows_that_do_not_belong_together_are_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"input_lengths has shape \[1, 1\], but the request has 3 prompts"):
        split(inputs(input_lengths=column([1])))


def test_large_batches_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_values, "MAX_BATCH_BYTES", 20)
    texts = {"text_input": column([b"x" * 10, b"x" * 11], np.object_)}
    with pytest.raises(InvalidRequest, match="the 2 prompts of the request have 21 bytes, more than 20: send fewer"):
        split(texts)
    assert len(split({"text_input": column([b"x" * 10] * 2, np.object_)})) == 2


@pytest.mark.parametrize("dialect", [TENSORRT_LLM, ENSEMBLE], ids=lambda dialect: dialect.name)
def test_an_empty_batch_is_one_wrong_prompt(dialect) -> None:
    (only,) = split({name: np.zeros((0, 1), np.int32) for (name,) in dialect.required})
    assert len(only) == len(dialect.required)


def test_an_output_that_a_prompt_lacks_is_padded() -> None:
    logits = np.ones((1, 2, 4), np.float32)
    whole = gather([{"x": column([5])}, {"x": column([6]), "logits": logits}])
    assert whole["x"].tolist() == [[5], [6]]
    assert whole["logits"].tolist() == [[[-1.0] * 4] * 2, [[1.0] * 4] * 2]
    texts = gather([{"text": np.array([b"a", b"b"], object)}, {"text": np.array([b"c"], object)}])
    assert texts["text"].tolist() == [b"a", b"b", b"c"], "the beams of two prompts"
    named = gather([{"x": column([5])}, {"x": column([6]), "named": np.array([[b"a", b"b"]], object)}])
    assert named["named"].tolist() == [[b"", b""], [b"a", b"b"]]


@decoupled
def test_each_prompt_names_what_its_own_guide_leaves_out(ask, executor: FakeExecutor) -> None:
    guides = [b'{"type": "object"}', b'{"not": {"format": "ipv4"}, "uniqueItems": true}', b'{"type": "array"}']
    more = {
        "guided_decoding_guide_type": column([b"json_schema"] * 3, np.object_),
        "guided_decoding_guide": column(guides, np.object_),
        "guided_decoding_strict": column([False] * 3, np.bool_),
        "end_id": column([1] * 3),
    }
    sender = ask(inputs(**more))
    executor.push(*[tokens(request_id, [65], FinishReason.LENGTH) for request_id in executor.enqueued])
    assert sender.finished.wait(LONG)
    first, second, third = sender.responses
    (named,) = [each.as_numpy() for each in second.tensors if each.name() == "guided_decoding_not_enforced"]
    assert named.tolist() == [[b"#/not format", b"# uniqueItems"]]
    assert all("guided_decoding_not_enforced" not in response.names() for response in (first, third))
