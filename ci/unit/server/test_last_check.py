"""The last check of guided answers at tritonserver: its counters are among the metrics, and it leaves answers alone.

What is checked stands in `ci/unit/executor/front/test_last_check.py`.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_executor import FakeExecutor, tokens
from fake_pb_utils import MetricFamily
from fake_tokenizer import byte_tokenizer, checking_config
from played_backend import LONG
from waiting import until

from inflight.result import FinishReason

END_ID = byte_tokenizer().end_ids[0]
GUIDED = {
    "text_input": "hi",
    "max_tokens": 32,
    "exclude_input_in_output": True,
    "guided_decoding_guide_type": "json_schema",
    "guided_decoding_guide": '{"type": "object", "properties": {"a": {"type": "integer", "maximum": 3}}}',
}


@pytest.fixture
def executor(tmp_path: Path) -> FakeExecutor:
    """It checks guided answers."""
    return FakeExecutor(config=checking_config(tmp_path))


def counted(name: str) -> float:
    return MetricFamily.metrics[f"inflight_guided_answers_{name}_total", ""].value


@pytest.mark.parametrize("stream", [False, True])
def test_a_wrong_answer_is_counted_and_stays_what_it_is(ask, executor: FakeExecutor, stream: bool) -> None:
    for text, is_right in ((b'{"a": 1}', True), (b'{"a": 42}', False)):
        sender = ask({**GUIDED, "stream": stream})
        request_id = executor.last.request_id
        executor.push(tokens(request_id, [*text[:4]]), tokens(request_id, [*text[4:], END_ID], FinishReason.END_ID))
        assert sender.finished.wait(LONG)
        assert sender.text == text.decode()
        until(lambda right=is_right: counted("checked") == 2 - right)
    until(lambda: counted("failed") == 1)
