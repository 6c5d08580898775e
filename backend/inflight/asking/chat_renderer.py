"""Conversations as the text that the checkpoint's chat template makes of them."""

from __future__ import annotations

from inflight.asking.chat import Chat
from inflight.asking.chat_template import THINKING, ChatTemplate
from inflight.asking.images import without_files
from inflight.asking.refusal import Refusal, unsupported
from inflight.asking.tools.tool import definitions

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
"""Values of reasoning_effort: which of them a model knows, its chat template decides."""


class ChatRenderer:
    """Safe to use from several threads."""

    def __init__(self, template: ChatTemplate | None, template_kwargs: frozenset[str] = frozenset()) -> None:
        """`template`: None if the checkpoint has none. `template_kwargs`: what requests may set."""
        self._template = template
        self._template_kwargs = template_kwargs

    @property
    def knows_tools(self) -> bool:
        """Whether the chat template tells the model which tools there are."""
        return self._template is not None and self._template.knows_tools

    @property
    def source(self) -> str:
        """The chat template's text; "" = there is none."""
        return "" if self._template is None else self._template.source

    @property
    def knows_effort(self) -> bool:
        """Whether the chat template tells the model how much to think."""
        return self._template is not None and self._template.knows_effort

    @property
    def tool_families(self) -> list[str]:
        """Families whose calls the chat template writes: one if that is certain."""
        return [] if self._template is None else self._template.tool_families

    def render(self, chat: Chat) -> str:
        """Raises Refusal."""
        template, kwargs = self._template, {**(chat.template_kwargs or {})}
        if template is None:
            raise Refusal("prompt", "this checkpoint has no chat template: use /v1/completions")
        if not kwargs.keys() <= self._template_kwargs:
            allowed = ", ".join(sorted(self._template_kwargs)) or "none"
            sentence = "{0} may not set this name; the operator allows: {allowed}"
            raise Refusal("template_kwargs", sentence, allowed=allowed)
        if chat.reasoning_effort is not None:
            kwargs["reasoning_effort"] = self._effort(template, chat.reasoning_effort)
        if chat.thinks is not None and template.knows_thinking:
            kwargs[THINKING] = chat.thinks
        begins_answer = chat.adds_generation_prompt
        if chat.continues_final_message and begins_answer:
            raise Refusal("continues_final_message", "{0} needs {1} to be false", "adds_generation_prompt")
        messages = without_files(chat.messages)
        if not template.knows_developer:
            messages = [{**each, "role": "system"} if each["role"] == "developer" else each for each in messages]
        return template.render(
            messages,
            add_generation_prompt=not chat.continues_final_message if begins_answer is None else begins_answer,
            continue_final_message=chat.continues_final_message,
            **{**kwargs, "tools": definitions(chat.tools) if chat.tools else None},
        )

    @staticmethod
    def _effort(template: ChatTemplate, asked: str) -> str:
        if asked not in EFFORTS:
            raise Refusal("reasoning_effort", "{0} must be one of {efforts}", efforts=", ".join(EFFORTS))
        if not template.knows_effort:
            sentence = "the checkpoint's chat template does not know it: set what it knows in chat_template_kwargs"
            raise unsupported("reasoning_effort", sentence)
        return asked
