"""`embedding` and `rerank` beside `llm`: vectors and scores of texts in plain tensors, held against transformers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from encoder_checkpoints import TinyEncoder, write_encoder
from server_process import ServerProcess
from tokenizers import models, pre_tokenizers, processors

TEXTS = ["a cab", "bead", "a face faded"]
QUERY = "bad cafe"
LETTERS = " abcdef"
PROMPTS = {"query": "fade ", "passage": "bed "}
"""What the checkpoint has to stand before texts; none is its default."""


def write_tokenizer(folder: Path) -> tokenizers.Tokenizer:
    """A token for each letter, between BERT's."""
    vocab = {token: number for number, token in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *LETTERS])}
    tokenizer = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.add_special_tokens(["[PAD]", "[UNK]", "[CLS]", "[SEP]"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", vocab["[CLS]"]), ("[SEP]", vocab["[SEP]"])],
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    return tokenizer


class Served:
    """A cross-encoder with its tokenizer behind a tritonserver, and transformers' network of it."""

    def __init__(self, server: ServerProcess, encoder: TinyEncoder, tokenizer: tokenizers.Tokenizer) -> None:
        self.server, self._encoder, self._tokenizer = server, encoder, tokenizer

    def infer(self, protocol: Any, model: str, inputs: dict[str, np.ndarray], **more: Any) -> Any:
        given = []
        for name, array in inputs.items():
            given.append(protocol.InferInput(name, array.shape, "BYTES" if array.dtype == object else "INT32"))
            given[-1].set_data_from_numpy(array)
        url = self.server.grpc_url if protocol is grpcclient else self.server.http_url.removeprefix("http://")
        with protocol.InferenceServerClient(url) as client:
            return client.infer(model, given, **more)

    def vector(self, text: str, dimensions: int | None = None) -> np.ndarray:
        mean = self._encoder.states(self._tokenizer.encode(text).ids).mean(axis=0)[:dimensions]
        return mean / np.linalg.norm(mean)

    def logit(self, query: str, passage: str) -> float:
        pair = self._tokenizer.encode(query, passage)
        return float(self._encoder.scores(pair.ids, pair.type_ids.index(1))[0])

    def num_tokens(self, *texts: str) -> int:
        return len(self._tokenizer.encode(*texts).ids)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("encoder")
    encoder = write_encoder(folder, "BertForSequenceClassification", num_labels=1)
    tokenizer = write_tokenizer(folder)
    (folder / "config_sentence_transformers.json").write_text(json.dumps({"prompts": PROMPTS}))
    with ServerProcess(checkpoint=folder, apis=["embedding"], parameters={"dtype": "float32"}) as server:
        yield Served(server, encoder, tokenizer)


def rows(texts: Sequence[str]) -> np.ndarray:
    """(texts, 1)"""
    return np.array([[text.encode()] for text in texts], object)


protocols = pytest.mark.parametrize("protocol", [grpcclient, httpclient], ids=["grpc", "http"])


@protocols
def test_vectors_of_a_batch_of_texts(served: Served, protocol: Any) -> None:
    answer = served.infer(protocol, "embedding", {"text": rows(TEXTS)})
    found = answer.as_numpy("embeddings")
    np.testing.assert_allclose(found, [served.vector(text) for text in TEXTS], rtol=1e-3, atol=1e-4)
    assert answer.as_numpy("token_count").tolist() == [served.num_tokens(text) for text in TEXTS]
    alone = served.infer(protocol, "embedding", {"text": rows(TEXTS[1:2])}).as_numpy("embeddings")
    assert alone.tobytes() == found[1:2].tobytes(), "bits depend on no neighbour"


def test_the_first_features_as_a_tensor_and_as_a_parameter(served: Served) -> None:
    inputs = {"text": rows(TEXTS)}
    expected = [served.vector(text, 8) for text in TEXTS]
    as_tensor = served.infer(grpcclient, "embedding", inputs | {"dimensions": np.full((3, 1), 8, np.int32)})
    as_parameter = served.infer(grpcclient, "embedding", inputs, parameters={"dimensions": 8, "truncate": "none"})
    for answer in (as_tensor, as_parameter):
        np.testing.assert_allclose(answer.as_numpy("embeddings"), expected, rtol=1e-3, atol=1e-4)


@protocols
def test_each_text_may_stand_behind_a_prompt_of_the_checkpoint(served: Served, protocol: Any) -> None:
    inputs = {"text": rows(TEXTS), "input_type": rows(["query", "passage", "search_query"])}
    answer = served.infer(protocol, "embedding", inputs)
    behind = [PROMPTS[name] + text for name, text in zip(["query", "passage", "query"], TEXTS, strict=True)]
    expected = [served.vector(text) for text in behind]
    np.testing.assert_allclose(answer.as_numpy("embeddings"), expected, rtol=1e-3, atol=1e-4)
    assert answer.as_numpy("token_count").tolist() == [served.num_tokens(text) for text in behind]
    plain = served.infer(protocol, "embedding", {"text": rows(behind)})
    assert answer.as_numpy("embeddings").tobytes() == plain.as_numpy("embeddings").tobytes()
    by_name = served.infer(protocol, "embedding", {"text": rows(TEXTS[:1])}, parameters={"prompt_name": "query"})
    assert by_name.as_numpy("embeddings").tobytes() == answer.as_numpy("embeddings")[:1].tobytes()
    with pytest.raises(Exception, match="no such prompt: it has query, passage"):
        served.infer(protocol, "embedding", {"text": rows(TEXTS)}, parameters={"prompt_name": "document"})


@protocols
def test_scores_of_passages_in_their_order(served: Served, protocol: Any) -> None:
    logits = np.array([served.logit(QUERY, text) for text in TEXTS])
    beside = {"query": rows([QUERY]), "passage": rows(TEXTS).reshape(1, -1)}
    below = {"query": rows([QUERY] * len(TEXTS)), "passage": rows(TEXTS)}
    for inputs in (beside, below):
        answer = served.infer(protocol, "rerank", inputs)
        shape = inputs["passage"].shape
        assert answer.as_numpy("logit").shape == answer.as_numpy("scores").shape == shape
        np.testing.assert_allclose(answer.as_numpy("logit").reshape(-1), logits, rtol=1e-3, atol=1e-3)
        np.testing.assert_allclose(answer.as_numpy("scores").reshape(-1), 1 / (1 + np.exp(-logits)), atol=1e-3)
        counts = [served.num_tokens(QUERY, text) for text in TEXTS]
        assert answer.as_numpy("token_count").tolist() == ([sum(counts)] if inputs is beside else counts)


@protocols
def test_a_text_that_is_too_long_is_refused_or_cut(served: Served, protocol: Any) -> None:
    long = [TEXTS[0], "abc" * 100]
    with pytest.raises(Exception, match="prompt 1: This model's maximum context length is 48 tokens"):
        served.infer(protocol, "embedding", {"text": rows(long)})
    cut = served.infer(protocol, "embedding", {"text": rows(long), "truncate": rows(["END", "END"])})
    assert cut.as_numpy("token_count").tolist() == [served.num_tokens(TEXTS[0]), 48]
    np.testing.assert_allclose(cut.as_numpy("embeddings")[1], served.vector(long[1][: 48 - 2]), rtol=1e-3, atol=1e-4)
