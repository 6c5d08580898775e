"""ClientRequest to Request: defaults made explicit and text made tokens.

Knows the tokenizer and the engine's limits: what comes out can be served.

Defaults follow TensorRT-LLM: without any of temperature, top_k, top_p and min_p the output is greedy; top_k 1 and a
temperature that is 0, or too small to divide by, are greedy too; top_p <= 0 counts as not given. A sampled request
without a seed gets a fresh one.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable

from inflight.errors import InvalidRequest
from inflight.request import MIN_TEMPERATURE, OutputConfig, Request, RequestLimits, SamplingConfig
from inflight.server.client_request import ClientRequest
from inflight.server.tokenizer import Tokenizer

NEVER = -1
"""As end_id: no token ends the output."""


class RequestBuilder:
    """Turns what clients said into what ranks compute."""

    def __init__(self, tokenizer: Tokenizer, limits: RequestLimits) -> None:
        self._tokenizer = tokenizer
        self._limits = limits
        per_token = tokenizer.max_bytes_per_token
        self._max_prompt_bytes = None if per_token is None else per_token * limits.max_input_len

    def build(self, client: ClientRequest, request_id: int, triton_id: str) -> Request:
        """Raises InvalidRequest with one sentence."""
        assert client.max_tokens is not None
        request = Request(
            request_id=request_id,
            input_token_ids=self._prompt(client),
            max_tokens=client.max_tokens,
            # Stop strings are found in text, by the server side: it must see tokens as they come to end the request.
            streaming=client.stream or bool(client.stop_words),
            sampling_config=sampling_config(client),
            output_config=OutputConfig(return_log_probs=client.return_log_probs),
            end_ids=self._end_ids(client),
            stop_words=client.stop_word_ids or [],
            bad_words=self._bad_words(client),
            priority=0.5 if client.priority is None else client.priority,
            allotted_time_ms=client.allotted_time_ms or 0,
            client_id=triton_id,
            cache_salt=client.cache_salt or "",
        )
        self._limits.validate(request)
        return request

    def _prompt(self, client: ClientRequest) -> list[int]:
        if client.input_ids is not None:
            return client.input_ids
        if not client.text:
            raise InvalidRequest("the prompt is empty: give at least one character")
        self._check_size(len(client.text.encode()))
        return self._tokenizer.encode(client.text)

    def _check_size(self, num_bytes: int) -> None:
        """Tokenising what cannot fit would take up to a second to say so."""
        if self._max_prompt_bytes is not None and num_bytes > self._max_prompt_bytes:
            most = self._limits.max_input_len
            raise InvalidRequest(f"the prompt has {num_bytes} bytes, which make more than max_input_len {most} tokens")

    def _end_ids(self, client: ClientRequest) -> list[int]:
        self._check_token_id("pad_id", client.pad_id)
        self._check_token_id("end_id", client.end_id)
        if client.end_id is None:
            # Some checkpoints name an end token that their vocabulary does not reach: it can never be sampled.
            return [token for token in self._tokenizer.end_ids if token < self._limits.vocab_size]
        return [] if client.end_id == NEVER else [client.end_id]

    def _check_token_id(self, name: str, token_id: int | None) -> None:
        if token_id is not None and not NEVER <= token_id < self._limits.vocab_size:
            raise InvalidRequest(
                f"{name} must be -1 (none) or a token id below {self._limits.vocab_size}, got {token_id}"
            )

    def _bad_words(self, client: ClientRequest) -> list[list[int]]:
        """A word is banned at the start of a text and after a space alike: the two are different tokens."""
        words = client.bad_words or ()
        spellings = [*words, *(f" {word.lstrip()}" for word in words if word.strip())]
        encoded = (self._tokenizer.encode_plain(spelling) for spelling in spellings)
        return _distinct([*(client.bad_word_ids or ()), *encoded])


def sampling_config(client: ClientRequest) -> SamplingConfig:
    """Every default resolved; values out of range are left for RequestLimits to refuse by name."""
    top_p = client.top_p if client.top_p is not None and client.top_p > 0 else None
    chosen = [value for value in (client.temperature, client.top_k, top_p, client.min_p) if value is not None]
    temperature = 1.0 if client.temperature is None else client.temperature
    is_greedy = not any(chosen) or 0 <= temperature < MIN_TEMPERATURE or client.top_k == 1
    return SamplingConfig(
        temperature=0.0 if is_greedy else temperature,
        top_k=client.top_k or 0,
        top_p=1.0 if top_p is None else top_p,
        min_p=client.min_p or 0.0,
        seed=_seed(client, is_greedy),
        repetition_penalty=1.0 if client.repetition_penalty is None else client.repetition_penalty,
        presence_penalty=client.presence_penalty or 0.0,
        frequency_penalty=client.frequency_penalty or 0.0,
        min_tokens=_min_tokens(client),
    )


def _seed(client: ClientRequest, is_greedy: bool) -> int:
    if client.seed is not None:
        return client.seed
    return 0 if is_greedy else secrets.randbits(64)


def _min_tokens(client: ClientRequest) -> int:
    minimum = client.min_tokens or 0
    if client.max_tokens is not None and minimum > max(client.max_tokens, 0):
        raise InvalidRequest(f"min_tokens ({minimum}) must not be above max_tokens ({client.max_tokens})")
    return minimum


def _distinct(words: Iterable[list[int]]) -> list[list[int]]:
    return [list(word) for word in dict.fromkeys(tuple(word) for word in words if word)]
