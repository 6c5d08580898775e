"""Bodies as what their clients want of the model: each field read, with the bounds that OpenAI's API has besides the
engine's.

Unlike at tritonserver, a body that says nothing of sampling is sampled: with the temperature of generation_config.json,
else 1.
"""

from __future__ import annotations

from typing import Any

from inflight.asking.ask import Ask
from inflight.asking.chat import Chat
from inflight.asking.limit import Limit
from inflight.asking.refusal import Words
from inflight.asking.show import Show, output_config
from inflight.asking.stop import Stop
from inflight.asking.tool_choice import ToolChoice
from inflight.http.api_error import invalid
from inflight.http.dialects.body import read_seed
from inflight.http.dialects.messages import read_messages
from inflight.http.dialects.openai.bounded_fields import (
    allowed_alone,
    engine_priority,
    read_salt,
    read_stops,
    read_words,
)
from inflight.http.dialects.openai.fields import (
    AllowedToolChoice,
    Body,
    ChatBody,
    CompletionBody,
    NamedToolChoice,
    TextBody,
    TokenizeBody,
)
from inflight.http.dialects.openai.guides import Found, check_backend, read_guide, read_response_format
from inflight.http.dialects.openai.prompts import split_prompts
from inflight.lora import LoRARequest
from inflight.request_limits import RequestLimits
from inflight.sampling import Sampling

COMPLETION_TOKENS = 16
"""New tokens of a completion that does not say, as OpenAI has it. A chat takes the rest of the context."""
MAX_CHOICES = 128
NONE_OF_TOP_K = (-1, 0)

WORDS = {
    "choices": "n",
    "adapter": "model",
    "embedding_bias": "allowed_token_ids",
    "log_probs": "logprobs",
    "token_ids": "return_token_ids",
    "template_kwargs": "chat_template_kwargs",
    "shows_reasoning": "include_reasoning",
    "adds_generation_prompt": "add_generation_prompt",
    "continues_final_message": "continue_final_message",
    "tool_choice.allowed": "tool_choice.allowed_tools.tools",
}
"""What completions and chat completions call the fields of an `Ask`."""
OF_CHAT = {**WORDS, "prompt": "messages"}


def chat_ask(body: ChatBody, limits: RequestLimits, adapter: LoRARequest | None) -> tuple[Ask, Words]:
    """Raises APIError."""
    if body.top_logprobs and not body.logprobs:
        raise invalid("top_logprobs needs logprobs to be true", "top_logprobs")
    log_probs = body.top_logprobs or 0 if body.logprobs else None
    name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    if max_tokens is not None and max_tokens < 1:
        raise invalid(f"{name} must be at least 1, got {max_tokens}", name)
    return make_ask(
        body,
        limits,
        {**OF_CHAT, "max_tokens": name},
        read_response_format(body.response_format),
        prompt=chat_of(body),
        adapter=adapter,
        choices=_choices(body, limits),
        limit=_limit(body, max_tokens, None),
        stop=_stop(body),
        show=_show(body, log_probs, reasoning=body.include_reasoning is not False),
    )


def completion_ask(body: CompletionBody, limits: RequestLimits, adapter: LoRARequest | None) -> tuple[Ask, Words]:
    """Raises APIError."""
    if body.stream and body.echo and body.logprobs is not None:
        raise invalid("echo together with logprobs is answered as a whole: leave out stream", "stream")
    max_tokens = 1 if scores_only(body) else body.max_tokens
    if max_tokens is not None and max_tokens < 1:
        raise invalid(f"max_tokens must be at least 1 (or 0 with echo), got {max_tokens}", "max_tokens")
    return make_ask(
        body,
        limits,
        WORDS,
        read_response_format(body.response_format),
        prompt=split_prompts(body.prompt),
        adds_special_tokens=body.add_special_tokens is not False,
        adapter=adapter,
        choices=_choices(body, limits),
        limit=_limit(body, max_tokens, COMPLETION_TOKENS),
        stop=_stop(body),
        show=_show(body, body.logprobs, prompt=bool(body.echo)),
    )


def scores_only(body: CompletionBody) -> bool:
    """Whether a token is generated only to have the prompt's log probabilities."""
    return bool(body.echo) and body.max_tokens == 0


