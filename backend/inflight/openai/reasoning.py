"""Splits a choice's text into the model's reasoning and its answer while it arrives. It knows tags, and no tokens."""

from __future__ import annotations

from typing import NamedTuple

from inflight.errors import ConfigurationError
from inflight.openai.tools.tag_overlap import tag_overlap

WHITE_SPACE = " \t\n\r"
MAX_WHITE_SPACE_CHARS = 1024
"""White space before an opening tag that is held until it is known whether one follows."""


class ReasoningTags(NamedTuple):
    opening: str
    closing: str


REASONING_TAGS = {
    "deepseek_r1": ReasoningTags("<think>", "</think>"),
    "mistral": ReasoningTags("[THINK]", "[/THINK]"),
    "qwen3": ReasoningTags("<think>", "</think>"),
    "seed_oss": ReasoningTags("<seed:think>", "</seed:think>"),
}
"""By family. Mistral's are special tokens: the text has to be made with them."""


class ReasoningSplitter:
    """Reasoning ends at the first closing tag; without one, all of the text is reasoning.

    Tags are dropped, with the white space behind them. What looks like a tag anywhere else is text. The parts do not
    depend on how the text is cut into pieces. Nothing is held but what may be the beginning of a tag, and white space
    before one.
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
        """Whether the next piece of text may still be reasoning."""
        return self._is_reasoning or self._may_open

    @property
    def is_reasoning(self) -> bool:
        """Whether the text, as far as it came, ends within the reasoning."""
        return self._is_reasoning

    def feed(self, text: str) -> tuple[str, str]:
        """The text's next piece. Returns (reasoning, content) that are certain by now."""
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

    def finish(self) -> tuple[str, str]:
        """No more text comes. Returns (reasoning, content) that were held."""
        held, self._held = self._held, ""
        return (self._without_space(held), "") if self._is_reasoning else ("", self._without_space(held))

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


def reasoning_tags(family: str) -> ReasoningTags:
    """The tags of a family. Raises ConfigurationError if it is not known."""
    if family not in REASONING_TAGS:
        raise ConfigurationError(f"there is no reasoning parser {family}: choose one of {', '.join(REASONING_TAGS)}")
    return REASONING_TAGS[family]
