"""The oracle of `make chaos` tells answers apart, and knows which errors a fault may cause."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest

from ci.chaos.answer import Answer
from ci.chaos.faults import FAULTS
from ci.chaos.load import Stream
from ci.chaos.oracle import Injection, Oracle, Verdict
from ci.chaos.scene import Scene
from ci.chaos.workload import workload

ITEM = next(item for item in workload() if item.model == "llm")
LOST = "the connection was lost [UNAVAILABLE]"


def answer(*tokens: int, log_probs: float = -0.5, error: str = "", is_revised: bool = False) -> Answer:
    """Of a response for each token."""
    found = Answer(is_revised=is_revised)
    for token in tokens:
        text = np.array([f" {token}".encode()], object)
        numbers = np.full((1, 1), log_probs, np.float32)
        found.add_tensors({"output_ids": np.array([[token]]), "text_output": text, "output_log_probs": numbers})
    found.error = error
    return found


def test_responses_may_be_cut_in_any_way() -> None:
    whole = Answer()
    whole.add_tensors(
        {
            "output_ids": np.array([[1, 2]]),
            "text_output": np.array([b" 1 2"], object),
            "output_log_probs": np.full((1, 2), -0.5, np.float32),
        }
    )
    assert answer(1, 2).differs(whole, exact=True) == ""


@pytest.mark.parametrize("other", [answer(1, 3), answer(1), answer(1, 2, 2), answer(1, 2, log_probs=-0.6)])
def test_a_difference_is_told(other: Answer) -> None:
    assert other.differs(answer(1, 2), exact=False)


def test_only_where_bits_may_differ_a_last_digit_may() -> None:
    other = answer(1, 2, log_probs=-0.50001)
    assert other.differs(answer(1, 2), exact=False) == ""
    assert "output_log_probs" in other.differs(answer(1, 2), exact=True)


def test_what_came_before_an_error_must_be_the_beginning() -> None:
    assert answer(1).begins(answer(1, 2))
    assert not answer(2).begins(answer(1, 2))
    assert answer(2, is_revised=True).begins(answer(1, 2))


@pytest.mark.parametrize(
    ("name", "came", "verdict"),
    [
        ("kill the leader", answer(1, 2), Verdict.EQUAL),
        ("kill the leader", answer(1, 3), Verdict.DIFFERENT),
        ("kill the leader", answer(1, error=LOST), Verdict.LOST),
        ("kill the OpenAI server", answer(1, error=LOST), Verdict.LOST),
        ("kill tritonserver", answer(1, error=LOST), Verdict.ENDED),
        ("kill tritonserver", answer(3, error=LOST), Verdict.DIFFERENT),
        ("kill tritonserver", answer(1, error="the step failed [INTERNAL]"), Verdict.LOST),
    ],
)
def test_the_verdict_follows_what_the_fault_promises(name: str, came: Answer, verdict: Verdict) -> None:
    oracle = Oracle(cast(Scene, None), exact=True)
    oracle.alone[ITEM.name] = answer(1, 2)
    stream = Stream(ITEM, sent=1.0, ended=3.0, answer=came)
    fault = next(each for each in FAULTS if each.name == name)
    oracle.injections.append(Injection(fault, began=2.0, over=4.0, in_flight=[stream]))
    oracle.judge(stream)
    assert oracle.verdicts[stream] is verdict
    assert bool(oracle.complaints) == (verdict in (Verdict.LOST, Verdict.DIFFERENT))


def test_an_error_without_a_fault_is_a_loss() -> None:
    oracle = Oracle(cast(Scene, None), exact=True)
    oracle.alone[ITEM.name] = answer(1, 2)
    fault: Any = next(each for each in FAULTS if each.name == "kill tritonserver")
    oracle.injections.append(Injection(fault, began=5.0, over=6.0))
    stream = Stream(ITEM, sent=1.0, ended=3.0, answer=answer(1, error=LOST))
    oracle.judge(stream)
    assert oracle.verdicts[stream] is Verdict.LOST


def test_a_pause_counts_if_it_touches_the_fault() -> None:
    stream = Stream(ITEM, sent=0.0, arrivals=[1.0, 1.1, 5.0, 5.1, 9.0])
    assert stream.pause(2.0, 4.0) == pytest.approx(3.9)
    assert stream.pause(5.02, 5.05) == pytest.approx(0.1)


def test_names_are_unique() -> None:
    for names in ([fault.name for fault in FAULTS], [item.name for item in workload()]):
        assert len(set(names)) == len(names)
