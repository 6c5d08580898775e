"""What is sent to the engine for an `Ask`, and how its answer is read."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from inflight.asking.refusal import Refusal, field_of
from inflight.request import Request
from inflight.text.detokenizer import Detokenizer

if TYPE_CHECKING:  # see Served
    from inflight.asking.chat_format import ChatFormat


class PreparedPrompt(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt: one request to the engine."""

    request: Request
    make_detokenizer: Callable[[], Detokenizer]
    """Of one choice."""
    text: str = ""
    """The prompt's, where the answer shows it."""


class Prepared(msgspec.Struct, frozen=True, kw_only=True):
    prompts: list[PreparedPrompt]
    format: ChatFormat | None = None
    """How the text of a chat is read; None: all of it is content."""
    guide_field: str = ""
    """The field of the `Ask` that asks for a grammar; "" = none does."""
    not_enforced: tuple[tuple[str, str], ...] = ()
    """JSON pointer and keyword of what a schema says that is not strict, and its answer may not follow."""

    def refusal(self, sentence: str) -> Refusal:
        """Of a request by the engine."""
        return engines_refusal(sentence, self.guide_field)


def engines_refusal(sentence: str, guide_field: str = "") -> Refusal:
    """`guide_field`: see Prepared."""
    field = field_of(sentence)
    return Refusal(guide_field if field == "guide" else field, "{said}", said=sentence)
