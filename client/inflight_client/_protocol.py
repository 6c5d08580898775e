"""The tensors of the model `llm`: converts options to a Call and a Reply to a Chunk, for both clients. Sends
nothing."""

from __future__ import annotations

import difflib
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from inflight_client._exceptions import InvalidRequest
from inflight_client._transport import Array, Call, Reply, strings
from inflight_client._types import Chunk, Prompt, TokenLogProb, TopLogProbs

DEFAULT_MODEL = "llm"

_DTYPES: dict[str, Any] = {
    "max_tokens": np.int32,
    "min_tokens": np.int32,
    "temperature": np.float32,
    "top_k": np.int32,
    "top_p": np.float32,
    "min_p": np.float32,
    "typical_p": np.float32,
    "seed": np.uint64,
    "repetition_penalty": np.float32,
    "presence_penalty": np.float32,
    "frequency_penalty": np.float32,
    "no_repeat_ngram_size": np.int32,
    "top_p_decay": np.float32,
    "top_p_min": np.float32,
    "top_p_reset_ids": np.int32,
    "stop_words": np.object_,
    "bad_words": np.object_,
    "end_id": np.int32,
    "pad_id": np.int32,
    "guided_decoding_guide_type": np.object_,
    "guided_decoding_guide": np.object_,
    "guided_decoding_strict": np.bool_,
    "guided_decoding_white_space": np.object_,
    "max_draft_len": np.int32,
    "max_matching_ngram_size": np.int32,
    "speculative_max_draft_len": np.int32,
    "draft_input_ids": np.int32,
    "draft_logits": np.float32,
    "draft_acceptance_threshold": np.float32,
    "lookahead_window_size": np.int32,
    "lookahead_ngram_size": np.int32,
    "lookahead_verification_set_size": np.int32,
    "logits_post_processor_name": np.object_,
    "lora_name": np.object_,
    "lora_task_id": np.uint64,
    "exclude_input_in_output": np.bool_,
    "return_log_probs": np.bool_,
    "num_log_probs": np.int32,
    "return_perf_metrics": np.bool_,
    "return_prompt_log_probs": np.bool_,
    "num_return_sequences": np.int32,
    "beam_width": np.int32,
    "length_penalty": np.float32,
    "early_stopping": np.int32,
    "beam_width_array": np.int32,
    "beam_search_diversity_rate": np.float32,
    "logit_bias": np.float32,
    "prompt_embedding_table": np.float16,
    "prompt_table_extra_ids": np.uint64,
    "return_num_input_tokens": np.bool_,
    "return_num_output_tokens": np.bool_,
    "stream": np.bool_,
    "stop": np.bool_,
}
"""Data types of all optional inputs; the name of an input is also that of the option. Only `logit_bias` becomes two
tensors, `logit_bias_ids` and `logit_bias_values`."""

_DEFAULTS: dict[str, object] = {
    "max_tokens": 128,
    "exclude_input_in_output": True,
    "return_num_input_tokens": True,
    "return_num_output_tokens": True,
}


def new_request_id() -> str:
    """A practically unique request id: 63 random bits in decimal, which every dialect of the server accepts."""
    return str(secrets.randbits(63) or 1)


def generation_call(
    prompt: Prompt,
    options: Mapping[str, object],
    *,
    model: str,
    stream: bool,
    timeout: float | None,
    request_id: str | None,
) -> Call:
    """The call that asks `model` to continue `prompt`.

    Raises InvalidRequest for values that no tensor can hold, TypeError for unknown options.
    """
    inputs = _prompt(prompt)
    for name, value in {**_DEFAULTS, **options, "stream": stream}.items():
        if value is None:
            continue
        if name == "logit_bias":
            inputs |= _logit_bias(value)
        elif name in ("draft_input_ids", "beam_width_array"):
            inputs[name] = _row(name, value)
        elif name == "prompt_embedding_table":
            inputs[name] = _matrix(name, value, np.float16)
        elif name == "draft_logits":
            inputs[name] = _matrix(name, value, np.float32)
        elif name == "prompt_table_extra_ids":
            inputs[name] = _integers(name, list(np.atleast_1d(np.asarray(value)).tolist()), np.uint64)
        else:
            inputs[name] = _tensor(name, value)
    return Call(model=model, inputs=inputs, request_id=request_id or new_request_id(), timeout=timeout)


