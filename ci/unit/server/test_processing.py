"""`preprocessing` and `postprocessing`: text to tokens and back, without an engine's work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fake_pb_utils as pb
import numpy as np
import pytest
from fake_executor import FakeExecutor
from fake_tokenizer import byte_tokenizer_with, sentencepiece_tokenizer
from played_backend import LONG

from inflight.config import EngineConfig
from inflight.errors import ConfigurationError
from inflight.server.processing import PROCESSES
from inflight.server.processing_server import ProcessingServer
from inflight.server.read_limits import read_limits
from inflight.server.start import start_server
from inflight.server.tensors.dialect import Dialect
from inflight.server.tensors.processing import POSTPROCESSING, PREPROCESSING
from inflight.text.tokenizer import Tokenizer

END = 256


@pytest.fixture
def ask(request: pytest.FixtureRequest, tokenizer: Tokenizer):
    """Sends a request of the dialect that the test's parameter names; the answer's outputs, or its error."""
    executor = FakeExecutor()
    dialect: Dialect = request.param
    server = ProcessingServer(
        pb_utils=pb,
        executor=executor,
        dialect=dialect,
        process=PROCESSES[dialect.name](tokenizer, executor.limits),
        read_limits=read_limits(EngineConfig(), executor.limits, tokenizer),
        instance="processing_0_0",
        is_unary=True,
    )
    server.start()
    assert server.is_ready()

    def ask(inputs: dict[str, np.ndarray], outputs: tuple[str, ...] = ()) -> dict[str, Any] | str:
        asked = pb.request(inputs, outputs=outputs)
        server.accept(asked)
        assert asked.sender.finished.wait(LONG) and asked.sender.num_finals == len(asked.sender.responses) == 1
        (response,) = asked.sender.responses
        if response.error() is not None:
            return response.error().message()
        return {tensor.name(): tensor.as_numpy() for tensor in response.tensors}

    yield ask
    server.close()
    assert not executor.enqueued, "nothing of it goes to the engine"


@pytest.fixture
def tokenizer() -> Tokenizer:
    """Its last token is none of the network's."""
    return byte_tokenizer_with(*(f"<{number}>" for number in range(43)), "<far>")


pre = pytest.mark.parametrize("ask", [PREPROCESSING], indirect=True, ids=["preprocessing"])
post = pytest.mark.parametrize("ask", [POSTPROCESSING], indirect=True, ids=["postprocessing"])


def texts(*rows: list[str]) -> np.ndarray:
    return np.array([[text.encode() for text in row] for row in rows], object)


def numbers(*values: int) -> np.ndarray:
    return np.array(values, np.int32).reshape(-1, 1)


@pre
def test_what_a_text_becomes(ask) -> None:
    found = ask({"QUERY": texts(["hi"]), "REQUEST_OUTPUT_LEN": numbers(8)})
    assert {name: array.tolist() for name, array in found.items()} == {
        "INPUT_ID": [[104, 105]],
        "REQUEST_INPUT_LEN": [[2]],
        "DECODER_INPUT_ID": [[END]],
        "REQUEST_DECODER_INPUT_LEN": [[1]],
        "BAD_WORDS_IDS": [[[], []]],
        "STOP_WORDS_IDS": [[[], []]],
        "EMBEDDING_BIAS": [[]],
        "REQUEST_OUTPUT_LEN": [[8]],
        "OUT_END_ID": [[END]],
        "OUT_PAD_ID": [[END]],
    }
    assert all(found[each.name].dtype == each.dtype.numpy_type for each in PREPROCESSING.outputs if each.name in found)


@pre
def test_prompts_of_several_lengths_are_padded(ask) -> None:
    found = ask(
        {
            "QUERY": texts(["abc"], ["d"]),
            "REQUEST_OUTPUT_LEN": numbers(8, 9),
            "STOP_WORDS_DICT": texts(["xy", "z"], ["w", ""]),
            "BAD_WORDS_DICT": texts([""], [""]),
            "END_ID": numbers(5, 6),
            "PAD_ID": numbers(7, 7),
            "PROMPT_TABLE_EXTRA_ID": np.array([[3], [4]], np.uint64),
        }
    )
    assert found["INPUT_ID"].tolist() == [[97, 98, 99], [100, END, END]]
    assert found["REQUEST_INPUT_LEN"].tolist() == [[3], [1]] and found["REQUEST_OUTPUT_LEN"].tolist() == [[8], [9]]
    assert found["STOP_WORDS_IDS"].tolist() == [[[120, 121, 122], [2, 3, -1]], [[119, 0, 0], [1, -1, -1]]]
    assert found["BAD_WORDS_IDS"].tolist() == [[[0], [-1]]] * 2
    assert found["OUT_END_ID"].tolist() == [[5], [6]] and found["OUT_PAD_ID"].tolist() == [[7], [7]]
    assert found["OUT_PROMPT_TABLE_EXTRA_IDS"].tolist() == [[0, 0, 0]] * 2


