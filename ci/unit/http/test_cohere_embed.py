"""Cohere's /v2/embed by its own package: vectors in each type, and what is refused.

pytest ci/unit/http/test_cohere_embed.py
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cohere
import numpy as np
import played_encoder
import pytest
from openai_server import Running, checkpoint_folder, openai_server

TEXTS = ["abca", "dd"]
PROMPTS = {"prompts": {"query": "dd ", "passage": "ca "}}
COUNTS = {"abca": [2, 1, 1, 0], "dd": [0, 0, 0, 2]}
EMBED: dict[str, Any] = {"model": "llm", "input_type": "classification", "texts": TEXTS}


def engine(**changes: Any) -> Any:
    of_vectors = {"pooled": "vectors", "num_labels": 0, "model_outputs": ["hidden_states"]}
    return played_encoder.engine(**{**of_vectors, **changes})


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    played = engine()
    folder = checkpoint_folder(tmp_path_factory.mktemp("checkpoint"))
    with openai_server(played, folder, tokenizer=played_encoder.tokenizer()) as url:
        yield Running(url, played)


@pytest.fixture
def client(running: Running) -> cohere.ClientV2:
    return cohere.ClientV2(api_key="none", base_url=running.url)


def unit(text: str, dimensions: int = 4) -> np.ndarray:
    counts = np.array(COUNTS[text][:dimensions], np.float32)
    return counts / np.linalg.norm(counts)


def test_vectors_are_floats_unless_more_is_asked_for(client: cohere.ClientV2) -> None:
    answer = client.embed(**EMBED)
    assert answer.response_type == "embeddings_by_type"
    assert answer.texts == TEXTS
    assert answer.embeddings.float_ is not None
    np.testing.assert_allclose(answer.embeddings.float_, [unit(text) for text in TEXTS], rtol=1e-6)
    assert (answer.embeddings.base64, answer.embeddings.ubinary) == (None, None)
    assert answer.meta is not None and answer.meta.billed_units is not None
    assert answer.meta.billed_units.input_tokens == len("".join(TEXTS))


def test_every_type_is_made_of_the_same_vector(tmp_path: Path) -> None:
    """Bits as numpy packs them, and as sentence-transformers' quantize_embeddings makes signed ones of these."""
    played = engine(hidden_size=8)

    def play(request: Any) -> Any:
        (response,) = played_encoder.play(request)
        tensor = response.result.tensors[0]
        row = np.concatenate([tensor.array(), -tensor.array()], axis=1)
        tensor = type(tensor).of(tensor.name, row)
        return [
            type(response)(
                request_id=response.request_id,
                result=type(response.result)(
                    tensors=[tensor],
                    finish_reason=response.result.finish_reason,
                    is_final=True,
                    is_sequence_final=True,
                ),
            )
        ]

    played.script = play
    with openai_server(played, checkpoint_folder(tmp_path), tokenizer=played_encoder.tokenizer()) as url:
        client = cohere.ClientV2(api_key="none", base_url=url)
        found = client.embed(**EMBED, embedding_types=["float", "base64", "ubinary", "binary", "float"]).embeddings
    assert found.float_ is not None and found.base64 is not None
    for place, text in enumerate(TEXTS):
        both = np.array([*COUNTS[text], *(-each for each in COUNTS[text])], np.float32)
        vector = both / np.linalg.norm(both)
        np.testing.assert_allclose(found.float_[place], vector, rtol=1e-6)
        decoded = np.frombuffer(base64.b64decode(found.base64[place]), "<f4")
        assert decoded.tolist() == found.float_[place]
        bits = np.packbits(vector > 0)
        assert found.ubinary is not None and found.binary is not None
        assert found.ubinary[place] == bits.tolist()
        assert found.binary[place] == (bits.astype(np.int16) - 128).astype(np.int8).tolist()


def test_dimensions_and_lengths(client: cohere.ClientV2, running: Running) -> None:
    answer = client.embed(**EMBED, output_dimension=2, max_tokens=3)
    sent = [bytes(request.input_token_ids) for request in running.engine.requests[-2:]]
    assert sent == [b"aba", b"dd"], "the last token ends an encoder's text"
    assert answer.embeddings.float_ is not None
    np.testing.assert_allclose(answer.embeddings.float_[0], np.array([2, 1]) / np.sqrt(5), rtol=1e-6)
    too_long = "a" * running.engine.limits.max_seq_len
    assert client.embed(**{**EMBED, "texts": [too_long]}).embeddings.float_ is not None, "truncate is END"
    with pytest.raises(cohere.BadRequestError, match="maximum context length"):
        client.embed(**{**EMBED, "texts": [too_long]}, truncate="NONE")


def test_texts_may_be_parts_of_inputs(client: cohere.ClientV2, running: Running) -> None:
    inputs: Any = [{"content": [{"type": "text", "text": "ab"}, {"type": "text", "text": "c"}]}]
    client.embed(model="llm", input_type="clustering", inputs=inputs)
    assert bytes(running.engine.sent.input_token_ids) == b"ab\nc"
    picture: Any = [{"content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}]}]
    with pytest.raises(cohere.BadRequestError, match="inputs is not supported: this engine reads text"):
        client.embed(model="llm", input_type="clustering", inputs=picture)


def test_the_type_of_texts_chooses_the_models_prompt(tmp_path: Path) -> None:
    (checkpoint_folder(tmp_path) / "config_sentence_transformers.json").write_text(json.dumps(PROMPTS))
    played = engine()
    with openai_server(played, tmp_path, tokenizer=played_encoder.tokenizer()) as url:
        client = cohere.ClientV2(api_key="none", base_url=url)
        for kind in ("search_query", "search_document"):
            client.embed(**{**EMBED, "input_type": kind, "texts": ["a"]})
    assert [bytes(request.input_token_ids) for request in played.requests] == [b"dd a", b"ca a"]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"embedding_types": ["int8"]}, "embedding_types is not supported: int8 needs ranges of each feature"),
        ({"embedding_types": ["uint8"]}, "embedding_types is not supported: uint8 needs ranges of each feature"),
        ({"embedding_types": ["ubinary"]}, "output_dimension must be a multiple of 8 .* is 4"),
        ({"output_dimension": 5}, "output_dimension must be between 1 and 4"),
        ({"input_type": "image"}, "input_type is not supported: this engine reads text"),
        ({"input_type": "other"}, "input_type must be one of query, "),
        ({"images": ["data:image/png;base64,"]}, "images is not supported"),
        ({"truncate": "START"}, "truncate is not supported: texts are cut at their end"),
        ({"truncate": "NONE", "max_tokens": 2}, "max_tokens is not supported: it says where"),
        ({"max_tokens": 0}, "max_tokens must be at least 1"),
        ({"priority": 3}, "priority is not supported"),
        ({"texts": ["a", ""]}, "texts must not be empty"),
        ({"texts": []}, "there must be 1 to 1024 texts, got 0"),
        ({"texts": None}, "give the texts in one of texts and inputs"),
    ],
)
def test_what_is_not_done_is_refused_by_name(
    client: cohere.ClientV2, running: Running, changes: dict[str, Any], sentence: str
) -> None:
    before = len(running.engine.requests)
    with pytest.raises(cohere.BadRequestError, match=sentence) as caught:
        client.embed(**{**EMBED, **changes})
    assert [*caught.value.body] == ["message"], "Cohere's form"
    assert len(running.engine.requests) == before


def test_an_unknown_model_is_not_found(client: cohere.ClientV2) -> None:
    with pytest.raises(cohere.NotFoundError):
        client.embed(**{**EMBED, "model": "other"})
