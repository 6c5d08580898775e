"""Splits a choice's text into the model's reasoning and its answer while it arrives. It knows tags, and no tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple, Protocol

from inflight.asking.tools.channels import Channels
from inflight.asking.tools.events import Content, Reasoning
from inflight.asking.tools.tag_overlap import tag_overlap
from inflight.errors import ConfigurationError
from inflight.guided_decoding import Reasoning as GuidedReasoning

WHITE_SPACE = " \t\n\r"
MAX_WHITE_SPACE_CHARS = 1024
"""White space before an opening tag that is held until it is known whether one follows."""


class Splitter(Protocol):
    """Of one choice. The parts do not depend on how the text is cut into pieces."""

    @property
    def may_reason(self) -> bool:
        """Whether the next piece of text may still be reasoning."""

    @property
    def is_reasoning(self) -> bool:
        """Whether the text, as far as it came, ends within the reasoning."""

    def feed(self, text: str) -> list[Reasoning | Content]:
        """The text's next piece. Returns what is certain by now, in its order; no part is empty."""

    def finish(self) -> list[Reasoning | Content]:
        """No more text comes. Returns what was held."""


class ReasoningStyle(Protocol):
    """How a family marks its reasoning. `prompt`: the text that the chat template has made."""

    @property
    def tags(self) -> Iterable[str]:
        """All that may be special tokens: the text has to be made with them."""

    def splitter_maker(self, prompt: str) -> Callable[[], Splitter]:
        """What makes the splitter of each choice."""

    def thought(self, prompt: str, *, is_of_calls: bool) -> GuidedReasoning | None:
        """What may stand before an answer that follows a grammar; None = nothing. `is_of_calls`: whether the grammar is
        one of calls of tools."""


class ReasoningTags(NamedTuple):
    """Of reasoning that is the beginning of the text."""

    opening: str
    closing: str
    token: str = ""
    """Special token that the opening tag begins with, where there is more of it."""

    @property
    def tags(self) -> Iterable[str]:
        return filter(None, self)

    def splitter_maker(self, prompt: str) -> Callable[[], Splitter]:
        return partial(ReasoningSplitter, starts_in_reasoning=prompt.rstrip().endswith(self.opening), tags=self)

    def thought(self, prompt: str, *, is_of_calls: bool) -> GuidedReasoning | None:
        """None if the prompt says that the model has thought."""
        prompt = prompt.rstrip()
        if prompt.endswith(self.closing):
            return None
        return GuidedReasoning(opening=self.opening, closing=self.closing, is_open=prompt.endswith(self.opening))


REASONING_TAGS = {
    "deepseek_r1": ReasoningTags("<think>", "</think>"),
    "gemma4": ReasoningTags("<|channel>thought", "<channel|>", token="<|channel>"),
    "mistral": ReasoningTags("[THINK]", "[/THINK]"),
    "qwen3": ReasoningTags("<think>", "</think>"),
    "seed_oss": ReasoningTags("<seed:think>", "</seed:think>"),
}
"""By family. Gemma's and Mistral's are special tokens."""
REASONING_STYLES: dict[str, ReasoningStyle] = {**REASONING_TAGS, "harmony": Channels()}
"""Of all families."""


class ReasoningSplitter:
    """Reasoning ends at the first closing tag; without one, all of the text is reasoning.

    Tags are dropped, with the white space behind them. What looks like a tag anywhere else is text. Nothing is held but
    what may be the beginning of a tag, and white space before one.
    """

    def __init__(self, *, starts_in_reasoning: bool, tags: ReasoningTags = REASONING_TAGS["qwen3"]) -> None:
        """`starts_in_reasoning`: whether the text begins within the reasoning, as when the prompt ends with the opening
        tag; a model may write the tag nevertheless. Otherwise there is reasoning only if the text begins with it."""
        self._tags = tags
        self._is_reasoning = starts_in_reasoning
        self._may_open = True  # only white space was read
        self._drops_space = False  # only white space was read behind a tag
        self._held = ""

    @property
    def may_reason(self) -> bool:
        return self._is_reasoning or self._may_open

    @property
    def is_reasoning(self) -> bool:
        return self._is_reasoning

    def feed(self, text: str) -> list[Reasoning | Content]:
        return _parts(*self._split(text))

    def finish(self) -> list[Reasoning | Content]:
        held, self._held = self._held, ""
        text = self._without_space(held)
        return _parts(text, "") if self._is_reasoning else _parts("", text)

    def _split(self, text: str) -> tuple[str, str]:
        """Reasoning and content that are certain by now."""
        text, self._held = self._held + text, ""
        if self._may_open:
            text = self._open(text)
        if not self._is_reasoning:
            return "", self._without_space(text)
        closing = self._tags.closing
        found = text.find(closing)
        if found >= 0:
            reasoning = self._without_space(text[:found])
            self._is_reasoning, self._drops_space = False, True
            return reasoning, self._without_space(text[found + len(closing) :])
        certain = len(text) - tag_overlap(text, closing)
        self._held += text[certain:]
        return self._without_space(text[:certain]), ""

    def _open(self, text: str) -> str:
        """Returns `text` behind the opening tag; "" while it is not certain whether one follows, and `text` if none
        does."""
        opening = self._tags.opening
        begin = text.lstrip(WHITE_SPACE)
        num_spaces = len(text) - len(begin)
        if num_spaces <= MAX_WHITE_SPACE_CHARS:
            if begin.startswith(opening):
                self._may_open, self._is_reasoning, self._drops_space = False, True, True
                return begin[len(opening) :]
            if opening.startswith(begin):
                self._held = text
                return ""
        self._may_open = False
        return text

    def _without_space(self, text: str) -> str:
        if self._drops_space:
            text = text.lstrip(WHITE_SPACE)
            self._drops_space = not text
        return text


def reasoning_style(family: str) -> ReasoningStyle:
    """Of a family. Raises ConfigurationError if it is not known."""
    if family not in REASONING_STYLES:
        raise ConfigurationError(f"there is no reasoning parser {family}: choose one of {', '.join(REASONING_STYLES)}")
    return REASONING_STYLES[family]


def _parts(reasoning: str, content: str) -> list[Reasoning | Content]:
    parts = (Reasoning(reasoning), Content(content))
    return [part for part in parts if part.text]
