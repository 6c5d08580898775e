"""ClientRequest to Request: as an `Ask`, which every dialect's requests are made of.

Knows the tokenizer, the checkpoint's defaults and the engine's limits: every Request that it returns can be served.
"""

from __future__ import annotations

import base64
import binascii

from inflight.asking.ask import Ask, Illustrated, Prompt
from inflight.asking.guide import Guide
from inflight.asking.images import Images
from inflight.asking.limit import Limit
from inflight.asking.refusal import Refusal
from inflight.asking.served import Served
from inflight.asking.show import Show
from inflight.asking.stop import Stop
from inflight.context_phase import ContextPhaseParams
from inflight.errors import InvalidRequest
from inflight.generation_defaults import GenerationDefaults
from inflight.guided_decoding import GuidedDecodingParams, GuideType, WhiteSpace
from inflight.kv_cache_retention import DEFAULT_PRIORITY, KvCacheRetentionConfig, TokenRangeRetentionConfig
from inflight.lora import LoraConfig, LoRARequest
from inflight.output_config import AdditionalModelOutput, OutputConfig
from inflight.prompt_tuning import PromptTuningConfig, virtual_tokens
from inflight.request import Request
from inflight.request_limits import RequestLimits
from inflight.sampling import Sampling
from inflight.server.tensors.client_request import ClientRequest
from inflight.speculative_decoding import (
    DEFAULT_NGRAM_SIZE,
    DraftTargetDecodingConfig,
    ExternalDraftTokensConfig,
    LookaheadDecodingConfig,
    NGramDecodingConfig,
)
from inflight.text.tokenizer import Tokenizer
from inflight.vision.vision import Unseen

NONE = -1
"""In the tensors of retention: no end of a range, or no end of its time."""
NEVER = -1
"""The value of end_id that means that no token ends the output."""
SAMPLING_FIELDS = tuple(name for name in Sampling.__struct_fields__ if name in ClientRequest.__slots__)
"""The fields of ClientRequest that set how tokens are sampled."""
WORDS = {"stop": "stop_words"}
"""Field of an `Ask` -> what the dialects of tensors call it."""


