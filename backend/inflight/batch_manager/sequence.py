"""The state of one continuation of a request: its tokens, how many have keys and values in the cache, and its blocks.

A record with little behaviour of its own: the Scheduler changes its state, the KVCacheManager gives it blocks, the
GptManager makes responses from it. Times are recorded for the client and never affect a decision.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

import msgspec

from inflight.batch_manager.beam_search import num_candidates
from inflight.batch_manager.gathered_tensors import GatheredTensors
from inflight.batch_manager.kept_states import KeptStates
from inflight.batch_manager.speculation.speculation import Speculation
from inflight.context_phase import RequestType
from inflight.errors import RequestError
from inflight.request import Request
from inflight.result import FinishReason, PerfMetrics
from inflight.sampling_config import SamplingConfig
from inflight.scheduler_output import BEAM_LOG_PROBS, LOG_PROBS, NO_SLOT, NewSequence, PostProcessing
from inflight.sequence_seed import sequence_seed
from inflight.speculative_decoding import NO_SPECULATION, SpeculativeDecodingConfig

if TYPE_CHECKING:
    from inflight.batch_manager.beam_group import BeamGroup


Order = tuple[float, int, int]
"""The smallest comes first: by the negative priority of the request, which is -inf for those that have started if none
may displace them; then those that have started (0) before those that have not (1); then by number."""


class SequenceStatus(enum.Enum):
    """WAITING -> RUNNING -> FINISHED, with PAUSED -> RUNNING in between; any state may go to FINISHED."""

    WAITING = "waiting"
    """Has not started: it never had a row or blocks."""
    RUNNING = "running"
    """Has a row of the runner and blocks."""
    PAUSED = "paused"
    """Its row and blocks were taken back; it continues later by computing all its tokens again."""
    FINISHED = "finished"
    """Has no row and no blocks; results of outstanding steps are dropped."""


# Python 3.11 takes 70 ns to look up a member of an enumeration: for each row and step too much.
FINISHED = SequenceStatus.FINISHED
NOT_FINISHED = FinishReason.NOT_FINISHED


class Sequence:
    """One continuation of one request.

    `num_computed_tokens` counts tokens whose keys and values are in the cache or will be once the launched steps are
    done; `num_pending` counts tokens of launched steps that are not on the host yet. What is left to compute is
    therefore `len(token_ids) + num_pending - num_computed_tokens` tokens: the rest of a prompt, or one.
    """

    __slots__ = (
        "adapter_slot",
        "arrival_time_ns",
        "beams",
        "block_hashes",
        "block_ids",
        "cum_log_prob",
        "end_ids",
        "error",
        "finish_reason",
        "first_iter",
        "first_scheduled_time_ns",
        "first_token_time_ns",
        "gathered",
        "index",
        "is_guided",
        "is_placed",
        "last_iter",
        "last_token_time_ns",
        "log_probs",
        "max_length",
        "min_length",
        "num_allocated_blocks",
        "num_arrived_tokens",
        "num_cached_at_start",
        "num_cached_blocks",
        "num_computed_tokens",
        "num_decoding_iters",
        "num_missed_blocks",
        "num_pending",
        "num_prefill_tokens",
        "num_prompt_tokens",
        "num_returned_log_probs",
        "num_returned_tokens",
        "num_reused_blocks",
        "order",
        "passed_blocks",
        "prefix_identity",
        "request",
        "row",
        "siblings",
        "speculation",
        "states",
        "status",
        "stop_words",
        "tail_blocks",
        "token_ids",
        "wants_log_probs",
    )

    def __init__(
        self,
        request: Request,
        *,
        max_seq_len: int,
        index: int = 0,
        arrival_time_ns: int = 0,
        speculative_decoding: SpeculativeDecodingConfig = NO_SPECULATION,
        prefix_identity: bytes | None = None,
    ) -> None:
        """`speculative_decoding`: the engine's, for a request that does not say. `prefix_identity`: the request's, if
        known."""
        self.request = request
        self.prefix_identity = request.prefix_identity if prefix_identity is None else prefix_identity
        """The request's. Kept, because a table of embeddings takes tens of milliseconds to digest."""
        self.index = index
        """Which of the request's continuations this is."""
        delivered = request.delivered(index)
        self.token_ids = [*request.input_token_ids, *delivered.token_ids]
        """Prompt and generated tokens that are known on the host."""
        self.num_prompt_tokens = len(request.input_token_ids)
        # Its first free place counts where nothing is sampled, too.
        num_new = 1 if request.request_type is RequestType.CONTEXT_ONLY else max(request.max_tokens, 1)
        self.max_length = min(self.num_prompt_tokens + num_new, max_seq_len)
        """Number of tokens, the prompt included, at which it ends with finish reason LENGTH."""
        self.min_length = self.num_prompt_tokens + request.sampling_config.min_tokens
        """Number of tokens, the prompt included, before which neither end tokens nor stop words end it."""
        self.end_ids = frozenset(request.end_ids)
        self.stop_words = _by_last_token(request.stop_words)
        self.wants_log_probs = request.output_config.return_log_probs
        self.gathered = GatheredTensors.wanted_by(
            request.output_config, self.num_prompt_tokens, with_prompt=index == 0 and not delivered.token_ids
        )
        """Tensors that it asks for; None = none."""
        self.adapter_slot = NO_SLOT
        self.is_guided = request.guided_decoding_params is not None or bool(request.logits_post_processor_name)
        """Whether it samples only once the host knows its last token, which a grammar's mask or a logits post-processor
        depends on."""
        self.speculation = Speculation.wanted_by(request, speculative_decoding)
        """None = no step verifies drafts for it."""
        self.siblings: tuple[Sequence, ...] = ()
        """All sequences of its request, itself included; empty for the only one, and once it is finished."""

        self.beams: BeamGroup | None = None
        """The beam search that it is part of. It then has no siblings."""

        # Written by the Scheduler.
        self.status = SequenceStatus.FINISHED if delivered.is_finished else SequenceStatus.WAITING
        self.order: Order = (0.0, 0, 0)
        """Place in the waiting queue and in the batch."""
        self.row = -1
        self.is_placed = False
        """The runner was told that this sequence holds the row."""
        self.num_computed_tokens = 0
        self.num_prefill_tokens = len(self.token_ids)
        """Tokens to prefill before it decodes: those that were known on the host when it got its row."""
        self.num_pending = 0
        self.num_decoding_iters = delivered.num_iterations
        """Iterations that brought it tokens, on these ranks or on those before a replay."""
        self.log_probs: list[float] = []
        """One for each token that was generated by this engine, if the request asks for them."""
        self.cum_log_prob = delivered.cum_log_prob
        self.finish_reason = FinishReason.NOT_FINISHED
        self.error: RequestError | None = None
        self.arrival_time_ns = arrival_time_ns
        self.first_scheduled_time_ns = 0
        self.first_token_time_ns = 0
        self.last_token_time_ns = 0

        # Written by the KVCacheManager.
        self.num_arrived_tokens = request.num_arrived_tokens
        """Leading tokens of the prompt that it may start on because other ranks have computed them; 0 once a sequence
        of its request has."""
        self.block_ids: list[int] = []
        """Of each block of tokens one for each group of layers that has blocks of its own, see KVCacheManager."""
        self.block_hashes: list[bytes] = []
        """Hashes of its leading full blocks, as far as they were needed."""
        self.num_cached_blocks = 0
        """Number of leading blocks that were entered into the table of cached prefixes, or came from it."""
        self.passed_blocks: list[int] = []
        """Of each group of layers, how many leading blocks its tokens to come do not see; empty = none."""
        self.tail_blocks: list[int] = []
        """A sibling's block, of each group of layers, held until its content is copied into this sequence's own behind
        `block_ids`; empty = none."""
        self.states = KeptStates()
        self.num_allocated_blocks = 0
        self.num_reused_blocks = 0
        self.num_missed_blocks = 0
        self.num_cached_at_start: int | None = None
        """Tokens whose keys and values were in the cache when it was started first; None before."""

        # Written by the GptManager.
        self.first_iter = 0
        self.last_iter = 0
        """Numbers of the iterations that brought its first and its last token so far; 0 = none has."""

        # Written by the ActiveRequest.
        self.num_returned_tokens = len(delivered.token_ids)
        """Generated tokens that the client has: those of earlier Results, and those delivered before a replay."""
        self.num_returned_log_probs = 0

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def is_finished(self) -> bool:
        return self.status is FINISHED

    @property
    def is_pooled(self) -> bool:
        """Whether nothing is sampled: it ends once its prompt is computed."""
        return self.request.max_tokens == 0

    @property
    def is_decoding(self) -> bool:
        """Whether its prefill is complete, or will be once the launched steps are done."""
        return self.num_computed_tokens >= self.num_prefill_tokens

    @property
    def outputs(self) -> tuple[str, ...]:
        """What the runner must report of it besides its tokens."""
        if self.beams is not None:
            return (BEAM_LOG_PROBS,)
        log_probs = (LOG_PROBS,) if self.wants_log_probs else ()
        return log_probs if self.gathered is None else (*log_probs, *self.gathered.outputs)

    @property
    def members(self) -> tuple[Sequence, ...]:
        """Those that start, pause and end together with it, in the order of their rows."""
        return (self,) if self.beams is None else self.beams.sequences

    @property
    def returned(self) -> tuple[Sequence, ...]:
        """Those that are answered when it ends."""
        return (self,) if self.beams is None else self.beams.returned

    @property
    def has_pending(self) -> bool:
        """Whether a launched step has results for it, or for a member of its group, that the host does not know."""
        return self.num_pending > 0 if self.beams is None else self.beams.has_pending

    @property
    def export_key(self) -> bytes:
        """Under which the blocks of its prompt are kept for other ranks; empty = they are not, or a sibling's are."""
        transfer = self.request.context_transfer
        is_first = not self.siblings or self.siblings[0] is self
        return transfer.export_key if transfer is not None and is_first else b""

    @property
    def sampling_config(self) -> SamplingConfig:
        """The request's sampling configuration, with the seed of this sequence's own stream."""
        config = self.request.sampling_config
        if self.index == 0 or self.beams is not None:
            return config
        return msgspec.structs.replace(config, seed=sequence_seed(config.seed, self.index))

    @property
    def num_alternatives(self) -> int:
        """How many of the likeliest tokens are wanted."""
        if self.beams is None:
            return self.request.output_config.num_log_probs
        return num_candidates(len(self.beams.sequences), len(self.end_ids))

    @property
    def needs_history(self) -> bool:
        """Whether the tokens that are allowed next depend on all those before."""
        return bool(self.request.bad_words or self.request.sampling_config.no_repeat_ngram_size)

    @property
    def num_prefix_tokens(self) -> int:
        """Most leading tokens whose keys and values can be a sibling's: the prompt, but for one token to compute."""
        return min(self.num_prompt_tokens, len(self.token_ids) - 1)

    def append(self, token_ids: list[int], log_probs: list[float] | None, now_ns: int) -> FinishReason:
        """Add a step's tokens up to the one that ends the sequence; that one belongs to the output as well."""
        if self.first_token_time_ns == 0:
            self.first_token_time_ns = now_ns
        self.last_token_time_ns = now_ns
        self.num_decoding_iters += 1
        reason = NOT_FINISHED
        for index, token_id in enumerate(token_ids):
            self.token_ids.append(token_id)
            if log_probs is not None:
                self.log_probs.append(log_probs[index])
                self.cum_log_prob += log_probs[index]
            reason = self.reason_to_finish()
            if reason:
                break
        return reason

    def take_back(self, num_drafts: int, num_accepted: int, num_new: int, num_running: int, guesses: list[int]) -> None:
        """A step has verified drafts, and its `num_new` tokens were appended. What it computed behind the last accepted
        one does not count: later tokens will take these slots. `num_running`: sequences in the batch. `guesses`: see
        StepOutput.guesses."""
        assert self.speculation is not None
        self.speculation.account(num_drafts, num_accepted, len(self.token_ids), num_running)
        self.speculation.learn(self.token_ids, num_new, guesses)
        if self.status is SequenceStatus.RUNNING:
            self.num_computed_tokens = len(self.token_ids) - 1

    def describe(self) -> NewSequence:
        """All that the runner must know of it when it takes its row."""
        tuning = self.request.prompt_tuning_config
        return NewSequence(
            row=self.row,
            token_ids=list(self.token_ids),
            num_prompt_tokens=self.num_prompt_tokens,
            block_ids=list(self.block_ids),
            sampling_config=self.sampling_config,
            end_ids=self.request.end_ids,
            bad_words=self.request.bad_words,
            outputs=self.outputs,
            num_log_probs=self.num_alternatives,
            adapter_slot=self.adapter_slot,
            second_text_start=self.request.second_text_start,
            guided_decoding_params=self.request.guided_decoding_params,
            post_processing=self._post_processing,
            embedding_table=None if tuning is None else tuning.embedding_table,
            weighed_drafts=self.request.weighed_drafts,
        )

    @property
    def _post_processing(self) -> PostProcessing | None:
        request = self.request
        if not request.logits_post_processor_name:
            return None
        return PostProcessing(request.logits_post_processor_name, request.request_id, request.client_id)

    @property
    def num_cached_prompt_tokens(self) -> int:
        """Of the prompt, when it was started first."""
        return min(self.num_cached_at_start or 0, self.num_prompt_tokens)

    def reason_to_finish(self) -> FinishReason:
        """Why its newest token ends it, or NOT_FINISHED. End tokens count only after `min_tokens` others."""
        length = len(self.token_ids)
        if self.token_ids[-1] in self.end_ids and length > self.min_length:
            return FinishReason.END_ID
        if self.stop_words and length >= self.min_length and self._matches_stop_word():
            return FinishReason.STOP_WORDS
        if length >= self.max_length:
            return FinishReason.LENGTH
        return NOT_FINISHED

    def _matches_stop_word(self) -> bool:
        """True if the generated tokens end with one of the request's stop words."""
        words = self.stop_words.get(self.token_ids[-1])
        if words is None:
            return False
        return any(len(word) <= self.num_output_tokens and self.token_ids[-len(word) :] == word for word in words)

    def perf_metrics(self) -> PerfMetrics:
        """The metrics so far. Blocks that a sequence gets again after a pause are counted again."""
        return PerfMetrics(
            arrival_time_ns=self.arrival_time_ns,
            first_scheduled_time_ns=self.first_scheduled_time_ns,
            first_token_time_ns=self.first_token_time_ns,
            last_token_time_ns=self.last_token_time_ns,
            kv_cache_alloc_total_blocks=self.num_allocated_blocks + self.num_reused_blocks,
            kv_cache_alloc_new_blocks=self.num_allocated_blocks,
            kv_cache_reused_blocks=self.num_reused_blocks,
            kv_cache_missed_blocks=self.num_missed_blocks,
            num_cached_tokens=self.num_cached_prompt_tokens,
            total_draft_tokens=self.speculation.num_draft_tokens if self.speculation is not None else 0,
            total_accepted_draft_tokens=self.speculation.num_accepted_tokens if self.speculation is not None else 0,
            first_iter=self.first_iter if self.beams is None else 0,
            last_iter=self.last_iter,
        )


def _by_last_token(words: list[list[int]]) -> dict[int, list[list[int]]]:
    """Stop words by their last token, so that one look-up shows for most tokens that they end no stop word."""
    table: dict[int, list[list[int]]] = {}
    for word in words:
        table.setdefault(word[-1], []).append(word)
    return table
