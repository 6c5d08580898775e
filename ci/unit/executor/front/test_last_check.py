"""Answers that ended by themselves are held against their guides once more; faults are counted and logged."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from list_front import ListFront
from waiting import until

from inflight.config import EngineConfig
from inflight.errors import ConfigurationError
from inflight.guided_decoding import GuidedDecodingParams, GuideType
from inflight.request import Request
from inflight.request_limits import RequestLimits
from inflight.result import FinishReason, Response, Result
from inflight.sampling_config import SamplingConfig
from inflight.text.tokenizer import Tokenizer

CHECKPOINT = Path(__file__).resolve().parents[4] / "model_repository" / "llm" / "1" / "checkpoint"
LIMITS = RequestLimits(
    vocab_size=4096, max_seq_len=512, max_input_len=500, kv_cache_tokens=4096, max_batch_size=4, max_beam_width=2
)
SCHEMA = {"type": "object", "properties": {"a/b": {"type": "integer", "minimum": 3}}, "required": ["a/b"]}


def guide(kind: GuideType, content: Any = None, **fields: Any) -> GuidedDecodingParams:
    text = content if isinstance(content, str) else json.dumps(content)
    return GuidedDecodingParams(guide_type=kind, guide="" if content is None else text, **fields)


@dataclass
class Asked:
    """A front that checks, and the tokens of texts."""

    front: ListFront
    tokenizer: Tokenizer

    def send(self, params: GuidedDecodingParams | None, **fields: Any) -> int:
        end_id = self.tokenizer.end_ids[0]
        return self.front.enqueue_request(
            Request(input_token_ids=[5], max_tokens=400, end_ids=[end_id], guided_decoding_params=params, **fields)
        )

    def say(
        self,
        request_id: int,
        text: str,
        reason: FinishReason = FinishReason.END_ID,
        *,
        index: int = 0,
        last: bool = True,
    ) -> None:
        """The text as two responses, the second the sequence's last."""
        token_ids = self.tokenizer.encode_plain(text)
        end = [self.tokenizer.end_ids[0]] if reason is FinishReason.END_ID else []
        first = Result(output_token_ids=token_ids[:1], sequence_index=index)
        second = Result(
            output_token_ids=[*token_ids[1:], *end],
            finish_reason=reason,
            is_final=last,
            is_sequence_final=True,
            sequence_index=index,
        )
        self.front.say(*(Response(request_id=request_id, result=result) for result in (first, second)))

    @property
    def counts(self) -> tuple[int, int]:
        return self.front.num_answers_checked(), self.front.num_answers_failed()


@pytest.fixture
def asked() -> Iterator[Asked]:
    front = ListFront(config=EngineConfig(gpt_model_path=str(CHECKPOINT), guided_decoding_check=True))
    front.recover(LIMITS)
    yield Asked(front, Tokenizer.load(CHECKPOINT))
    front.shutdown()


def test_an_answer_that_breaks_its_schema_is_counted_and_logged_and_delivered(
    asked: Asked, caplog: pytest.LogCaptureFixture
) -> None:
    params = guide(GuideType.JSON_SCHEMA, SCHEMA)
    right, wrong = asked.send(params), asked.send(params)
    with caplog.at_level(logging.ERROR):
        asked.say(right, '{"a/b": 4}')
        asked.say(wrong, '{"a/b": 2}')
        until(lambda: asked.counts == (2, 1), "both are checked")
    (record,) = caplog.records
    expected = f'request {wrong}: its answer does not follow its guide: minimum at "/properties/a~1b"'
    assert record.getMessage() == expected
    told = asked.front.await_responses(wrong)
    assert [response.has_error for response in told] == [False, False] and told[-1].is_final


def test_each_sequence_is_an_answer(asked: Asked) -> None:
    request_id = asked.send(
        guide(GuideType.JSON), num_return_sequences=2, sampling_config=SamplingConfig(temperature=1.0), streaming=True
    )
    asked.say(request_id, "[1]", index=1, last=False)
    asked.say(request_id, "{}", index=0)
    until(lambda: asked.counts == (2, 1), "both are checked")


@pytest.mark.parametrize("reason", [FinishReason.LENGTH, FinishReason.STOP_WORDS, FinishReason.CANCELLED])
def test_what_did_not_end_by_itself_is_not_checked(asked: Asked, reason: FinishReason) -> None:
    params = guide(GuideType.JSON)
    asked.say(asked.send(params), "[1", reason)
    asked.say(asked.send(None), "[1")
    asked.say(asked.send(guide(GuideType.REGEX, "yes")), "no")
    asked.say(asked.send(params), "{}")
    until(lambda: asked.counts == (1, 0), "the one behind them is checked")


def test_a_part_of_an_answer_may_have_a_guide_of_its_own(asked: Asked, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        asked.front.check_text("a call", guide(GuideType.JSON_SCHEMA, SCHEMA), '{"a/b": 2}')
        until(lambda: asked.counts == (1, 1), "it is checked")
    assert caplog.records[0].getMessage() == 'a call does not follow its guide: minimum at "/properties/a~1b"'


def test_a_name_of_a_schema_begins_no_line_of_the_log(asked: Asked, caplog: pytest.LogCaptureFixture) -> None:
    schema = {"type": "object", "properties": {"a\nb": {"type": "integer"}}}
    with caplog.at_level(logging.ERROR):
        asked.say(asked.send(guide(GuideType.JSON_SCHEMA, schema)), '{"a\\nb": "x"}')
        until(lambda: asked.counts == (1, 1), "it is checked")
    assert caplog.records[0].getMessage().endswith('type at "/properties/a\\nb"')


def test_a_library_that_panics_is_told_and_ends_nothing(
    asked: Asked, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Panic(BaseException):
        """As those of libraries in Rust are."""

    def panic(*arguments: object) -> None:
        raise Panic

    with monkeypatch.context() as patched:
        patched.setattr("inflight.guides.last_check.find_breach", panic)
        asked.say(request_id := asked.send(guide(GuideType.JSON)), "{}")
        until(lambda: caplog.records, "it is told")
    assert caplog.records[0].getMessage() == f"request {request_id}: its answer could not be checked: Panic"
    asked.say(asked.send(guide(GuideType.JSON)), "{}")
    until(lambda: asked.counts == (1, 0), "the next one is checked")


def test_what_the_journal_does_not_keep_is_not_checked() -> None:
    config = EngineConfig(gpt_model_path=str(CHECKPOINT), guided_decoding_check=True, journal_max_tokens=8)
    front = ListFront(config=config)
    front.recover(LIMITS)
    asked = Asked(front, Tokenizer.load(CHECKPOINT))
    asked.say(asked.send(guide(GuideType.JSON)), "[1, 2, 3, 4, 5, 6, 7, 8]")
    asked.say(asked.send(guide(GuideType.JSON)), "{}")
    until(lambda: asked.counts == (1, 0), "the one behind it is checked")


def test_a_checkpoint_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"holds no tokenizer\.json"):
        ListFront(config=EngineConfig(gpt_model_path=str(tmp_path), guided_decoding_check=True))