class RequestBuilder:
    """Turns ClientRequests into Requests. Thread safe."""

    def __init__(
        self, tokenizer: Tokenizer, limits: RequestLimits, defaults: GenerationDefaults, images: Images | None = None
    ) -> None:
        """`images`: None = prompts are text alone."""
        self._tokenizer = tokenizer
        self._served = Served(tokenizer, defaults, images=images)
        self.limits = limits

    def build(self, client: ClientRequest, request_id: int, triton_id: str) -> Request:
        """Of a client with images this waits until they have been seen. Raises InvalidRequest with one sentence."""
        if client.lora_order:
            return self._order(client, request_id, triton_id)
        ask, seen = self._ask(client, request_id, triton_id), None
        try:
            try:
                prepared = self._served.prepare(ask, self.limits)
            except Unseen as unseen:
                seen = unseen.see().result()
                prepared = self._served.prepare(ask, self.limits)
        except Refusal as refusal:
            raise InvalidRequest(refusal.said(WORDS)) from None
        del seen  # until now they are found
        return prepared.prompts[0].request

    def _ask(self, client: ClientRequest, request_id: int, triton_id: str) -> Ask:
        tuning, prompt = self._prompt(client)
        draft_len, params = client.speculative_max_draft_len, client.context_phase_params
        drafting = None if draft_len is None else DraftTargetDecodingConfig(max_draft_len=draft_len)
        return Ask(
            prompt=[prompt],
            choices=1 if client.num_return_sequences is None else client.num_return_sequences,
            streaming=client.stream,
            sampling=Sampling(
                **{name: getattr(client, name) for name in SAMPLING_FIELDS}, logit_bias=self._logit_bias(client)
            ),
            limit=Limit(max_tokens=client.max_tokens, may_exceed=True, allotted_time_ms=client.allotted_time_ms),
            stop=Stop(
                texts=client.stop_words or (),
                token_ids=self._end_ids(client),
                ends_by_itself=client.end_id is None,
                sequences=client.stop_word_ids or (),
            ),
            guide=_guide(client, self.limits),
            adapter=LoRARequest(client.lora_name) if client.lora_name else None,
            show=Show(output=self._output_config(client)),
            priority=0.5 if client.priority is None else client.priority,
            cache_salt=client.cache_salt or "",
            bad_words=client.bad_words or [],
            bad_word_ids=client.bad_word_ids or [],
            further={
                "request_id": request_id,
                "client_id": triton_id,
                "ngram_config": _ngram_config(client),
                "lookahead_config": _lookahead_config(client),
                "draft_target_config": drafting,
                "external_draft_tokens_config": _draft_tokens(client),
                "logits_post_processor_name": client.logits_post_processor_name or "",
                "kv_cache_retention_config": _retention(client),
                "prompt_tuning_config": tuning,
                "lora_config": _lora_config(client),
                "request_type": client.request_type,
                "context_phase_params": None if params is None else ContextPhaseParams.deserialize(params),
            },
        )

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
        self.limits.validate(request)
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

    def _prompt(self, client: ClientRequest) -> tuple[PromptTuningConfig | None, Prompt]:
        """The embeddings that it brings, if any, and its text or its tokens."""
        table = client.prompt_embedding_table or client.prompt_embeds
        own: list[int] = []
        if table is not None:
            self.limits.check_table(table)
            own = virtual_tokens(table, self.limits.vocab_size)
        given = client.prompt_ids
        if given is not None:
            token_ids = given
        elif client.prompt_embeds is not None:
            token_ids = own
        elif client.text and not own:
            prompt = Illustrated(client.text, list(map(_file, client.images))) if client.images else client.text
            return self._prompt_tuning(client, []), prompt
        elif client.text:
            token_ids = own + self._tokenizer.encode(client.text)
        else:
            raise InvalidRequest("the prompt is empty: give at least one character")
        return self._prompt_tuning(client, token_ids), token_ids

    def _prompt_tuning(self, client: ClientRequest, token_ids: list[int]) -> PromptTuningConfig | None:
        table, extra_ids = client.prompt_embedding_table, client.prompt_table_extra_ids
        if client.prompt_embeds is not None:
            if table is not None or extra_ids is not None or client.prompt_vocab_size is not None:
                raise InvalidRequest("prompt_embeds are the whole prompt: leave out prompt_embedding_table")
            return PromptTuningConfig(embedding_table=client.prompt_embeds)
        if table is None:
            # Clients of TensorRT-LLM send a 0 for each token that is no row of a table.
            if any(extra_ids or ()) or client.prompt_vocab_size is not None:
                raise InvalidRequest(
                    "prompt_vocab_size and prompt_table_extra_ids need prompt_embedding_table: send all or none"
                )
            return None
        if client.prompt_vocab_size not in (None, table.num_rows):
            raise InvalidRequest(
                f"prompt_vocab_size must be the number of rows of prompt_embedding_table, {table.num_rows}, "
                f"got {client.prompt_vocab_size}"
            )
        if extra_ids is not None and len(extra_ids) == 1:
            extra_ids = [extra_ids[0] if token >= self.limits.vocab_size else 0 for token in token_ids]
        return PromptTuningConfig(embedding_table=table, input_token_extra_ids=extra_ids or [])

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
        """Those that the client names."""
        if client.end_id is None or client.end_id == NEVER:
            return []
        if not 0 <= client.end_id < self.limits.vocab_size:
            raise InvalidRequest(
                f"end_id must be -1 (none) or a token id below {self.limits.vocab_size}, got {client.end_id}"
            )
        return [client.end_id]


def _file(image: str) -> bytes:
    try:
        return base64.b64decode(image, validate=True)
    except (binascii.Error, ValueError):
        raise InvalidRequest("image must hold files in base64") from None


def _lora_config(client: ClientRequest) -> LoraConfig | None:
    if client.lora_task_id is None:
        if client.lora_weights is not None or client.lora_config is not None:
            raise InvalidRequest("lora_weights and lora_config need lora_task_id: the number of their adapter")
        return None
    return LoraConfig.of(client.lora_task_id, client.lora_weights, client.lora_config)


