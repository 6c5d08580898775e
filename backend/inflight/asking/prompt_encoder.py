"""What is to be continued, as tokens: texts, and conversations that the checkpoint's chat template makes one text of.

All the work that grows with a prompt's text is done here.
"""

from __future__ import annotations

from inflight.asking.ask import Prompt
from inflight.asking.chat import Chat
from inflight.asking.chat_template import ChatTemplate
from inflight.asking.refusal import Kind, Refusal, context_too_long, unsupported
from inflight.asking.tools.tool import definitions
from inflight.request_limits import RequestLimits
from inflight.text.tokenizer import Tokenizer

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
"""Values of reasoning_effort: which of them a model knows, its chat template decides."""


class PromptEncoder:
    """Safe to use from several threads."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        *,
        max_text_bytes: int,
        template_kwargs: frozenset[str] = frozenset(),
    ) -> None:
        """`template`: None if the checkpoint has none. `template_kwargs`: what requests may set."""
        self._tokenizer = tokenizer
        self._template = template
        self._max_text_bytes = max_text_bytes
        self._template_kwargs = template_kwargs

    @property
    def knows_tools(self) -> bool:
        """Whether the chat template tells the model which tools there are."""
        return self._template is not None and self._template.knows_tools

    @property
    def tool_families(self) -> list[str]:
        """Families whose calls the chat template writes: one if that is certain."""
        return [] if self._template is None else self._template.tool_families

    def encode(self, prompt: Prompt, limits: RequestLimits, *, add_special_tokens: bool = True) -> list[int]:
        """Raises Refusal: a text that cannot fit is refused before it is tokenised, which would take long."""
        if not isinstance(prompt, str):
            return prompt
        if not prompt:
            raise Refusal("prompt", "{0} is empty: give at least one character or token")
        self._check_length(prompt, limits)
        encode = self._tokenizer.encode if add_special_tokens else self._tokenizer.encode_plain
        return encode(prompt)

    def encode_chat(self, chat: Chat, limits: RequestLimits) -> tuple[str, list[int]]:
        """The text that the chat template makes of it, and its tokens. Raises Refusal."""
        text = self.render(chat)
        return text, self.encode(text, limits, add_special_tokens=chat.adds_special_tokens)

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
        begins_answer = chat.adds_generation_prompt
        if chat.continues_final_message and begins_answer:
            raise Refusal("continues_final_message", "{0} needs {1} to be false", "adds_generation_prompt")
        messages = chat.messages
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

    def _check_length(self, text: str, limits: RequestLimits) -> None:
        num_bytes = len(text.encode("utf-8", "surrogatepass"))
        if num_bytes > self._max_text_bytes:
            sentence = f"the prompt has {num_bytes} bytes, more than max_text_bytes {self._max_text_bytes}"
            raise Refusal("prompt", sentence, kind=Kind.TOO_LARGE)
        most = self._tokenizer.max_bytes_per_token
        if most is not None and num_bytes > most * limits.max_input_len:
            raise context_too_long(limits.max_seq_len, -(-num_bytes // most))
