"""What one HTTP request asks of the engine, ready to be sent, and all that its answer needs to know of it."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from inflight.asking.ask import Ask
from inflight.asking.chat import Chat
from inflight.asking.prepared import Prepared, PreparedPrompt
from inflight.asking.refusal import Words
from inflight.http.choice import Choice
from inflight.http.log_probs import LogProbWriter

MAX_NOTES = 16
"""Of what is not enforced that a header names."""
NOT_ENFORCED = b"inflight-guide-not-enforced"


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A chat completion, or a completion of several prompts."""

    ask: Ask
    prepared: Prepared
    words: Words = field(default_factory=dict)
    """What the body calls the fields of an `Ask`."""
    model: str
    """The name that the answer repeats."""
    includes_usage: bool = False
    """Whether a stream ends with its usage."""
    log_probs: LogProbWriter | None = None
    """None: the answer has none."""
    scores_only: bool = False
    """The engine has been asked for a token only to have the prompt's log probabilities: it is no part of the
    answer."""
    system_fingerprint: str = ""
    """Of what computes it; "" = not known."""
    id_prefix: str = ""
    """With which ids of this dialect's answers begin."""
    client_id: str = ""
    created: int = field(default_factory=lambda: int(time.time()))

    def choice(self, prompt: PreparedPrompt, index: int) -> Choice:
        """A fresh one of the prompt. `index`: in the answer."""
        stop, show = self.ask.stop, self.ask.show
        return Choice(
            index,
            prompt.make_detokenizer(),
            stop_ids=frozenset(stop.token_ids),
            keeps_stop=stop.is_kept,
            wants_log_probs=show.output.return_log_probs,
            keeps_ids=show.token_ids,
        )

    def param_of(self, sentence: str) -> str | None:
        """The field that an error of the engine is about; None if that is none, or not known."""
        field = self.prepared.refusal(sentence).field
        return self.words.get(field, field) or None

    def notes(self) -> dict[str, Any]:
        """Fields of the answer that are there only where they say something."""
        told = [{"pointer": pointer, "keyword": keyword} for pointer, keyword in self.prepared.not_enforced]
        return {"guide_not_enforced": told} if told else {}

    def headers(self) -> list[tuple[bytes, bytes]]:
        """The same as headers of the response: each pointer, as the fragment of a URI, with its keyword."""
        told = [f"#{quote(pointer)} {quote(keyword, safe='$')}" for pointer, keyword in self.prepared.not_enforced]
        shown = ", ".join(told[:MAX_NOTES]) + (", ..." if len(told) > MAX_NOTES else "")
        return [(NOT_ENFORCED, shown.encode())] if told else []

    @property
    def is_chat(self) -> bool:
        return isinstance(self.ask.prompt, Chat)

    @property
    def answer_id(self) -> str:
        return self.id_prefix + self.client_id

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(prompt.request.input_token_ids) for prompt in self.prepared.prompts)


def fresh_id() -> str:
    """Of a call that brings none."""
    return secrets.token_hex(16)
