"""Answers drawn from the masks of schemas of the kinds that people use."""

from __future__ import annotations

from answer_validity import default_vocabulary, made_schemas


def test_every_answer_that_ended_by_itself_follows_its_schema() -> None:
    found = made_schemas(default_vocabulary(), seed=5, num_answers=200, each=4)
    assert found.failures == []
    assert found.ended > 180
