"""A request as every rank receives it from the server side: an immutable value.

Does not know tritonserver's tensors, text, or how tokens are computed. Encoded with msgpack by :mod:`msgspec`; fields
that have their default value are not encoded.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from inflight.guided_decoding import GuidedDecodingParams
from inflight.lora import LoadedAdapter, LoraConfig, LoRARequest
from inflight.output_config import OutputConfig
from inflight.sampling_config import SamplingConfig


class Request(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One prompt to be continued."""

    request_id: int = 0
    """uint64, unique among the requests in flight of all fronts of the engine. 0: Executor.enqueue_request draws it."""
    input_token_ids: list[int]
    max_tokens: int
    """At most this many new tokens, >= 1."""
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
    priority: float = 0.5
    """0 to 1; higher ones start first, equal ones in order of arrival."""
    allotted_time_ms: int = 0
    """The request is ended this long after the leader received it, whether it is waiting or active; 0 = no limit."""
    client_id: str = ""
    """The client's own id of the request. Every Response repeats it; the engine only uses it in messages."""
    return_all_generated_tokens: bool = False
    """True: each streamed Result holds all tokens generated so far, with their log probabilities, not only new ones."""
    cache_salt: str = ""
    """Cached prefixes are shared only between requests with the same salt."""
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
    generated_token_ids: list[int] = []
    """Set when ranks take over a request from ranks that died: tokens that the client has already received. Generation
    continues after them with the tokens that the earlier ranks would have generated. They count as generated tokens,
    not as prompt, wherever that matters, and are not returned again."""
    cum_log_prob: float = 0.0
    """Sum of the log probabilities of `generated_token_ids`."""

    @property
    def num_sequences(self) -> int:
        """Rows of a batch that it takes: one for each of its sequences, or beams."""
        return max(self.num_return_sequences, self.sampling_config.beam_width)

    @property
    def prefix_identity(self) -> bytes:
        """What the keys and values of its tokens depend on besides the tokens, and who may share them: only requests
        with equal ones share cached prefixes."""
        identity = self.cache_salt.encode()
        if self.loaded_adapter is not None:
            # No byte of UTF-8 is 0xff, so no salt looks like this.
            identity += b"\xffadapter" + self.loaded_adapter.digest
        return identity
