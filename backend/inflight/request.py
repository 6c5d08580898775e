"""A request as every rank receives it from the server side: an immutable value.

Does not know tritonserver's tensors, text, or how tokens are computed. Encoded with msgpack by :mod:`msgspec`; fields
that have their default value are not encoded.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from inflight.context_phase import ContextPhaseParams, ContextTransfer, RequestType
from inflight.guided_decoding import GuidedDecodingParams
from inflight.kv_cache_retention import KvCacheRetentionConfig
from inflight.lora import LoadedAdapter, LoraConfig, LoRARequest
from inflight.output_config import OutputConfig
from inflight.prompt_tuning import PromptTuningConfig
from inflight.replay import NOTHING_DELIVERED, DeliveredSequence, Replay
from inflight.sampling_config import SamplingConfig
from inflight.speculative_decoding import (
    DraftTargetDecodingConfig,
    ExternalDraftTokensConfig,
    LookaheadDecodingConfig,
    NGramDecodingConfig,
)

MAX_ALLOTTED_MS = 2**31 - 1
"""That a client may ask for, 24 days."""


class Request(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One prompt to be continued."""

    request_id: int = 0
    """uint64, unique among the requests in flight of all fronts of the engine. 0: Executor.enqueue_request draws it."""
    input_token_ids: list[int]
    max_tokens: int
    """At most this many new tokens, >= 1; 0 where the engine gives vectors or scores of prompts (see
    RequestLimits.pooled)."""
    streaming: bool = False
    """True: a result per step; False: one result with all tokens at the end."""
    sampling_config: SamplingConfig = SamplingConfig()
    output_config: OutputConfig = OutputConfig()
    end_ids: list[int] = []
    """Any of these tokens ends the sequence (finish reason END_ID); empty = never."""
    stop_words: list[list[int]] = []
    """The sequence ends as soon as its last tokens equal one of these."""
    bad_words: list[list[int]] = []
    """Token sequences that must not occur in the output: their last token is not sampled after the others."""
    guided_decoding_params: GuidedDecodingParams | None = None
    """The grammar that the output follows; None = any output. An output that is cut by `max_tokens` is the beginning of
    one that does. Needs `end_ids`, which are sampled only where the grammar may end, and then whatever `min_tokens` and
    `bad_words` leave; where these leave nothing that the grammar allows, the grammar alone decides."""
    ngram_config: NGramDecodingConfig | None = None
    """Prompt lookup; None = as the engine's configuration has it. It changes no token, so a request that it does not
    serve (a decaying top_p, beams, a logits post-processor, a prompt with embeddings) is computed without."""
    lookahead_config: LookaheadDecodingConfig | None = None
    """Lookahead decoding, where neither given drafts nor prompt lookup have a guess; None = as the engine's
    configuration has it. Left out for the same requests as prompt lookup."""
    draft_target_config: DraftTargetDecodingConfig | None = None
    """The same of the engine's draft model, which serves no request with a grammar either."""
    external_draft_tokens_config: ExternalDraftTokensConfig | None = None
    """What the client expects the output to begin with."""
    logits_post_processor_name: str = ""
    """One of the engine's logits post-processors (see inflight.logits_post_processor), which changes the logits of each
    of the request's tokens before it is chosen; "" = none. It comes before biases, penalties and a grammar."""
    priority: float = 0.5
    """0 to 1; higher ones start first, equal ones in order of arrival."""
    allotted_time_ms: int = 0
    """The request is ended this long after it was accepted, whether it is waiting or active, and also if it
    waits for new ranks; 0 = no limit."""
    tenant: int = 0
    """Number of the client among those of its front: on the leader all clients take turns. A front gives one only to
    clients that it can tell apart whatever they say of themselves; 0 = it cannot."""
    client_id: str = ""
    """The client's own id of the request. Every Response repeats it; the engine only uses it in messages."""
    return_all_generated_tokens: bool = False
    """True: each streamed Result holds all tokens generated so far, with their log probabilities, not only new ones.
    Those of a beam search do so in any case, because beams are given up for others."""
    cache_salt: str = ""
    """Cached prefixes are shared only between requests with the same salt."""
    kv_cache_retention_config: KvCacheRetentionConfig | None = None
    """Which of its blocks are given up first when memory is needed, once no sequence uses them; None = as any others.
    The last request that says something about a shared block decides."""
    num_return_sequences: int = 1
    """Independent continuations of the prompt, which is computed once for all of them. Each samples from a stream of
    its own, see `sequence_seed`; greedy ones are all equal. Of a beam search: how many of its hypotheses are returned,
    at most `beam_width`."""
    lora_request: LoRARequest | None = None
    """The low-rank adapter, by name, that its tokens go through; at most one of this and `lora_config`."""
    lora_config: LoraConfig | None = None
    """The same by number."""
    lora_order: Literal["", "load", "unload"] = ""
    """load, unload: not a prompt, but an order to load that adapter now, or to forget it. It is answered, without
    tokens, when that is done; requests that use the adapter already keep it."""
    loaded_adapter: LoadedAdapter | None = None
    """What the leader has found for `lora_request` or `lora_config`, instead of which ranks get it. Set by the leader
    alone."""
    replay: Replay | None = None
    """Set by the front, when new ranks take the request over from ranks that died, and by the server for a request that
    is resumed. What the client has received is not returned again."""
    second_text_start: int = 0
    """Where the second text of a pair begins in the prompt, for encoders that embed which text a token is of; 0 = the
    prompt is one text."""
    prompt_tuning_config: PromptTuningConfig | None = None
    """Embeddings of tokens of its own, whose ids in `input_token_ids` begin at the size of the vocabulary."""
    request_type: RequestType = RequestType.CONTEXT_AND_GENERATION
    """CONTEXT_ONLY: each sequence ends with its first token (finish reason LENGTH), and if that does not end the whole
    output, the last Result has ContextPhaseParams. GENERATION_ONLY: a request with these, which is otherwise the same.
    """
    context_phase_params: ContextPhaseParams | None = None
    """Of a GENERATION_ONLY request. What cannot be fetched any more is computed: its tokens are the same."""
    context_transfer: ContextTransfer | None = None
    """What the leader has arranged for these. Set by the leader alone."""

    @property
    def goes_on(self) -> bool:
        """Whether the engine has accepted it before, on other ranks."""
        return self.replay is not None and not self.replay.is_resumed

    @property
    def follows_each_token(self) -> bool:
        """Whether what tokens are chosen by must see each of them before the next: no drafts can be verified then."""
        return bool(self.logits_post_processor_name) or self.sampling_config.follows_each_token

    @property
    def weighed_drafts(self) -> ExternalDraftTokensConfig | None:
        """Given drafts that are accepted by their probability; None = there are none, or they change no token: without
        a threshold the output of greedy sampling is the likeliest tokens in any case."""
        given = self.external_draft_tokens_config
        if given is None or not given.tokens:
            return None
        is_random = self.sampling_config.temperature > 0
        return given if given.acceptance_threshold is not None or (given.logits and is_random) else None

    @property
    def num_sequences(self) -> int:
        """Rows of a batch that it takes: one for each of its sequences, or beams."""
        return max(self.num_return_sequences, self.sampling_config.beam_width)

    @property
    def num_arrived_tokens(self) -> int:
        """Leading tokens of the prompt whose keys and values other ranks have computed. Beams compute their own: they
        share whole blocks, and part within the last one."""
        if self.context_transfer is None or self.sampling_config.beam_width > 1:
            return 0
        return self.context_transfer.num_arrived_tokens

    def delivered(self, sequence_index: int) -> DeliveredSequence:
        """What the client had of a sequence before these ranks began it."""
        sequences = [] if self.replay is None else self.replay.sequences
        return sequences[sequence_index] if sequences else NOTHING_DELIVERED

    @property
    def prefix_identity(self) -> bytes:
        """What the keys and values of its tokens depend on besides the tokens, and who may share them: only requests
        with equal ones share cached prefixes."""
        identity = self.cache_salt.encode()
        # No byte of UTF-8 is 0xff, so no salt looks like what follows, which has the same length in every request.
        if self.prompt_tuning_config is not None:
            identity += b"\xffP" + self.prompt_tuning_config.digest()
        if self.loaded_adapter is not None:
            identity += b"\xffadapter" + self.loaded_adapter.digest
        return identity
