"""Schemas of every keyword and of the kinds that people use, against what is said of their values."""

from __future__ import annotations

import pytest
from schema_corpus import Case, corpus, validator


@pytest.mark.parametrize("case", corpus(), ids=lambda case: case.name)
def test_what_the_corpus_says_of_a_value_is_what_a_validator_says(case: Case) -> None:
    says = validator(case.schema)
    assert all(map(says.is_valid, case.valid))
    assert not any(map(says.is_valid, case.invalid))