def _guide(client: ClientRequest, limits: RequestLimits) -> Guide | None:
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
    library = limits.guided_decoding_backend
    if not library.is_meant_by(client.guide_backend or ""):
        raise InvalidRequest(f"a request cannot choose the library that follows its guide: {library.value} does")
    try:
        white_space = WhiteSpace(client.guide_white_space or WhiteSpace.DUMPS)
    except ValueError:
        known = ", ".join(each.value for each in WhiteSpace)
        raise InvalidRequest(f"guided_decoding_white_space must be one of {known}") from None
    text, is_strict = client.guide or "", client.guide_is_strict
    params = GuidedDecodingParams(guide_type=guide_type, guide=text, white_space=white_space, is_strict=is_strict)
    return Guide(params=params)


def _ngram_config(client: ClientRequest) -> NGramDecodingConfig | None:
    """None = as the engine's configuration has it."""
    max_draft_len, size = client.max_draft_len, client.max_matching_ngram_size
    if max_draft_len is None:
        if size is not None:
            raise InvalidRequest("max_matching_ngram_size needs max_draft_len")
        return None
    return NGramDecodingConfig(
        max_draft_len=max_draft_len, max_matching_ngram_size=DEFAULT_NGRAM_SIZE if size is None else size
    )


def _draft_tokens(client: ClientRequest) -> ExternalDraftTokensConfig | None:
    tokens, threshold = client.draft_input_ids or [], client.draft_acceptance_threshold
    logits = client.draft_logits if client.draft_logits is not None and client.draft_logits.size else None
    if not tokens:
        if logits is not None or threshold is not None:
            raise InvalidRequest("draft_logits and draft_acceptance_threshold need draft_input_ids: the drafts")
        return None
    if logits is not None and len(logits) != len(tokens):
        raise InvalidRequest(f"draft_logits has {len(logits)} rows, but draft_input_ids {len(tokens)} drafts")
    return ExternalDraftTokensConfig(
        tokens=tokens,
        logits=b"" if logits is None else logits.astype("<f4", copy=False).tobytes(),
        acceptance_threshold=threshold,
    )


def _lookahead_config(client: ClientRequest) -> LookaheadDecodingConfig | None:
    """None = as the engine's configuration has it."""
    window, ngram = client.lookahead_window_size, client.lookahead_ngram_size
    verification = client.lookahead_verification_set_size
    if window is None and ngram is None and verification is None:
        return None
    if window is None or ngram is None or verification is None:
        raise InvalidRequest(
            "lookahead_window_size, lookahead_ngram_size and lookahead_verification_set_size belong together: send all "
            "or none"
        )
    return LookaheadDecodingConfig(max_window_size=window, max_ngram_size=ngram, max_verification_set_size=verification)


def _retention(client: ClientRequest) -> KvCacheRetentionConfig | None:
    """None unless the client says something. -1 stands for no end and no duration."""
    starts, ends = client.retention_starts or [], client.retention_ends or []
    priorities = client.retention_priorities or []
    durations = client.retention_durations_ms or [NONE] * len(starts)
    decode_priority, decode_duration = client.retention_decode_priority, client.retention_decode_duration_ms
    if len({len(starts), len(ends), len(priorities), len(durations)}) > 1:
        raise InvalidRequest(
            "retention_token_range_starts, _ends, _priorities and _durations_ms must have an entry for each range; "
            f"they have {len(starts)}, {len(ends)}, {len(priorities)} and {len(durations)}"
        )
    if not starts and decode_priority is None and decode_duration is None:
        return None
    return KvCacheRetentionConfig(
        token_range_retention_configs=[
            TokenRangeRetentionConfig(
                token_start=start, token_end=_unless_none(end), priority=priority, duration_ms=_unless_none(duration)
            )
            for start, end, priority, duration in zip(starts, ends, priorities, durations, strict=True)
        ],
        decode_retention_priority=DEFAULT_PRIORITY if decode_priority is None else decode_priority,
        decode_duration_ms=None if decode_duration is None else _unless_none(decode_duration),
    )


def _unless_none(value: int) -> int | None:
    return None if value == NONE else value
