"""An answer that is sent when it is complete: one JSON object."""

from __future__ import annotations

from typing import Any

from inflight.http.call import Call
from inflight.http.choice import Choice
from inflight.http.dialects.openai.deltas import ChatMessage
from inflight.http.generation import Generation, News


class WholeAnswer:
    """Collects the text of all choices of a call."""

    def __init__(self, call: Call, generation: Generation) -> None:
        self._call, self._generation = call, generation
        self._texts: dict[int, list[str]] = {choice.index: [] for choice in generation.choices}

    def add(self, news: News) -> None:
        for choice, text in news.items():
            self._texts[choice.index].append(text)

    def fields(self) -> dict[str, Any]:
        """The whole, once all choices have ended."""
        call = self._call
        make = self._chat_choice if call.is_chat else self._completion_choice
        return {
            "id": call.answer_id,
            "object": "chat.completion" if call.is_chat else "text_completion",
            "created": call.created,
            "model": call.model,
            "system_fingerprint": call.system_fingerprint or None,
            **call.notes(),
            "choices": [make(choice) for choice in self._generation.choices],
            "usage": usage(call, self._generation),
        }

    def _chat_choice(self, choice: Choice) -> dict[str, Any]:
        message, writer = ChatMessage(self._call.prepared.format), self._call.log_probs
        for text in self._texts[choice.index]:
            message.feed(text)
        fields, reason = message.finish(choice.finish_reason)
        return {
            "index": choice.index,
            "message": fields,
            "logprobs": None if writer is None else writer.of_chat(choice.take_log_probs()),
            **self._end(choice, reason),
        }

    def _completion_choice(self, choice: Choice) -> dict[str, Any]:
        call, number = self._call, choice.index // self._call.ask.choices
        prompt = call.prepared.prompts[number]
        text = "" if call.scores_only else "".join(self._texts[choice.index])
        log_probs = None
        if call.log_probs is not None:
            own = [] if call.scores_only else choice.take_log_probs()
            log_probs = call.log_probs.of_completion([*self._generation.prompt_log_probs.get(number, []), *own], 0)
        return {
            "index": choice.index,
            "text": prompt.text + text,
            "logprobs": log_probs,
            **self._end(choice, choice.finish_reason),
        }

    def _end(self, choice: Choice, reason: str) -> dict[str, Any]:
        fields: dict[str, Any] = {"finish_reason": reason, "stop_reason": choice.stop_reason}
        if self._call.ask.show.token_ids:
            prompt = self._call.prepared.prompts[choice.index // self._call.ask.choices]
            fields |= {"token_ids": choice.take_token_ids(), "prompt_token_ids": prompt.request.input_token_ids}
        return fields


def usage(call: Call, generation: Generation) -> dict[str, Any]:
    """The tokens of all prompts and of all choices."""
    num_prompt, num_new = call.num_prompt_tokens, generation.num_tokens
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_new,
        "total_tokens": num_prompt + num_new,
        "prompt_tokens_details": {"cached_tokens": generation.num_cached_tokens},
    }
