"""What a body gives to continue, as tokens. All the work that grows with its text is done here.

A prompt is text or token ids, or messages that the checkpoint's chat template makes one text of.
"""

from __future__ import annotations

from typing import Any

from inflight.openai.api_error import APIError, context_too_long, invalid, unsupported
from inflight.openai.chat_template import ChatTemplate
from inflight.openai.messages import read_messages
from inflight.request_limits import RequestLimits
from inflight.text.tokenizer import Tokenizer

MAX_PROMPTS = 1024
"""Of one body."""
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
"""Values of reasoning_effort: which of them a model knows, its chat template decides."""

Prompt = str | list[int]


def split_prompts(given: str | list[str | int | list[int]], field: str = "prompt") -> list[Prompt]:
    """The prompts of a body: one text, one row of token ids, or a list of either. `field`: where they stand. Raises
    APIError."""
    if isinstance(given, str):
        return [given]
    if not given:
        raise invalid(f"{field} is empty: give at least one character or token", field)
    if all(isinstance(each, int) for each in given):
        return [[each for each in given if isinstance(each, int)]]
    prompts = [each for each in given if isinstance(each, str | list)]
    if len({type(each) for each in given}) > 1 or len(prompts) < len(given):
        raise invalid(f"{field} must be a text, a list of texts, a list of token ids or a list of such lists", field)
    if len(prompts) > MAX_PROMPTS:
        raise invalid(f"{field} has {len(prompts)} entries, more than {MAX_PROMPTS}", field)
    return prompts


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

    def encode(
        self, prompt: Prompt, limits: RequestLimits, *, add_special_tokens: bool = True, field: str = "prompt"
    ) -> list[int]:
        """`field`: where the prompt stands. Raises APIError: a text that cannot fit is refused before it is tokenised,
        which would take long."""
        if not isinstance(prompt, str):
            return prompt
        if not prompt:
            raise invalid(f"{field} is empty: give at least one character or token", field)
        self._check_length(prompt, limits, field)
        encode = self._tokenizer.encode if add_special_tokens else self._tokenizer.encode_plain
        return encode(prompt)

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool | None = None,
        tools: list[dict[str, Any]] | None = None,
        kwargs: dict[str, Any] | None = None,
        reasoning_effort: str | None = None,
    ) -> str:
        """The text that the chat template makes of a conversation. `tools`: in OpenAI's form. Raises APIError."""
        if self._template is None:
            raise invalid("this checkpoint has no chat template: use /v1/completions", "messages")
        for name in kwargs or ():
            if name not in self._template_kwargs:
                allowed = ", ".join(sorted(self._template_kwargs)) or "none"
                raise invalid(
                    f"chat_template_kwargs may not set this name; the operator allows: {allowed}",
                    "chat_template_kwargs",
                )
        if reasoning_effort is not None:
            kwargs = {**(kwargs or {}), "reasoning_effort": self._effort(self._template, reasoning_effort)}
        if continue_final_message and add_generation_prompt:
            raise invalid("continue_final_message needs add_generation_prompt to be false", "continue_final_message")
        return self._template.render(
            read_messages(messages, knows_developer=self._template.knows_developer),
            add_generation_prompt=not continue_final_message
            if add_generation_prompt is None
            else add_generation_prompt,
            continue_final_message=bool(continue_final_message),
            **{**(kwargs or {}), "tools": tools},
        )

    @staticmethod
    def _effort(template: ChatTemplate, asked: str) -> str:
        if asked not in EFFORTS:
            raise invalid(f"reasoning_effort must be one of {', '.join(EFFORTS)}", "reasoning_effort")
        if not template.knows_effort:
            sentence = "the checkpoint's chat template does not know it: set what it knows in chat_template_kwargs"
            raise unsupported("reasoning_effort", sentence)
        return asked

    def _check_length(self, text: str, limits: RequestLimits, field: str) -> None:
        num_bytes = len(text.encode("utf-8", "surrogatepass"))
        if num_bytes > self._max_text_bytes:
            sentence = f"the prompt has {num_bytes} bytes, more than max_text_bytes {self._max_text_bytes}"
            raise APIError(413, sentence, param=field)
        most = self._tokenizer.max_bytes_per_token
        if most is not None and num_bytes > most * limits.max_input_len:
            raise context_too_long(limits.max_seq_len, -(-num_bytes // most), field)