def stop_call(request_id: str, *, model: str, timeout: float | None) -> Call:
    """The call that stops the request with that id, whichever client sent it."""
    inputs = {"stop": np.ones(1, np.bool_)}
    return Call(model=model, inputs=inputs, request_id=request_id, timeout=timeout)


def lora_call(order: str, name: str, *, model: str, timeout: float | None) -> Call:
    """The call that has the server `load` or `unload` the adapter `name`."""
    inputs = {"lora_order": strings((order,)), "lora_name": strings((_text("lora_name", name),))}
    return Call(model=model, inputs=inputs, request_id=new_request_id(), timeout=timeout)


def num_sequences(call: Call) -> int:
    """Sequences that the answer to `call` has; 1 also for a number that the server is going to refuse."""
    number = _scalar(call.inputs, "num_return_sequences")
    return 1 if number is None else max(1, int(number))


def has_beams(call: Call) -> bool:
    """Whether each reply of a stream holds all of its sequence's text so far."""
    width = _scalar(call.inputs, "beam_width")
    return width is not None and int(width) > 1


def may_stream(options: Mapping[str, object]) -> bool:
    """Whether the joined chunks of a stream are what the answer would be without streaming: beams replace each other,
    and a stream never repeats its prompt."""
    return options.get("exclude_input_in_output", True) is True and options.get("beam_width") in (None, 1)


def resumable(call: Call, token: Sequence[bytes], timeout: float | None) -> Call:
    """The call, which asks for a resume token and, if there is one already, goes on behind its parts."""
    inputs = {**call.inputs, "return_resume_token": np.ones(1, np.bool_)}
    if token:
        inputs["resume_token"] = strings((b"".join(token).decode(),))
    return replace(call, inputs=inputs, timeout=timeout)


def resume_token_of(reply: Reply) -> list[bytes]:
    """The parts of the resume token that it holds."""
    return _flat(reply.outputs, "resume_token")


def chunk_from_reply(reply: Reply) -> Chunk | None:
    """The content of a reply, or None for an empty final reply."""
    outputs = reply.outputs
    if not outputs:
        return None
    token_ids = tuple(int(token) for token in _flat(outputs, "output_ids"))
    length = _scalar(outputs, "sequence_length")
    if length is not None:
        token_ids = token_ids[: int(length)]
    num_output_tokens = _scalar(outputs, "num_output_tokens")
    num_input_tokens = _scalar(outputs, "num_input_tokens")
    cum_log_probs = _scalar(outputs, "cum_log_probs")
    reason = _string(outputs, "finish_reason")
    return Chunk(
        text=_string(outputs, "text_output"),
        token_ids=token_ids,
        finish_reason=reason if reason not in ("", "None") else None,
        log_probs=tuple(float(value) for value in _flat(outputs, "output_log_probs")),
        cum_log_probs=None if cum_log_probs is None else float(cum_log_probs),
        num_input_tokens=None if num_input_tokens is None else int(num_input_tokens),
        num_output_tokens=len(token_ids) if num_output_tokens is None else int(num_output_tokens),
        sequence_index=int(_scalar(outputs, "sequence_index") or 0),
        top_log_probs=_top_log_probs(outputs, "top_token_ids", "top_log_probs"),
        prompt_log_probs=tuple(float(value) for value in _flat(outputs, "prompt_log_probs")),
        prompt_top_log_probs=_top_log_probs(outputs, "prompt_top_token_ids", "prompt_top_log_probs"),
        total_draft_tokens=_count(outputs, "total_draft_tokens"),
        total_accepted_draft_tokens=_count(outputs, "total_accepted_draft_tokens"),
        guide_not_enforced=tuple(each.decode() for each in _flat(outputs, "guided_decoding_not_enforced")),
    )


