"""Resume tokens: parts join, and whatever is not the joined parts of one stream is found out.

pytest ci/unit/server/test_resume_token.py
"""

from __future__ import annotations

import pytest

from inflight.errors import InvalidRequest
from inflight.request_limits import RequestLimits
from inflight.result import FinishReason
from inflight.server.resume_token import (
    BYTES_BESIDES,
    BYTES_PER_TOKEN,
    Head,
    Part,
    ResumeToken,
    ResumeTokenWriter,
    max_bytes,
)

HEAD = Head(checkpoint=b"c" * 8, request=b"r" * 8, seed=2**64 - 1)
GOING_ON = FinishReason.NOT_FINISHED


MAX_PARTS = 9


def part(*token_ids: int, index: int = 0, total: float | None = None, reason: FinishReason = GOING_ON) -> Part:
    return Part(sequence_index=index, token_ids=list(token_ids), cum_log_prob=total, finish_reason=reason)


PARTS = (
    part(1, 2, total=-0.1),
    part(3, index=1, total=-7.0),
    part(4, total=-0.3),
    part(index=1, reason=FinishReason.LENGTH),
)


def written(*parts: Part) -> list[str]:
    writer = ResumeTokenWriter(HEAD)
    return [writer.write(each) for each in parts]


def test_the_parts_joined_are_what_was_written() -> None:
    token = ResumeToken.parse("".join(written(*PARTS)), MAX_PARTS)
    assert (token.head, token.parts) == (HEAD, list(PARTS))
    (first, second), reasons = token.delivered(2)
    assert (first.token_ids, first.cum_log_prob, first.is_finished) == ([1, 2, 4], -0.3, False)
    assert (second.token_ids, second.is_finished) == ([3], True)
    assert reasons == [FinishReason.NOT_FINISHED, FinishReason.LENGTH]


def test_a_token_goes_on_after_each_resumption() -> None:
    text = "".join(written(*PARTS[:1]))
    for each in PARTS[1:]:
        text += ResumeTokenWriter(HEAD, ResumeToken.parse(text, MAX_PARTS)).write(each)
    assert text == "".join(written(*PARTS))


def test_a_token_of_one_token_a_part_is_within_the_bound() -> None:
    pieces = written(*[part(2**31 - 1, index=255, total=-0.123) for _ in range(100)])
    assert all(len(piece) <= BYTES_PER_TOKEN for piece in pieces[1:])
    assert len(pieces[0]) <= BYTES_BESIDES
    limits = RequestLimits(vocab_size=9, max_seq_len=100, max_input_len=9, kv_cache_tokens=99, max_batch_size=3)
    assert max_bytes(limits) == 300 * BYTES_PER_TOKEN + BYTES_BESIDES


PIECES = written(*PARTS)


@pytest.mark.parametrize(
    "pieces",
    [
        pytest.param([PIECES[0], PIECES[2]], id="one is missing"),
        pytest.param([PIECES[0], PIECES[1], PIECES[1]], id="one is there twice"),
        pytest.param([PIECES[0], PIECES[2], PIECES[1]], id="two are exchanged"),
        pytest.param(PIECES[1:], id="the first is missing"),
        pytest.param([*PIECES[:2], PIECES[2][:-1]], id="the last is cut"),
        pytest.param([PIECES[0][:5] + "A" + PIECES[0][6:]], id="a letter is another"),
        pytest.param([PIECES[0], "*" + PIECES[1][1:]], id="a letter is none of base64"),
        pytest.param([PIECES[0], "."], id="a part is empty"),
        pytest.param(["1:"], id="nothing"),
        pytest.param(["x"], id="something else"),
        pytest.param(["é:" + PIECES[0][2:]], id="not ASCII"),
    ],
)
def test_what_is_not_the_parts_of_a_stream_is_refused(pieces: list[str]) -> None:
    with pytest.raises(InvalidRequest, match="resume_token is damaged: it must be"):
        ResumeToken.parse("".join(pieces), MAX_PARTS)


def test_more_parts_than_the_request_can_have_responses_are_not_read() -> None:
    text = "".join(written(part(1), part(2))) + "." * 7
    with pytest.raises(InvalidRequest, match="damaged"):
        ResumeToken.parse(text, MAX_PARTS)
    with pytest.raises(InvalidRequest, match="resume_token has 10 parts, more than this request can have responses"):
        ResumeToken.parse(text + ".", MAX_PARTS)


def test_another_version_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="version 2, and this server has version 1"):
        ResumeToken.parse("2:" + PIECES[0][2:], MAX_PARTS)


@pytest.mark.parametrize(
    ("made_up", "words"),
    [
        (part(1, index=2), "damaged"),
        (part(1, total=float("nan")), "damaged"),
        (part(1, reason=FinishReason.END_ID), "nothing is left to generate"),
    ],
)
def test_made_up_tokens_are_refused(made_up: Part, words: str) -> None:
    token = ResumeToken.parse("".join(written(part(3, index=0), made_up)), MAX_PARTS)
    with pytest.raises(InvalidRequest, match=words):
        token.delivered(1)


def test_values_out_of_range_are_refused() -> None:
    for bad in (part(-1), part(2**31), part(1, index=-1)):
        with pytest.raises(InvalidRequest, match="damaged"):
            ResumeToken.parse("".join(written(bad)), MAX_PARTS)
