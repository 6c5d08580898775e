"""Output of gpt-oss (OpenAI's harmony format): messages, each with a channel, which say what their text is.

    <|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>final<|message|>…<|return|>
    <|channel|>commentary to=functions.f <|constrain|>json<|message|>{…}<|call|>

The prompt ends behind the first `<|start|>assistant`. Models write headers in many ways: the recipient before or behind
the channel, the type of the content with or without a tag, or not at all.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial

from inflight.asking.tools.events import Content, Reasoning
from inflight.asking.tools.tag_overlap import tag_overlap
from inflight.guided_decoding import Reasoning as GuidedReasoning

START = "<|start|>assistant"
MESSAGE, END, CALL = "<|message|>", "<|end|>", "<|call|>"
ANALYSIS = f"<|channel|>analysis{MESSAGE}"
PREAMBLE = f"<|channel|>commentary{MESSAGE}"
FINAL = f"<|channel|>final{MESSAGE}"
BEFORE_NAME = "<|channel|>commentary to=functions."
BEHIND_NAME = f" <|constrain|>json{MESSAGE}"

TAGS = ("<|start|>", "<|channel|>", "<|constrain|>", MESSAGE, END, CALL, "<|return|>")
"""Special tokens of the checkpoint."""
ENDS = (END, CALL, "<|return|>")
"""Of a message."""
BOUNDS = (*ENDS, "<|start|>", "<|channel|>")
"""Behind a text, with the beginnings of another header where the end is missing."""
HEADERS = ("<|start|>", "<|channel|>", MESSAGE, "to=")
"""What a header may begin with, behind white space."""
MAX_HEADER_CHARS = 256
"""Of text that is held until it is known whether it is one."""
NEEDS_MORE = -1

_BOUND = re.compile("|".join(map(re.escape, BOUNDS)))
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=([\w.-]+)")
_FUNCTION = re.compile(r"functions\.([\w-]+)")

Part = Reasoning | Content


class ChannelSplitter:
    """The channel analysis is reasoning; final, and commentary without a recipient, are content. A message to
    functions.NAME is content with the header that the family's parser looks for, whatever its own header was. What goes
    to another recipient is reasoning: a tool that models know from their training and that is not here.

    Headers and ends are dropped, and a newline stands between two messages of the same kind. Text that is in no message
    is content. The parts do not depend on how the text is cut into pieces.
    """

    def __init__(self, begun: str = "") -> None:
        """`begun`: what the prompt holds of the message that the output continues, from its beginning on."""
        self._kind: type[Part] | None = None
        """Of the message that is open; None between messages and in a header."""
        self._is_call = self._is_final = False
        self._parts: list[Part] = []
        self._held = ""
        self._joint = ""
        self._had_text: set[type[Part]] = set()
        self.feed(begun.removeprefix(START))
        self._joint = ""
        self._had_text.clear()

    @property
    def may_reason(self) -> bool:
        """Whether the next piece of text may still be reasoning."""
        return not self._is_final

    @property
    def is_reasoning(self) -> bool:
        """Whether the text, as far as it came, ends within the reasoning."""
        return self._kind is Reasoning

    @property
    def is_in_text(self) -> bool:
        """Whether it ends within a message."""
        return self._kind is not None

    def feed(self, text: str) -> list[Part]:
        """The text's next piece. Returns what is certain by now, in its order."""
        text, position = self._held + text, 0
        while position < len(text):
            stop = self._read_header(text, position) if self._kind is None else self._read_text(text, position)
            if stop == NEEDS_MORE:
                break
            position = stop
        self._held = text[position:]
        return self._take()

    def finish(self) -> list[Part]:
        """No more text comes. Returns what was held; a header that is cut is dropped."""
        if self._kind is not None or not self._held.lstrip().startswith(HEADERS):
            self._add(self._held)
        self._held = ""
        return self._take()

    def _read_header(self, text: str, position: int) -> int:
        rest = text[position : position + MAX_HEADER_CHARS]
        begin = rest.lstrip()
        if begin.startswith(HEADERS) or any(header.startswith(begin) for header in HEADERS):
            length = rest.find(MESSAGE)
            if length >= 0:
                self._open(rest[:length])
                return position + length + len(MESSAGE)
            if len(rest) < MAX_HEADER_CHARS:
                return NEEDS_MORE
        self._kind = Content
        self._add(rest[0])
        return position + 1

    def _open(self, header: str) -> None:
        channel, recipient = "".join(_CHANNEL.findall(header)[-1:]), _RECIPIENT.search(header)
        function = _FUNCTION.fullmatch(recipient[1]) if recipient else None
        if function:
            self._kind, self._is_call = Content, True
            self._parts.append(Content(BEFORE_NAME + function[1] + BEHIND_NAME))
            return
        self._is_final = channel == "final"
        self._kind = Reasoning if channel == "analysis" or (recipient and not self._is_final) else Content
        self._joint = "\n" if self._kind in self._had_text else ""

    def _read_text(self, text: str, position: int) -> int:
        found = _BOUND.search(text, position)
        if found is None:
            stop = len(text) - max(tag_overlap(text, bound, position) for bound in BOUNDS)
            self._add(text[position:stop])
            return stop if stop > position else NEEDS_MORE
        self._add(text[position : found.start()])
        if self._is_call:
            self._parts.append(Content(CALL))
        self._kind, self._is_call, self._is_final = None, False, False
        return found.end() if found[0] in ENDS else found.start()

    def _add(self, text: str) -> None:
        if not text:
            return
        if self._is_call:
            self._parts.append(Content(text))
            return
        kind = self._kind or Content
        self._parts.append(kind(self._joint + text))
        self._joint = ""
        self._had_text.add(kind)

    def _take(self) -> list[Part]:
        """Neighbours of the same kind are one part."""
        taken: list[Part] = []
        for part in self._parts:
            if taken and type(taken[-1]) is type(part):
                taken[-1] = type(part)(taken[-1].text + part.text)
            else:
                taken.append(part)
        self._parts = []
        return taken


class Channels:
    """How gpt-oss marks its reasoning."""

    tags = TAGS

    def splitter_maker(self, prompt: str) -> Callable[[], ChannelSplitter]:
        """What makes the splitter of each choice. `prompt`: the text that the template has made."""
        return partial(ChannelSplitter, _begun(prompt))

    def thought(self, prompt: str, *, is_of_calls: bool) -> GuidedReasoning | None:
        """What a grammar has before the answer. `is_of_calls`: whether it is one of calls of tools, which has all
        messages."""
        if is_of_calls or ChannelSplitter(_begun(prompt)).is_in_text:
            return None
        return GuidedReasoning(opening=ANALYSIS, closing=END, behind=START, before_answer=FINAL, excludes=TAGS)


def _begun(prompt: str) -> str:
    """From where the last message begins."""
    place = prompt.rfind("<|start|>")
    return prompt[place:] if place >= 0 else ""
