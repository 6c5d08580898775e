"""What a client wants of a model, in no dialect's words."""

from __future__ import annotations

from typing import Any

import msgspec

from inflight.asking.chat import Chat
from inflight.asking.guide import Guide
from inflight.asking.limit import Limit
from inflight.asking.show import Show
from inflight.asking.stop import Stop
from inflight.guided_decoding import WhiteSpace
from inflight.lora import LoRARequest
from inflight.sampling import Sampling
from inflight.sampling_config import SamplingConfig


class TextPair(msgspec.Struct, frozen=True):
    """Two texts that are read together: such as a question, and what may answer it."""

    first: str
    second: str


class Illustrated(msgspec.Struct, frozen=True):
    """A text with pictures, whose placeholders it has itself."""

    text: str
    files: list[bytes]
    """Of the pictures, in the order of their placeholders."""


Prompt = str | list[int] | TextPair | Illustrated


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    prompt: Chat | list[Prompt]
    """A conversation, or texts and rows of token ids that are continued each by itself, or read by an encoder."""
    adds_special_tokens: bool = True
    """To texts; a chat says it itself."""
    choices: int = 1
    """Of each prompt."""
    streaming: bool = False
    sampling: Sampling | SamplingConfig = Sampling()
    """A SamplingConfig is complete: the checkpoint's defaults have no say."""
    limit: Limit = Limit()
    stop: Stop = Stop()
    guide: Guide | None = None
    white_space: WhiteSpace | None = None
    """Between the parts of JSON; None = as the guide has it."""
    adapter: LoRARequest | None = None
    show: Show = Show()
    priority: float = 0.5
    """See Request."""
    cache_salt: str = ""
    bad_words: list[str] = []
    """Texts that must not occur, at the start of a text and after a space alike."""
    bad_word_ids: list[list[int]] = []
    """The same as rows of tokens."""
    further: dict[str, Any] = {}
    """Further fields of Request, which are the same in every dialect that has them."""
