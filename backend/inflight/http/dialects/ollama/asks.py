"""Bodies of Ollama's API as what their clients want of the model."""

from __future__ import annotations

from typing import Any

from inflight.asking.ask import Ask, Prompt
from inflight.asking.chat import Chat
from inflight.asking.chats import Chats
from inflight.asking.guide import Guide, object_guide, schema_guide
from inflight.asking.limit import Limit
from inflight.asking.show import Show, output_config
from inflight.asking.stop import Stop
from inflight.http.api_error import invalid, unsupported
from inflight.http.dialects.body import read_seed
from inflight.http.dialects.image_urls import url_part
from inflight.http.dialects.messages import read_messages
from inflight.http.dialects.ollama.fields import (
    Body,
    ChatBody,
    GenerateBody,
    Options,
    check_body,
    read_options,
)
from inflight.lora import LoRARequest
from inflight.sampling import Sampling

MAX_STOPS, MAX_STOP_CHARS = 16, 1024
WORDS = {
    "adapter": "model",
    "guide": "format",
    "max_tokens": "options.num_predict",
    "reasoning_effort": "think",
    "shows_reasoning": "think",
    "log_probs": "logprobs",
    "repetition_penalty": "options.repeat_penalty",
    **{
        name: f"options.{name}"
        for name in ("temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty")
    },
}
"""Field of an `Ask` -> where a body has it."""
OF_CHAT = {**WORDS, "prompt": "messages"}


def chat_ask(body: ChatBody, chats: Chats, adapter: LoRARequest | None) -> Ask:
    """Raises APIError."""
    tools = None if not body.tools else [tool.function for tool in body.tools]
    return _ask(body, _chat(body, chats, _messages(body.messages or []), tools=tools), chats, adapter)


def generate_ask(body: GenerateBody, chats: Chats, adapter: LoRARequest | None) -> Ask:
    """Raises APIError."""
    text = body.prompt or ""
    if body.raw:
        if body.images:
            raise unsupported("images", "with raw true the prompt has no place for them")
        return _ask(body, [text], chats, adapter)
    system = [{"role": "system", "content": body.system}] if body.system else []
    messages = read_messages([*system, {"role": "user", "content": _with_images(text, body.images, "images")}])
    return _ask(body, _chat(body, chats, messages), chats, adapter)


def _ask(body: Body, prompt: Chat | list[Prompt], chats: Chats, adapter: LoRARequest | None) -> Ask:
    check_body(body)
    options = read_options(body.options)
    hides = body.think is False and chats.splits_reasoning
    num_predict = options.num_predict
    if num_predict is not None and num_predict < 1 and num_predict not in (-1, -2):
        raise invalid(f"options.num_predict must be at least 1, or -1, got {num_predict}", "options.num_predict")
    return Ask(
        prompt=prompt,
        streaming=body.stream is not False,
        sampling=_sampling(options),
        # What does not fit into the context is no error, as at Ollama.
        limit=Limit(default=num_predict if num_predict is not None and num_predict > 0 else None),
        stop=Stop(texts=_stops(options)),
        guide=_guide(body.format),
        adapter=adapter,
        show=Show(output=output_config(body.top_logprobs or 0 if body.logprobs else None), reasoning=not hides),
    )


def _chat(body: Body, chats: Chats, messages: list[dict[str, Any]], *, tools: Any = None) -> Chat:
    return Chat(
        messages=messages,
        tools=tools,
        thinks=None if body.think is None else bool(body.think),
        reasoning_effort=body.think if isinstance(body.think, str) and chats.knows_effort else None,
    )


def _sampling(options: Options) -> Sampling:
    return Sampling(
        is_random=True,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        min_p=options.min_p,
        typical_p=options.typical_p,
        seed=read_seed(options.seed),
        repetition_penalty=options.repeat_penalty,
        presence_penalty=options.presence_penalty,
        frequency_penalty=options.frequency_penalty,
    )


def _stops(options: Options) -> list[str]:
    stops = [options.stop] if isinstance(options.stop, str) else options.stop or []
    if len(stops) > MAX_STOPS or not all(0 < len(stop) <= MAX_STOP_CHARS for stop in stops):
        sentence = f"options.stop may have {MAX_STOPS} entries of 1 to {MAX_STOP_CHARS} characters"
        raise invalid(sentence, "options.stop")
    return stops


def _guide(given: str | dict[str, Any] | None) -> Guide | None:
    if not given:
        return None
    if isinstance(given, dict):
        return schema_guide(given, is_strict=True)
    if given != "json":
        raise invalid("format must be json or a JSON schema", "format")
    return object_guide()


def _messages(given: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Calls and their results have no ids here: results follow in the order of the calls."""
    messages: list[dict[str, Any]] = []
    waiting: list[str] = []
    for index, each in enumerate(given):
        message = {name: value for name, value in each.items() if value is not None}
        images = message.pop("images", None)
        thought, name = message.pop("thinking", None), message.pop("tool_name", None)
        if thought:
            message["reasoning"] = thought
        if name:
            message["name"] = name
        if message.get("tool_calls"):
            message["tool_calls"] = _calls(message["tool_calls"], index)
            waiting = [call["id"] for call in message["tool_calls"]]
        elif message.get("role") == "tool":
            message.setdefault("tool_call_id", waiting.pop(0) if waiting else "")
        message.setdefault("content", "")
        messages.append({**message, "content": _with_images(message["content"], images, f"messages[{index}].images")})
    return read_messages(messages)


def _with_images(text: Any, images: Any, where: str) -> Any:
    """The content of a message: images stand before its text, as at Ollama."""
    if not images:
        return text
    if not isinstance(images, list) or not all(isinstance(each, str) for each in images):
        raise invalid(f"{where} must hold files in base64", where)
    return [*map(url_part, images), {"type": "text", "text": text}]


def _calls(given: Any, index: int) -> list[dict[str, Any]]:
    if not isinstance(given, list) or not all(isinstance(call, dict) for call in given):
        raise invalid(f"messages[{index}].tool_calls must hold functions", "messages")
    return [{"id": f"call_{index}_{number}", **call, "type": "function"} for number, call in enumerate(given)]
