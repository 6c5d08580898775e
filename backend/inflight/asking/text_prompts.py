"""What an embedding model wants before a text, by name: sentence-transformers calls these texts prompts.

Many such models were trained with one text before each query and another before each passage, and their checkpoints say
which. A request chooses one by its name there, or by what its texts are. Knows no files and no tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from inflight.asking.ask import Prompt
from inflight.asking.limit import Limit
from inflight.asking.refusal import Kind, Refusal
from inflight.request_limits import RequestLimits
from inflight.text.safe_text import safe_text

QUERY = ("query",)
DOCUMENT = ("document", "passage", "corpus")
"""In the order in which sentence-transformers' encode_document looks for them."""
CLASSIFICATION = ("classification", "Classification")
CLUSTERING = ("clustering", "Clustering")
"""EmbeddingGemma and nomic-embed-text-v2 write names of tasks with a capital."""
INPUT_TYPES: Mapping[str, tuple[str, ...]] = {
    "query": QUERY,
    "search_query": QUERY,
    "passage": DOCUMENT,
    "document": DOCUMENT,
    "search_document": DOCUMENT,
    "classification": CLASSIFICATION,
    "clustering": CLUSTERING,
}
"""What texts are, in the words of NVIDIA's NIMs, Cohere and Voyage -> names that the prompt for them has in
checkpoints; the first counts that there is."""


class ChosenPrompt(msgspec.Struct, frozen=True):
    """What stands before all texts of a request."""

    text: str = ""
    field: str = ""
    """Of the request, which chose it; "" = it is the model's default."""
    counts: bool = True
    """Whether vectors are made of its tokens, too."""

    def put_before(self, prompts: list[Prompt]) -> list[Prompt]:
        """Rows of token ids stay as they are. Raises Refusal if there are such and the request chose a prompt."""
        if not self.text:
            return prompts
        if self.field and not all(isinstance(each, str) for each in prompts):
            raise Refusal(self.field, "{0} is for texts: {1} holds token ids, which are computed as they are", "prompt")
        return [self.text + each if isinstance(each, str) else each for each in prompts]


class TextPrompts(msgspec.Struct, frozen=True, kw_only=True):
    """Those of one model."""

    by_name: dict[str, str] = {}
    default_name: str | None = None
    """Of the one that stands before the texts of who chooses none; None = nothing does."""
    are_pooled: bool = True
    """Whether vectors are made of the prompts' tokens, too."""

    def chosen(self, name: str | None = None, input_type: str | None = None) -> ChosenPrompt:
        """`name`: a prompt's. `input_type`: one of INPUT_TYPES; it has no effect if the model has no prompts, and where
        it has none for queries or for documents these have the default one. Raises Refusal."""
        if name is not None and input_type is not None:
            raise Refusal("prompt_name", "{0} and {1} both choose a prompt: give one of them", "input_type")
        if name is not None:
            return self._named((name,), "prompt_name", name)
        if input_type is not None and input_type not in INPUT_TYPES:
            known, given = ", ".join(INPUT_TYPES), safe_text(input_type)
            raise Refusal("input_type", "{0} must be one of {known}, got {given}", known=known, given=given)
        names = INPUT_TYPES.get(input_type or "", ())
        if not names or not self.by_name or (names in (QUERY, DOCUMENT) and self._first(names) is None):
            return ChosenPrompt(self._default(), counts=self.are_pooled)
        return self._named(names, "input_type", input_type or "")

    def of_pairs(self) -> tuple[str, str]:
        """What stands before a question, and before what may answer it, as sentence-transformers' encode_query and
        encode_document have it."""
        found = [self._first(names) for names in (QUERY, DOCUMENT)]
        question, answer = (self._default() if name is None else self.by_name[name] for name in found)
        return question, answer

    def _named(self, names: Sequence[str], field: str, given: str) -> ChosenPrompt:
        name = self._first(names)
        if name is None:
            known = safe_text(", ".join(self.by_name)) or "none"
            sentence = "{0} is {given}, and this model has no such prompt: it has {known}"
            raise Refusal(field, sentence, given=safe_text(given), known=known)
        return ChosenPrompt(self.by_name[name], field, counts=self.are_pooled)

    def _first(self, names: Sequence[str]) -> str | None:
        return next((name for name in names if name in self.by_name), None)

    def _default(self) -> str:
        return "" if self.default_name is None else self.by_name[self.default_name]


NO_PROMPTS = TextPrompts()
"""Those of most models."""


def check_kept(before: str, limit: Limit, limits: RequestLimits) -> None:
    """Raise Refusal if what stands before a text might be cut off: of one that is too long an encoder keeps the
    beginning, and any other network the end."""
    if before and limit.truncate_prompt_tokens is not None and not limits.pooled:
        raise Refusal(
            "truncate_prompt_tokens",
            "{0} is not supported here: this model keeps the end of a text that is too long, without the prompt that "
            "stands before it",
            kind=Kind.UNSUPPORTED,
        )
