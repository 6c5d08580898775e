"""Embeddings that requests bring: what they hold, what is refused, and who may share their prefixes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from msgspec import structs

from inflight.errors import InvalidRequest
from inflight.executor.wire.messages import MAX_MESSAGE_BYTES, Submit, decode_from_front, encode
from inflight.output_config import OutputConfig
from inflight.prompt_tuning import EmbeddingTable, PromptTuningConfig, virtual_tokens
from inflight.request import Request
from inflight.request_limits import RequestLimits

LIMITS = RequestLimits(
    vocab_size=100,
    max_seq_len=64,
    max_input_len=63,
    kv_cache_tokens=1000,
    embedding_size=3,
    max_prompt_embedding_bytes=48,
)
ROWS = np.array([[1.5, -2.0, 0.25], [3.0, 0.0, -65504.0]], np.float32)
TABLE = EmbeddingTable.of(ROWS)


def request(table: EmbeddingTable = TABLE, tokens: tuple[int, ...] = (5, 100, 101), **fields: object) -> Request:
    extra_ids = fields.pop("extra_ids", [])
    tuning = PromptTuningConfig(embedding_table=table, input_token_extra_ids=extra_ids)  # type: ignore[arg-type]
    return Request(input_token_ids=list(tokens), max_tokens=4, prompt_tuning_config=tuning, **fields)  # type: ignore[arg-type]


def in_bfloat16() -> EmbeddingTable:
    data = torch.from_numpy(ROWS).bfloat16().view(torch.uint8).numpy().tobytes()
    return EmbeddingTable(dtype="bfloat16", shape=(2, 3), data=data)


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        (TABLE, ROWS),
        (EmbeddingTable.of(ROWS.astype(np.float16)), ROWS),
        (EmbeddingTable.of(torch.from_numpy(ROWS).half()), ROWS),
        (in_bfloat16(), torch.from_numpy(ROWS).bfloat16().float().numpy()),
    ],
    ids=["float32", "float16", "a tensor of torch", "bfloat16"],
)
def test_rows_are_read_as_float32(table: EmbeddingTable, expected: np.ndarray) -> None:
    table.validate()
    found = table.rows(np.array([1, 0, 1]))
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, expected[[1, 0, 1]])


@pytest.mark.parametrize("rows", [[1.0, 2.0], [[1, 2]], np.zeros((2, 3)), "ab", torch.zeros(2, 3).bfloat16()])
def test_only_matrices_of_half_or_single_precision_are_taken(rows: object) -> None:
    with pytest.raises(InvalidRequest, match="embeddings must be"):
        EmbeddingTable.of(rows)  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("kind", [np.float32, np.float16])
def test_a_number_that_is_not_finite_is_refused_wherever_it_stands(wrong: float, kind: type) -> None:
    rows = np.full((70_000, 1), np.finfo(kind).max, kind)
    EmbeddingTable.of(rows).validate()
    for place in (0, 65_535, 65_536, 69_999):
        rows[place] = wrong
        with pytest.raises(InvalidRequest, match="must be finite numbers"):
            EmbeddingTable.of(rows).validate()
        rows[place] = 0


@pytest.mark.parametrize("wrong", [0x7F80, 0xFF80, 0x7FC0])
def test_the_same_in_bfloat16(wrong: int) -> None:
    data = np.array([0x7F7F, 0xFF7F, wrong], "<u2").tobytes()
    EmbeddingTable(dtype="bfloat16", shape=(1, 2), data=data[:4]).validate()
    with pytest.raises(InvalidRequest, match="must be finite numbers"):
        EmbeddingTable(dtype="bfloat16", shape=(1, 3), data=data).validate()


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (request(tokens=(5, 102)), r"token id 102 is outside the vocabulary and the rows of .* \[0, 102\)"),
        (request(EmbeddingTable.of(ROWS[:, :2])), "have 2 features, but those of this model have 3"),
        (request(EmbeddingTable.of(np.zeros((5, 3), np.float32))), "60 bytes, more than max_prompt_embedding_bytes 48"),
        (request(EmbeddingTable.of(ROWS[:0])), "at least one row"),
        (request(structs.replace(TABLE, shape=(2, 4))), r"have 24 bytes, but \[2, 4\] of float32 take 32"),
        (request(structs.replace(TABLE, shape=(-2, -3))), "at least one row"),
        (request(structs.replace(TABLE, shape=(2**40, 3))), "have 24 bytes, but"),
        (request(extra_ids=[1]), "prompt_table_extra_ids has 1 entries for 3 prompt tokens"),
        (request(extra_ids=[0, 0, 2**64]), "prompt_table_extra_ids must hold unsigned"),
        (request(extra_ids=[0, 0, -1]), "prompt_table_extra_ids must hold unsigned"),
        (
            request(output_config=OutputConfig(return_prompt_log_probs=True)),
            "return_prompt_log_probs is not supported together with embeddings",
        ),
        (request(end_ids=[100]), "end_ids holds a token id outside"),
        (request(bad_words=[[100]]), "bad_words holds an empty entry or a token id outside"),
        (Request(input_token_ids=[100], max_tokens=4), r"token id 100 is outside the vocabulary \[0, 100\)"),
    ],
)
def test_what_cannot_be_served_is_refused(wrong: Request, sentence: str) -> None:
    with pytest.raises(InvalidRequest, match=sentence):
        LIMITS.validate(wrong)


def test_what_can_be_served_is_not() -> None:
    LIMITS.validate(request())
    LIMITS.validate(request(extra_ids=[0, 2**64 - 1, 1]))
    with pytest.raises(InvalidRequest, match="this model takes no embeddings"):
        structs.replace(LIMITS, embedding_size=0).validate(request())


def test_only_equal_embeddings_share_prefixes() -> None:
    """A request without any has the identity that it had before there were tables, whatever its salt."""
    plain = Request(input_token_ids=[5, 100, 101], max_tokens=4)
    assert plain.prefix_identity == b""
    assert structs.replace(plain, cache_salt="é").prefix_identity == "é".encode()
    changed = ROWS.copy()
    changed[1, 2] += 32
    distinct = [
        plain,
        request(),
        request(EmbeddingTable.of(changed)),
        request(structs.replace(TABLE, shape=(3, 2))),
        request(extra_ids=[0, 1, 0]),
        request(extra_ids=[0, 0, 1]),
        request(cache_salt="a"),
        request(tokens=(5, 100)),
    ]
    identities = [each.prefix_identity for each in distinct]
    assert len(set(identities)) == len(distinct) - 1
    assert identities[-1] == identities[1], "the tokens are no part of it: they are hashed block by block"


def test_embeddings_travel_as_bytes() -> None:
    rows = np.full((1000, 1000), 1.5, np.float16)
    sent = request(EmbeddingTable.of(rows))
    frame = encode(Submit([sent]))
    assert len(frame) < rows.nbytes + 200 < MAX_MESSAGE_BYTES
    received = decode_from_front(frame)
    assert isinstance(received, Submit) and received.requests == [sent]


def test_all_rows_of_a_table_have_ids() -> None:
    assert virtual_tokens(TABLE, 100) == [100, 101]
