"""What a stream delivered, however it was cut into responses, to be compared with another answer to the request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

LATEST = frozenset({"cum_log_probs", "cumulative_logprob", "usage"})
"""Values that each response brings anew; all others belong to its own tokens."""
NOT_COMPARED = frozenset({"sequence_length", "sequence_index", "batch_index", "model_name", "model_version"})
SUMS, NUMBERS = 2e-3, 2e-4
"""How far sums and other numbers may be off where bits may differ: a chunk of tokens sums up in another order than one
token."""


@dataclass
class Answer:
    """Values by name, each with the sequence that it belongs to."""

    texts: dict[str, bytes] = field(default_factory=dict)
    numbers: dict[str, list[Any]] = field(default_factory=dict)
    """Arrays in the order of arrival."""
    is_revised: bool = False
    """Its responses repeat what came before them and may change it, as those of a beam search do."""
    error: str = ""
    """With a code in brackets, of the table of errors in backend/inflight/server/README.md; "" = it came to its end."""

    def add_text(self, name: str, text: str | bytes, *, index: int = 0) -> None:
        key, new = f"{name} {index}", text.encode() if isinstance(text, str) else text
        self.texts[key] = new if self.is_revised else self.texts.get(key, b"") + new

    def add_tensors(self, tensors: Mapping[str, Any]) -> None:
        """One response."""
        index = int(tensors["sequence_index"].ravel()[0]) if "sequence_index" in tensors else 0
        for name, array in tensors.items():
            if name in NOT_COMPARED:
                continue
            if array.dtype == np.object_:
                self.add_text(name, b"".join(array.ravel()), index=index)
                continue
            values = self.numbers.setdefault(f"{name} {index}", [])
            if self.is_revised or name in LATEST:
                values.clear()
            values.append(array.ravel())

    def differs(self, alone: Answer, *, exact: bool) -> str:
        """What the first difference is; "" if there is none."""
        if self.texts != alone.texts:
            name = next(name for name in {**alone.texts, **self.texts} if not self._same_text(alone, name))
            return f"{name}: {self.texts.get(name)!r} instead of {alone.texts.get(name)!r}"
        if set(self.numbers) != set(alone.numbers):
            return f"values of {sorted(self.numbers)} instead of {sorted(alone.numbers)}"
        for name, parts in alone.numbers.items():
            found, wanted = np.concatenate(self.numbers[name]), np.concatenate(parts)
            if found.shape != wanted.shape:
                return f"{name}: {found.size} values instead of {wanted.size}"
            is_rounded = wanted.dtype.kind == "f" and not exact
            tolerance = (SUMS if name.split()[0] in LATEST else NUMBERS) if is_rounded else 0.0
            if not np.allclose(found, wanted, rtol=0.0, atol=tolerance, equal_nan=True):
                return f"{name}: {found.tolist()[:20]} instead of {wanted.tolist()[:20]}"
        return ""

    def begins(self, alone: Answer) -> bool:
        """Whether the other answer goes on behind this one: text by text, tokens by tokens. One that is revised need
        not show."""
        if self.is_revised:
            return True
        texts = all(alone.texts.get(name, b"").startswith(text) for name, text in self.texts.items())
        return texts and all(
            np.array_equal(found, np.concatenate(alone.numbers[name])[: found.size])
            for name, parts in self.numbers.items()
            if name.startswith("output_ids") and (found := np.concatenate(parts)).size
        )

    def _same_text(self, alone: Answer, name: str) -> bool:
        return self.texts.get(name) == alone.texts.get(name)