def chat_of(body: ChatBody | TokenizeBody) -> Chat:
    """Raises APIError."""
    choice, is_parallel = ToolChoice(), True
    if isinstance(body, ChatBody):
        is_parallel = body.parallel_tool_calls is not False
        choice = _tool_choice(body, is_parallel=is_parallel)
    return Chat(
        messages=read_messages(body.messages or []),
        tools=None if body.tools is None else [tool.function for tool in body.tools],
        tool_choice=choice,
        template_kwargs=body.chat_template_kwargs,
        reasoning_effort=body.reasoning_effort if isinstance(body, ChatBody) else None,
        adds_generation_prompt=body.add_generation_prompt,
        continues_final_message=bool(body.continue_final_message),
        adds_special_tokens=bool(body.add_special_tokens),
    )


def make_ask(
    body: TextBody, limits: RequestLimits, words: Words, answer: Found | None, **own: Any
) -> tuple[Ask, Words]:
    """What every body may set, and the `own` fields of one; with the words for what is refused. `answer`: what the body
    says of the form of the answer. Raises APIError."""
    check_backend(body, limits.guided_decoding_backend)
    guide, white_space, of_guide = read_guide(body, answer)
    ask = Ask(
        streaming=bool(body.stream),
        sampling=_sampling(body, limits.vocab_size),
        guide=guide,
        white_space=white_space,
        priority=engine_priority(body.priority),
        cache_salt=read_salt(body.cache_salt),
        bad_words=read_words(body.bad_words),
        **own,
    )
    return ask, {**words, **of_guide}


def _sampling(body: TextBody, vocab_size: int) -> Sampling:
    if body.top_p is not None and not 0 < body.top_p <= 1:
        raise invalid(f"top_p must be above 0 and at most 1, got {body.top_p}", "top_p")
    try:
        logit_bias = {int(token): bias for token, bias in (body.logit_bias or {}).items()}
    except ValueError:
        raise invalid("the keys of logit_bias must be token ids", "logit_bias") from None
    return Sampling(
        is_random=True,
        temperature=body.temperature,
        top_k=0 if body.top_k in NONE_OF_TOP_K else body.top_k,
        top_p=body.top_p,
        min_p=body.min_p,
        seed=read_seed(body.seed),
        repetition_penalty=body.repetition_penalty,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        min_tokens=body.min_tokens,
        logit_bias=logit_bias,
        embedding_bias=allowed_alone(body.allowed_token_ids, vocab_size),
    )


def _tool_choice(body: ChatBody, *, is_parallel: bool) -> ToolChoice:
    given = body.tool_choice
    if isinstance(given, NamedToolChoice):
        return ToolChoice(mode="required", name=given.function.name, is_parallel=is_parallel)
    if isinstance(given, AllowedToolChoice):
        names = [each.function.name for each in given.allowed_tools.tools]
        return ToolChoice(mode=given.allowed_tools.mode, allowed=names, is_parallel=is_parallel)
    return ToolChoice(mode=given or "", is_parallel=is_parallel)


def _choices(body: Body, limits: RequestLimits) -> int:
    most = min(limits.max_batch_size, MAX_CHOICES)
    if body.n is not None and not 1 <= body.n <= most:
        raise invalid(f"n must be between 1 and {most}, got {body.n}", "n")
    return body.n or 1


def _limit(body: Body, max_tokens: int | None, default: int | None) -> Limit:
    return Limit(
        max_tokens=max_tokens,
        default=default,
        truncate_prompt_tokens=body.truncate_prompt_tokens,
        allotted_time_ms=body.allotted_time_ms,
    )


def _stop(body: Body) -> Stop:
    return Stop(
        texts=read_stops(body),
        token_ids=body.stop_token_ids or (),
        ends_by_itself=not body.ignore_eos,
        is_kept=bool(body.include_stop_str_in_output),
    )


def _show(body: Body, log_probs: int | None, *, prompt: bool = False, reasoning: bool = True) -> Show:
    """`log_probs`: how many of the likeliest tokens have some beside each; None = none has."""
    return Show(
        output=output_config(log_probs, of_prompt=prompt),
        prompt=prompt,
        token_ids=bool(body.return_token_ids),
        special_tokens=body.skip_special_tokens is False,
        reasoning=reasoning,
    )