def _tensor(name: str, value: object) -> Array:
    dtype = _DTYPES.get(name)
    if dtype is None:
        near = difflib.get_close_matches(name, _DTYPES, n=1)
        raise TypeError(f"unknown option {name}" + (f"; did you mean {near[0]}?" if near else ""))
    if dtype is np.object_:
        words = (value,) if isinstance(value, str) else value
        if not isinstance(words, Sequence):
            raise InvalidRequest(f"{name} must be a list of strings, got {value!r}")
        return strings([_text(name, word) for word in words])
    if dtype is np.bool_:
        return np.array([bool(value)], np.bool_)
    if not isinstance(value, (int, float, np.number)) or isinstance(value, bool):
        raise InvalidRequest(f"{name} must be a number, got {value!r}")
    if dtype is np.float32:
        return np.array([value], np.float32)
    return _integers(name, [value], dtype)


def _logit_bias(value: object) -> dict[str, Array]:
    if not isinstance(value, Mapping):
        raise InvalidRequest(f"logit_bias must map token ids to numbers, got {value!r}")
    for bias in value.values():
        if not isinstance(bias, (int, float, np.number)) or isinstance(bias, bool):
            raise InvalidRequest(f"logit_bias must map token ids to numbers, got the bias {bias!r}")
    return {
        "logit_bias_ids": _integers("a token id of logit_bias", list(value), np.int32),
        "logit_bias_values": np.array(list(value.values()), np.float32),
    }


def _row(name: str, value: object) -> Array:
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise InvalidRequest(f"{name} must be a list of whole numbers, got {value!r}")
    return _integers(name, list(value), np.int32)


def _prompt(prompt: Prompt) -> dict[str, Array]:
    if isinstance(prompt, str):
        return {"text_input": strings((_text("prompt", prompt),))}
    if isinstance(prompt, np.ndarray) and prompt.ndim > 1:
        return {"prompt_embeds": _matrix("prompt_embeds", prompt, np.float32)}
    return {"input_ids": _integers("input_ids", list(prompt), np.int32)}


def _matrix(name: str, value: object, dtype: Any) -> Array:
    """A matrix of numbers; those too large for `dtype` become infinity, which the server refuses."""
    try:
        with np.errstate(over="ignore"):
            rows = np.asarray(value).astype(dtype)
    except (TypeError, ValueError):
        raise InvalidRequest(f"{name} must be an array of numbers") from None
    if rows.ndim != 2:
        raise InvalidRequest(f"{name} must have two dimensions, got shape {list(rows.shape)}")
    return rows


def _integers(name: str, values: list[Any], dtype: Any) -> Array:
    bounds = np.iinfo(dtype)
    for value in values:
        whole = isinstance(value, (int, np.integer)) or (isinstance(value, float) and value.is_integer())
        if isinstance(value, bool) or not whole:
            raise InvalidRequest(f"{name} must be a whole number, got {value!r}")
        if not bounds.min <= value <= bounds.max:
            raise InvalidRequest(f"{name} must be between {bounds.min} and {bounds.max}, got {value}")
    return np.array([int(value) for value in values], dtype)


def _text(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise InvalidRequest(f"{name} must be text, got {value!r}")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise InvalidRequest(f"{name} holds half a surrogate pair, which is not text") from None
    return value


def _flat(outputs: Mapping[str, Array], name: str) -> list[Any]:
    return outputs[name].reshape(-1).tolist() if name in outputs else []


def _top_log_probs(outputs: Mapping[str, Array], ids: str, values: str) -> TopLogProbs:
    """The two tensors, whose last dimension is `num_log_probs`, as pairs for each token."""
    if ids not in outputs or not outputs[ids].size:
        return ()
    rows = zip(*(outputs[name].reshape(-1, outputs[name].shape[-1]).tolist() for name in (ids, values)), strict=True)
    return tuple(tuple(TokenLogProb(*pair) for pair in zip(*row, strict=True)) for row in rows)


def _scalar(outputs: Mapping[str, Array], name: str) -> Any:
    return next(iter(_flat(outputs, name)), None)


def _count(outputs: Mapping[str, Array], name: str) -> int | None:
    value = _scalar(outputs, name)
    return None if value is None else int(value)


def _string(outputs: Mapping[str, Array], name: str) -> str:
    value = _scalar(outputs, name)
    return value.decode("utf-8", errors="replace") if isinstance(value, bytes) else str(value or "")