@pre
def test_a_biased_word_biases_its_tokens(ask) -> None:
    words = {"EMBEDDING_BIAS_WORDS": texts(["ab", "b"]), "EMBEDDING_BIAS_WEIGHTS": np.array([[2.0, 0.5]], np.float32)}
    bias = ask({"QUERY": texts(["hi"]), "REQUEST_OUTPUT_LEN": numbers(8), **words})["EMBEDDING_BIAS"]
    assert bias.shape == (1, FakeExecutor().limits.vocab_size)
    assert {int(token): float(bias[0, token]) for token in bias[0].nonzero()[0]} == {97: 2.0, 98: 2.5}


@pre
def test_named_outputs_alone_are_sent_and_those_of_images_never(ask) -> None:
    asked = {"QUERY": texts(["hi"]), "REQUEST_OUTPUT_LEN": numbers(8)}
    assert set(ask(asked, ("INPUT_ID", "PIXEL_VALUES", "OUT_PAD_ID"))) == {"INPUT_ID", "OUT_PAD_ID"}


@pre
@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"QUERY": texts([""])}, "the prompt is empty"),
        ({"DECODER_QUERY": texts(["x"])}, "DECODER_QUERY is not supported: this engine serves decoders only"),
        ({"IMAGE_URL": texts(["http://x"])}, "IMAGE_URL is not supported"),
        ({"EMBEDDING_BIAS_WORDS": texts(["a", "b"]), "EMBEDDING_BIAS_WEIGHTS": np.ones((1, 1), np.float32)}, "has 2"),
        ({"QUERY": texts(["a"], ["b"])}, "but the request has 2 prompts"),
        (
            {"EMBEDDING_BIAS_WORDS": texts(["<far>"]), "EMBEDDING_BIAS_WEIGHTS": np.ones((1, 1), np.float32)},
            "has token 300, which the network does not have",
        ),
    ],
    ids=lambda value: "" if isinstance(value, str) else "+".join(value),
)
def test_what_cannot_be_preprocessed_is_said(ask, more: dict[str, np.ndarray], words: str) -> None:
    assert words in ask({"QUERY": texts(["hi"]), "REQUEST_OUTPUT_LEN": numbers(8), **more})


def tokens(*rows: list[list[int]]) -> np.ndarray:
    return np.array(rows, np.int32)


@post
def test_tokens_become_text_up_to_their_lengths(ask) -> None:
    found = ask(
        {
            "TOKENS_BATCH": tokens([[104, 105, 7], [33, -1, -1]], [[97, END, 98], [99, 99, 99]]),
            "SEQUENCE_LENGTH": np.array([[2, 1], [9, -1]], np.int32),
        }
    )
    assert found["OUTPUT"].tolist() == [b"hi", b"!", b"ab", b""], "the beams of both prompts, one below the other"


@post
@pytest.mark.parametrize("tokenizer", [sentencepiece_tokenizer()], ids=["sentencepiece"])
def test_a_broken_character_has_a_replacement(ask, tokenizer: Tokenizer) -> None:
    ids = [*tokenizer.encode_plain("the é"), tokenizer.encode_plain("\N{OGHAM SPACE MARK}")[-1]]
    found = ask({"TOKENS_BATCH": tokens([ids]), "SEQUENCE_LENGTH": np.array([[len(ids)]], np.int32)})
    assert found["OUTPUT"][0].decode() == "the é\N{REPLACEMENT CHARACTER}"


@post
@pytest.mark.parametrize(
    ("batch", "lengths", "words"),
    [
        (tokens([[1, 2]]), [[1, 1]], "which has 1; got 2"),
        (tokens([[1, -1]]), [[2]], "TOKENS_BATCH holds -1, which is no token id"),
        (np.zeros((1, 0, 4), np.int32), np.zeros((1, 0), np.int32), "which has 0; got 0"),
        (np.zeros((1, 1, 2**20 + 1), np.int32), [[1]], "has 1048577 tokens, more than 1048576"),
    ],
    ids=["lengths", "negative", "none", "many"],
)
def test_what_cannot_be_postprocessed_is_said(ask, batch: np.ndarray, lengths: Any, words: str) -> None:
    assert words in ask({"TOKENS_BATCH": batch, "SEQUENCE_LENGTH": np.array(lengths, np.int32)})


@pytest.mark.parametrize("name", PROCESSES)
def test_without_an_engine_there_is_no_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr("inflight.server.start.start_logging", lambda: None)  # later tests of this process read its log
    args = {"model_config": '{"parameters": {}, "output": []}', "model_repository": str(tmp_path), "model_version": "1"}
    with pytest.raises(ConfigurationError, match=f"model {name} needs the parameter engine"):
        start_server(pb, args | {"model_name": name, "model_instance_name": f"{name}_0_0"})
