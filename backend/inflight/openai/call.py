"""What one HTTP request asks of the engine, ready to be sent, and all that its answer needs to know of it."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from inflight.asking.chat_format import ChatFormat
from inflight.openai.choice import Choice
from inflight.openai.log_probs import LogProbWriter
from inflight.request import Request

MAX_NOTES = 16
"""Of what is not enforced that a header names."""
NOT_ENFORCED = b"inflight-guide-not-enforced"


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptCall:
    """One prompt of a call: one request to the engine."""

    request: Request
    make_choice: Callable[[int], Choice]
    """Of the index that the choice has in the answer."""
    echo: str = ""
    """The text that stands before the output."""
    echoes_log_probs: bool = False
    """Whether the prompt's log probabilities do, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A chat completion, or a completion of several prompts."""

    is_chat: bool
    model: str
    """The name that the answer repeats."""
    prompts: list[PromptCall]
    num_choices: int
    """Of each prompt."""
    param_of: Callable[[str], str | None] = lambda sentence: None
    """The field that an error of the engine is about, by its sentence."""
    is_streamed: bool = False
    includes_usage: bool = False
    """Whether a stream ends with its usage."""
    chat_format: ChatFormat | None = None
    """How the text of a chat is read; None: all of it is content."""
    log_probs: LogProbWriter | None = None
    """None: the answer has none."""
    returns_token_ids: bool = False
    scores_only: bool = False
    """The engine has been asked for a token only to have the prompt's log probabilities: it is no part of the
    answer."""
    system_fingerprint: str = ""
    """Of what computes it; "" = not known."""
    not_enforced: tuple[tuple[str, str], ...] = ()
    """JSON pointer and keyword of what a schema says that is not strict, and its answer may not follow."""
    client_id: str = ""
    created: int = field(default_factory=lambda: int(time.time()))

    def notes(self) -> dict[str, Any]:
        """Fields of the answer that are there only where they say something."""
        told = [{"pointer": pointer, "keyword": keyword} for pointer, keyword in self.not_enforced]
        return {"guide_not_enforced": told} if told else {}

    def headers(self) -> list[tuple[bytes, bytes]]:
        """The same as headers of the response: each pointer, as the fragment of a URI, with its keyword."""
        told = [f"#{quote(pointer)} {quote(keyword, safe='$')}" for pointer, keyword in self.not_enforced]
        shown = ", ".join(told[:MAX_NOTES]) + (", ..." if len(told) > MAX_NOTES else "")
        return [(NOT_ENFORCED, shown.encode())] if told else []

    @property
    def answer_id(self) -> str:
        return ("chatcmpl-" if self.is_chat else "cmpl-") + self.client_id

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(prompt.request.input_token_ids) for prompt in self.prompts)


def fresh_id() -> str:
    """Of a call that brings none."""
    return secrets.token_hex(16)
