"""Values that no request may have, by the engine's names of the fields, and how the sentence begins that refuses each:
one table, which the tests of the engine and of every dialect walk. What a dialect refuses by rules of its own stands in
its own tests.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple


class WrongValue(NamedTuple):
    field: str
    value: Any
    sentence: str

    def __str__(self) -> str:
        return f"{self.field}={self.value}"

    @property
    def is_json(self) -> bool:
        return math.isfinite(self.value)


def _wrong(*rows: tuple[str, tuple[Any, ...], str]) -> list[WrongValue]:
    """Of rows of a field, its wrong values, and the rule that they break."""
    return [WrongValue(field, value, f"{field} must be {rule}") for field, values, rule in rows for value in values]


NO_FLOAT32 = 1e300
NAN, INF = math.nan, math.inf
WRONG_SAMPLING = _wrong(
    ("temperature", (NAN, INF, -1.0), "0 (greedy) or a finite number of at least"),
    ("top_k", (-2,), "between 0 (off) and 2147483647, got -2"),
    ("top_p", (NAN, INF, 1.5), "above 0 and at most 1, got"),
    ("top_p_decay", (0.0, 1.5), "above 0 and at most 1, got"),
    ("top_p_min", (0.0,), "above 0 and at most 1, got 0.0"),
    ("min_p", (2.0,), "between 0 and 1, got 2.0"),
    ("typical_p", (0.0, 1.5), "above 0 and at most 1, got"),
    ("repetition_penalty", (NAN, INF, 0.0, -1.0, 1e-40, NO_FLOAT32), "between 1e-06 and 1e+06, got"),
    ("presence_penalty", (NAN, INF, 3e38, -3e38, NO_FLOAT32), "between -1e+20 and 1e+20, got"),
    ("frequency_penalty", (NAN, INF, 3e38, -3e38, NO_FLOAT32), "between -1e+20 and 1e+20, got"),
    ("min_tokens", (-1,), ">= 0, got -1"),
    ("no_repeat_ngram_size", (-1, 65), "between 0 (off) and 64, got"),
    ("beam_width", (0,), ">= 1, got 0"),
    ("beam_search_diversity_rate", (-0.5,), "between 0 and"),
    ("length_penalty", (9.0,), "between -8 and 8, got 9.0"),
)
"""Fields of SamplingConfig."""

WRONG_REQUESTS = _wrong(
    ("max_tokens", (0, -1, 2**31 - 1), "between 1 and 2147483646, got"),
    ("num_return_sequences", (0, 5), "between 1 and max_batch_size 4, got"),
)
"""Fields of Request, at an engine of batches of 4."""
