"""vLLM's sampling parameters, a JSON object in one tensor or the request parameters: which fields each key sets.

Values may be text, as genai-perf and others send numbers. null counts as not given. Every key of vLLM's SamplingParams
is honoured, refused with a reason unless its value asks for nothing, or ignored because it has no effect there either.
"""

from __future__ import annotations

import contextlib
import difflib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from inflight.errors import InvalidRequest
from inflight.guided_decoding import NO_SUCH_SPACE, WhiteSpace, grammar_type, white_space_of
from inflight.server.tensors.tensor_values import MAX_WORDS, MAX_WORDS_BYTES, Array, ReadLimits, read_scalar
from inflight.text.safe_text import safe_text

Setter = Callable[[str, Any], dict[str, Any]]
"""(key, value) -> fields of ClientRequest; raises InvalidRequest."""

UNLIMITED = 2**31 - 2
"""max_tokens null: as many as max_seq_len allows."""
ALL_TOKENS = -1
"""top_k of vLLM for no limit."""


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """One key of the object. Without `set` it is refused unless its value is one of `neutral`; None = ignored."""

    name: str
    set: Setter | None = None
    neutral: tuple[object, ...] | None = ()
    reason: str = ""
    field: str = ""
    """What it sets, for the documentation."""


def read_sampling_parameters(name: str, array: Array, limits: ReadLimits) -> dict[str, Any]:
    """Fields of ClientRequest from a tensor with the JSON object. Raises InvalidRequest."""
    text = read_scalar(name, array, limits)
    assert isinstance(text, str)
    parameters = _parsed(name, text)
    if not isinstance(parameters, dict):
        raise InvalidRequest(f"{name} must be a JSON object")
    for key in parameters:
        if key not in PARAMETERS_BY_NAME:
            near = difflib.get_close_matches(key, PARAMETERS_BY_NAME, 1)
            hint = f": did you mean {near[0]}" if near else ""
            raise InvalidRequest(f"{name} has an unknown key {safe_text(key)}{hint}")
    return read_options(parameters)


