"""ClientRequest to Request: fills in defaults and tokenises text.

Knows the tokenizer, the checkpoint's defaults and the engine's limits: every Request that it returns can be served.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import structs

from inflight.errors import InvalidRequest
from inflight.generation_defaults import GenerationDefaults
from inflight.guided_decoding import GuidedDecodingParams, GuideType
from inflight.lora import LoraConfig, LoRARequest
from inflight.output_config import AdditionalModelOutput, OutputConfig
from inflight.request import Request
from inflight.request_limits import RequestLimits
from inflight.sampling_config import SamplingConfig
from inflight.server.tensors.client_request import ClientRequest
from inflight.text.tokenizer import Tokenizer

NEVER = -1
"""The value of end_id that means that no token ends the output."""
SAMPLING_FIELDS = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "seed",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "min_tokens",
    "no_repeat_ngram_size",
    "top_p_decay",
    "top_p_min",
    "top_p_reset_ids",
    "beam_width",
    "length_penalty",
    "early_stopping",
)
"""The fields of ClientRequest that set how tokens are sampled."""


class RequestBuilder:
    """Turns ClientRequests into Requests. Thread safe."""

    def __init__(self, tokenizer: Tokenizer, limits: RequestLimits, defaults: GenerationDefaults) -> None:
        self._tokenizer = tokenizer
        self._defaults = defaults
        self._limits = limits

    def build(self, client: ClientRequest, request_id: int, triton_id: str) -> Request:
        """Raises InvalidRequest with one sentence."""
        if client.lora_order:
            return self._order(client, request_id, triton_id)
        assert client.max_tokens is not None
        if (client.beam_width or 1) > 1 and client.stop_words:
            raise InvalidRequest("stop_words is not supported together with beam_width above 1")
        input_token_ids = self._prompt(client)
        request = Request(
            request_id=request_id,
            input_token_ids=input_token_ids,
            max_tokens=client.max_tokens,
            # The stub finds stop strings in text: it needs every token at once so that it can end the request early.
            streaming=client.stream or bool(client.stop_words),
            sampling_config=self._sampling_config(client, len(input_token_ids), client.max_tokens),
            output_config=self._output_config(client),
            end_ids=self._end_ids(client),
            stop_words=client.stop_word_ids or [],
            bad_words=self._bad_words(client),
            guided_decoding_params=_guided_decoding(client),
            priority=0.5 if client.priority is None else client.priority,
            allotted_time_ms=client.allotted_time_ms or 0,
            client_id=triton_id,
            cache_salt=client.cache_salt or "",
            num_return_sequences=1 if client.num_return_sequences is None else client.num_return_sequences,
            lora_request=LoRARequest(client.lora_name) if client.lora_name else None,
            lora_config=_lora_config(client),
        )
        self._limits.validate(request)
        return request

    def _order(self, client: ClientRequest, request_id: int, triton_id: str) -> Request:
        """To load or unload an adapter."""
        if client.lora_order not in ("load", "unload"):
            raise InvalidRequest("lora_order must be load or unload")
        request = Request(
            request_id=request_id,
            input_token_ids=[],
            max_tokens=1,
            client_id=triton_id,
            lora_request=LoRARequest(client.lora_name) if client.lora_name else None,
            lora_config=_lora_config(client),
            lora_order="load" if client.lora_order == "load" else "unload",
        )
        self._limits.validate(request)
        return request

    @staticmethod
    def _output_config(client: ClientRequest) -> OutputConfig:
        names = client.additional_outputs or []
        if client.gather_context and not names:
            raise InvalidRequest("gather_context needs additional_outputs: the names of what is to be gathered")
        return OutputConfig(
            return_log_probs=client.return_log_probs,
            num_log_probs=client.num_log_probs or 0,
            return_prompt_log_probs=client.return_prompt_log_probs,
            return_context_logits=client.return_context_logits,
            return_generation_logits=client.return_generation_logits,
            additional_model_outputs=[
                AdditionalModelOutput(name=name, gather_context=client.gather_context) for name in names
            ],
        )

    def _prompt(self, client: ClientRequest) -> list[int]:
        if client.input_ids is not None:
            return client.input_ids
        if not client.text:
            raise InvalidRequest("the prompt is empty: give at least one character")
        return self._tokenizer.encode(client.text)

    def _sampling_config(self, client: ClientRequest, num_prompt_tokens: int, max_tokens: int) -> SamplingConfig:
        said = {name: getattr(client, name) for name in SAMPLING_FIELDS}
        config = self._defaults.sampling_config(num_prompt_tokens=num_prompt_tokens, max_tokens=max_tokens, **said)
        bias, dense = self._logit_bias(client), client.embedding_bias or b""
        return structs.replace(config, logit_bias=bias, embedding_bias=dense) if bias or dense else config

    def _logit_bias(self, client: ClientRequest) -> dict[int, float]:
        """Of token ids, and of every token of a word, as TensorRT-LLM's preprocessing has it; they add up."""
        ids, values = client.logit_bias_ids or [], client.logit_bias_values or []
        words, weights = client.embedding_bias_words or [], client.embedding_bias_weights or []
        if len(ids) != len(values):
            raise InvalidRequest(f"logit_bias_ids has {len(ids)} entries and logit_bias_values {len(values)}")
        if len(words) != len(weights):
            raise InvalidRequest(
                f"embedding_bias_words has {len(words)} entries and embedding_bias_weights {len(weights)}"
            )
        bias = dict(zip(ids, values, strict=True))
        if len(bias) != len(ids):
            raise InvalidRequest("logit_bias_ids names a token twice")
        for word, weight in zip(words, weights, strict=True):
            for token in set(self._tokenizer.encode_plain(word)):
                bias[token] = bias.get(token, 0.0) + weight
        return bias

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


def _lora_config(client: ClientRequest) -> LoraConfig | None:
    if client.lora_task_id is None:
        if client.lora_weights is not None or client.lora_config is not None:
            raise InvalidRequest("lora_weights and lora_config need lora_task_id: the number of their adapter")
        return None
    return LoraConfig.of(client.lora_task_id, client.lora_weights, client.lora_config)


def _guided_decoding(client: ClientRequest) -> GuidedDecodingParams | None:
    """Empty texts count as unset: clients that fill every tensor send them."""
    if not client.guide_type:
        if client.guide:
            raise InvalidRequest("guided_decoding_guide needs guided_decoding_guide_type")
        return None
    try:
        guide_type = GuideType(client.guide_type)
    except ValueError:
        known = ", ".join(each.value for each in GuideType)
        raise InvalidRequest(f"guided_decoding_guide_type must be one of {known}") from None
    return GuidedDecodingParams(guide_type=guide_type, guide=client.guide or "")


def _distinct(words: Iterable[list[int]]) -> list[list[int]]:
    return [list(word) for word in dict.fromkeys(tuple(word) for word in words if word)]
