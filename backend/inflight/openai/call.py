"""What one HTTP request asks of the engine, ready to be sent, and all that its answer needs to know of it."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from inflight.openai.chat_format import ChatFormat
from inflight.openai.choice import Choice
from inflight.openai.log_probs import LogProbWriter
from inflight.openai.param_names import IN_PROMPT, ParamNames
from inflight.request import Request


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
    param_names: ParamNames = IN_PROMPT
    """The fields that errors of the engine are about."""
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
    client_id: str = ""
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def answer_id(self) -> str:
        return ("chatcmpl-" if self.is_chat else "cmpl-") + self.client_id

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(prompt.request.input_token_ids) for prompt in self.prompts)


def fresh_id() -> str:
    """Of a call that brings none."""
    return secrets.token_hex(16)