def read_options(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of ClientRequest from the keys that are sampling parameters; others are ignored. Raises InvalidRequest."""
    fields: dict[str, Any] = {}
    for key, value in parameters.items():
        parameter = PARAMETERS_BY_NAME.get(key)
        if parameter is None or (value is None and key != "max_tokens"):
            continue
        if parameter.set is not None:
            fields |= parameter.set(key, value)
        elif parameter.neutral is not None and _plain(value) not in parameter.neutral:
            raise InvalidRequest(f"{key} is not supported: {parameter.reason}")
    return fields


def _number(field: str, whole: bool = False) -> Setter:
    def set_field(key: str, value: Any) -> dict[str, Any]:
        return {field: _as_whole(key, value) if whole else _as_float(key, value)}

    return set_field


def _whole(field: str) -> Setter:
    return _number(field, whole=True)


def _texts(field: str) -> Setter:
    """A text or a list of them. An empty text is an empty list; one in a list means nothing: vLLM refuses it, too."""

    def set_field(key: str, value: Any) -> dict[str, Any]:
        texts = list(filter(None, [value])) if isinstance(value, str) else value
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            raise InvalidRequest(f"{key} must be a text or a list of texts")
        if len(texts) > MAX_WORDS or sum(len(text.encode("utf-8", "replace")) for text in texts) > MAX_WORDS_BYTES:
            raise InvalidRequest(f"{key} must have at most {MAX_WORDS} entries and {MAX_WORDS_BYTES} bytes")
        if not all(texts):
            raise InvalidRequest(f"{key} must hold no empty text")
        return {field: texts}

    return set_field


def _text(field: str) -> Setter:
    def set_field(key: str, value: Any) -> dict[str, Any]:
        if not isinstance(value, str):
            raise InvalidRequest(f"{key} must be a text")
        return {field: value}

    return set_field


def _set_max_tokens(key: str, value: Any) -> dict[str, Any]:
    return {"max_tokens": UNLIMITED if value is None else _as_whole(key, value)}


def _set_top_k(key: str, value: Any) -> dict[str, Any]:
    top_k = _as_whole(key, value)
    return {"top_k": 0 if top_k == ALL_TOKENS else top_k}


def _set_seed(key: str, value: Any) -> dict[str, Any]:
    seed = _as_whole(key, value)
    return {} if seed == -1 else {"seed": seed % 2**64}


def _set_stop_tokens(key: str, value: Any) -> dict[str, Any]:
    token_ids = _parsed(key, value) if isinstance(value, str) else value
    if not isinstance(token_ids, list) or len(token_ids) > MAX_WORDS:
        raise InvalidRequest(f"{key} must be a list of at most {MAX_WORDS} token ids")
    return {"stop_word_ids": [[_as_whole(key, token)] for token in token_ids]}


def _set_ignore_eos(key: str, value: Any) -> dict[str, Any]:
    return {"end_id": -1} if _as_bool(key, value) else {}


def _set_skip_special(key: str, value: Any) -> dict[str, Any]:
    return {"shows_special": not _as_bool(key, value)}


def _set_logit_bias(key: str, value: Any) -> dict[str, Any]:
    biases = _parsed(key, value) if isinstance(value, str) else value
    if not isinstance(biases, dict):
        raise InvalidRequest(f"{key} must map token ids to numbers")
    return {
        "logit_bias_ids": [_as_whole(key, token) for token in biases],
        "logit_bias_values": [_as_float(key, bias) for bias in biases.values()],
    }


GUIDES = {"json": "json_schema", "regex": "regex", "grammar": "", "structural_tag": "structural_tag"}
"""What the output follows, in vLLM's words and as a guided_decoding_guide_type; "" = as its text says."""
GUIDE_FLAGS = ("strict", "disable_any_whitespace", "disable_fallback", "disable_additional_properties")
"""The last two have no effect: no other library follows a guide that this one refuses, and objects have no other
properties than those that are named, unless additionalProperties says so. `strict` is ours."""
GUIDE_TEXTS = ("whitespace_pattern", "backend")
GUIDE_FIELDS = "guide_type, guide, guide_is_strict, guide_white_space, guide_backend"


def _set_log_probs(key: str, value: Any) -> dict[str, Any]:
    """0 asks for the chosen tokens' alone, which need the likeliest beside them here."""
    return {"num_log_probs": _as_whole(key, value) or 1, "return_log_probs": True}


def _set_guide(key: str, value: Any) -> dict[str, Any]:
    guide = _parsed(key, value) if isinstance(value, str) else value
    if not isinstance(guide, dict):
        raise InvalidRequest(f"{key} must be a JSON object")
    options = _guide_options(key, guide)
    said = {
        name: each
        for name, each in guide.items()
        if each not in (None, False) and name not in GUIDE_FLAGS + GUIDE_TEXTS
    }
    unknown = [name for name in said if name not in (*GUIDES, "choice", "json_object")]
    if unknown:
        raise InvalidRequest(f"{key} has a key that is unknown: use one of {', '.join(GUIDES)}, choice, json_object")
    if len(said) != 1:
        raise InvalidRequest(f"{key} must have exactly one of {', '.join(GUIDES)}, choice and json_object")
    ((kind, content),) = said.items()
    if kind == "json_object":
        return {"guide_type": "json", **options}
    if kind == "choice":
        if not isinstance(content, list) or not content or not all(isinstance(each, str) for each in content):
            raise InvalidRequest(f"{key}: choice must be a list of texts")
        return {"guide_type": "choice", "guide": json.dumps(content), **options}
    text = content if isinstance(content, str) else json.dumps(content)
    return {"guide_type": GUIDES[kind] or grammar_type(text).value, "guide": text, **options}


def _guide_options(key: str, guide: dict[str, Any]) -> dict[str, Any]:
    """Fields from what is said beside the guide itself."""
    fields: dict[str, Any] = {}
    for name in GUIDE_FLAGS:
        if guide.get(name) not in (None, True, False):
            raise InvalidRequest(f"{key}: {name} must be true or false")
    for name in GUIDE_TEXTS:
        if not isinstance(guide.get(name), str | None):
            raise InvalidRequest(f"{key}: {name} must be a text")
    pattern = guide.get("whitespace_pattern")
    if guide.get("disable_any_whitespace"):
        if pattern:
            raise InvalidRequest(f"{key} has disable_any_whitespace and whitespace_pattern: give one of them")
        fields["guide_white_space"] = WhiteSpace.COMPACT.value
    elif pattern:
        white_space = white_space_of(pattern)
        if white_space is None:
            raise InvalidRequest(f"{key}.whitespace_pattern is not supported: {NO_SUCH_SPACE}")
        fields["guide_white_space"] = white_space.value
    if guide.get("strict") not in (None, True):
        fields["guide_is_strict"] = False
    if guide.get("backend"):
        fields["guide_backend"] = guide["backend"]
    return fields


NOT_OFFERED = "this engine has no such option"

PARAMETERS = (
    Parameter(name="n", set=_whole("num_return_sequences"), field="num_return_sequences"),
    Parameter(name="best_of", neutral=(1,), reason="ask for n sequences and choose among them"),
    Parameter(name="temperature", set=_number("temperature"), field="temperature"),
    Parameter(name="top_p", set=_number("top_p"), field="top_p"),
    Parameter(name="top_k", set=_set_top_k, field="top_k"),
    Parameter(name="min_p", set=_number("min_p"), field="min_p"),
    Parameter(name="seed", set=_set_seed, field="seed"),
    Parameter(name="presence_penalty", set=_number("presence_penalty"), field="presence_penalty"),
    Parameter(name="frequency_penalty", set=_number("frequency_penalty"), field="frequency_penalty"),
    Parameter(name="repetition_penalty", set=_number("repetition_penalty"), field="repetition_penalty"),
    Parameter(name="max_tokens", set=_set_max_tokens, field="max_tokens"),
    Parameter(name="min_tokens", set=_whole("min_tokens"), field="min_tokens"),
    Parameter(name="stop", set=_texts("stop_words"), field="stop_words"),
    Parameter(name="stop_token_ids", set=_set_stop_tokens, field="stop_word_ids"),
    Parameter(name="bad_words", set=_texts("bad_words"), field="bad_words"),
    Parameter(name="ignore_eos", set=_set_ignore_eos, field="end_id"),
    Parameter(name="logit_bias", set=_set_logit_bias, field="logit_bias_ids, logit_bias_values"),
    Parameter(name="logprobs", set=_set_log_probs, field="num_log_probs"),
    Parameter(name="structured_outputs", set=_set_guide, field=GUIDE_FIELDS),
    Parameter(name="guided_decoding", set=_set_guide, field=GUIDE_FIELDS),
    Parameter(name="lora_name", set=_text("lora_name"), field="lora_name"),
    Parameter(name="prompt_logprobs", neutral=None, reason="no output has them"),
    Parameter(name="detokenize", neutral=(True,), reason="the output is text"),
    Parameter(name="skip_special_tokens", set=_set_skip_special, field="shows_special"),
    Parameter(name="spaces_between_special_tokens", neutral=None, reason="special tokens are written as they are"),
    Parameter(name="include_stop_str_in_output", neutral=(False,), reason="stop strings are cut off"),
    Parameter(name="output_kind", neutral=None, reason="set by stream"),
    Parameter(name="use_beam_search", neutral=(False,), reason="use the model llm, with beam_width"),
    Parameter(name="length_penalty", neutral=(1,), reason="use the model llm, with beam_width"),
    Parameter(name="early_stopping", neutral=(False,), reason="use the model llm, with beam_width"),
    Parameter(name="truncate_prompt_tokens", neutral=(), reason="shorten the prompt"),
    Parameter(name="allowed_token_ids", neutral=(), reason="use logit_bias or structured_outputs"),
    Parameter(name="logits_processors", neutral=(), reason="use the model llm, with logits_post_processor_name"),
    Parameter(name="extra_args", neutral=(), reason=NOT_OFFERED),
)
PARAMETERS_BY_NAME = {parameter.name: parameter for parameter in PARAMETERS}


def _parsed(name: str, text: str) -> Any:
    try:
        value = json.loads(text)
        json.dumps(value, ensure_ascii=False).encode()  # its escapes may spell half a character, which is no text
    except (ValueError, RecursionError):
        raise InvalidRequest(f"{name} is not valid JSON") from None
    return value


def _plain(value: Any) -> object:
    """A value that was sent as text, as the number or the truth that it spells; a list or an object as None, which is
    never neutral."""
    if not isinstance(value, str):
        return value if isinstance(value, int | float) else None
    try:
        return json.loads(value.lower())
    except (ValueError, RecursionError):
        return None


def _as_whole(key: str, value: Any) -> int:
    if type(value) is int:
        return value
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            return int(value)
    number = _as_float(key, value)
    if number != math.floor(number):
        raise InvalidRequest(f"{key} must be a whole number")
    return int(number)


def _as_float(key: str, value: Any) -> float:
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise InvalidRequest(f"{key} must be a number")
    return number


def _as_bool(key: str, value: Any) -> bool:
    plain = _plain(value)
    if plain not in (0, 1):
        raise InvalidRequest(f"{key} must be true or false")
    return bool(plain)
