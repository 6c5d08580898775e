"""What the engine tracks of one continuation: its tokens, how far its keys and values are computed, where they lie.

A record without behaviour of its own beyond arithmetic: the Scheduler moves it from state to state, the KVCacheManager
gives it blocks, the GptManager answers from it. Times are written down for the client; none decides anything.
"""

from __future__ import annotations

import enum

import msgspec

from inflight.batch_manager.gathered_tensors import GatheredTensors
from inflight.errors import RequestError
from inflight.request import MAX_SEED, Request, SamplingConfig
from inflight.result import FinishReason, PerfMetrics
from inflight.scheduler_output import LOG_PROBS, NO_SLOT


class SequenceStatus(enum.Enum):
    """WAITING -> RUNNING -> FINISHED, with PAUSED -> RUNNING in between; any state may go to FINISHED."""

    WAITING = "waiting"
    """Has no row, no blocks, and never had."""
    RUNNING = "running"
    """Has a row of the runner and blocks."""
    PAUSED = "paused"
    """Gave its row and blocks back; continues later by computing all its tokens again."""
    FINISHED = "finished"
    """Holds nothing; results of steps that are still under way are dropped."""


class Sequence:
    """One continuation of one request.

    `num_computed_tokens` counts tokens whose keys and values are in the cache or will be once the launched steps are
    done; `num_pending` counts tokens of launched steps that are not on the host yet. What is left to compute is
    therefore `len(token_ids) + num_pending - num_computed_tokens` tokens: the rest of a prompt, or one.
    """

    __slots__ = (
        "adapter_slot",
        "arrival_time_ns",
        "block_hashes",
        "block_ids",
        "cum_log_prob",
        "end_ids",
        "error",
        "finish_reason",
        "first_scheduled_time_ns",
        "first_token_time_ns",
        "gathered",
        "index",
        "last_token_time_ns",
        "log_probs",
        "mask_slot",
        "max_length",
        "num_allocated_blocks",
        "num_cached_blocks",
        "num_computed_tokens",
        "num_missed_blocks",
        "num_pending",
        "num_prefill_tokens",
        "num_prompt_tokens",
        "num_returned_log_probs",
        "num_returned_tokens",
        "num_reused_blocks",
        "order",
        "request",
        "row",
        "status",
        "stop_words",
        "token_ids",
        "wants_log_probs",
    )

    def __init__(self, request: Request, *, max_seq_len: int, index: int = 0, arrival_time_ns: int = 0) -> None:
        self.request = request
        self.index = index
        """Which of the request's continuations this is."""
        self.token_ids = [*request.input_token_ids, *request.generated_token_ids]
        """Prompt and generated tokens that are known on the host."""
        self.num_prompt_tokens = len(request.input_token_ids)
        self.max_length = min(self.num_prompt_tokens + request.max_tokens, max_seq_len)
        """It ends with finish reason LENGTH when it has this many tokens."""
        self.end_ids = frozenset(request.end_ids)
        self.stop_words = _by_last_token(request.stop_words)
        self.wants_log_probs = request.output_config.return_log_probs
        self.gathered = GatheredTensors.wanted_by(
            request.output_config, self.num_prompt_tokens, with_prompt=index == 0 and not request.generated_token_ids
        )
        """Tensors that it asks for; None = none."""
        self.adapter_slot = NO_SLOT
        self.mask_slot = NO_SLOT

        # Written by the Scheduler.
        self.status = SequenceStatus.WAITING
        self.order: tuple[int, float, int] = (0, 0.0, 0)
        """Place in the waiting queue, smallest first."""
        self.row = -1
        self.num_computed_tokens = 0
        self.num_prefill_tokens = len(self.token_ids)
        """Tokens that are computed from the host's list before it decodes: those known when it took its row."""
        self.num_pending = 0
        self.log_probs: list[float] = []
        """One for each token that was generated here, if asked for."""
        self.cum_log_prob = request.cum_log_prob
        self.finish_reason = FinishReason.NOT_FINISHED
        self.error: RequestError | None = None
        self.arrival_time_ns = arrival_time_ns
        self.first_scheduled_time_ns = 0
        self.first_token_time_ns = 0
        self.last_token_time_ns = 0

        # Written by the KVCacheManager.
        self.block_ids: list[int] = []
        self.block_hashes: list[bytes] = []
        """Of its leading full blocks, as far as they were needed."""
        self.num_cached_blocks = 0
        """Leading blocks that were offered to the table of cached prefixes, or came from it."""
        self.num_allocated_blocks = 0
        self.num_reused_blocks = 0
        self.num_missed_blocks = 0

        # Written by the ActiveRequest.
        self.num_returned_tokens = len(request.generated_token_ids)
        """Generated tokens that the client has: those of earlier Results, and those it had before a replay."""
        self.num_returned_log_probs = 0

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def is_finished(self) -> bool:
        return self.status is SequenceStatus.FINISHED

    @property
    def is_decoding(self) -> bool:
        """All tokens that were known when it took its row are computed, or will be once the launched steps are done."""
        return self.num_computed_tokens >= self.num_prefill_tokens

    @property
    def outputs(self) -> tuple[str, ...]:
        """What the runner must report of it besides its tokens."""
        log_probs = (LOG_PROBS,) if self.wants_log_probs else ()
        return log_probs if self.gathered is None else (*log_probs, *self.gathered.outputs)

    @property
    def sampling_config(self) -> SamplingConfig:
        """The request's, with a seed of this sequence's own."""
        config = self.request.sampling_config
        if self.index == 0:
            return config
        return msgspec.structs.replace(config, seed=(config.seed + self.index) & MAX_SEED)

    def reason_to_finish(self) -> FinishReason:
        """Whether its newest token ends it. End tokens count only after `min_tokens` others."""
        token_id, num_output_tokens = self.token_ids[-1], len(self.token_ids) - self.num_prompt_tokens
        min_tokens = self.request.sampling_config.min_tokens
        if token_id in self.end_ids and num_output_tokens > min_tokens:
            return FinishReason.END_ID
        if self.stop_words and num_output_tokens >= min_tokens and self._matches_stop_word():
            return FinishReason.STOP_WORDS
        if len(self.token_ids) >= self.max_length:
            return FinishReason.LENGTH
        return FinishReason.NOT_FINISHED

    def _matches_stop_word(self) -> bool:
        """True if the generated tokens end with one of the request's stop words."""
        words = self.stop_words.get(self.token_ids[-1])
        if words is None:
            return False
        return any(len(word) <= self.num_output_tokens and self.token_ids[-len(word) :] == word for word in words)

    def perf_metrics(self) -> PerfMetrics:
        """The account so far; blocks count again each time the sequence takes them up after a pause."""
        return PerfMetrics(
            arrival_time_ns=self.arrival_time_ns,
            first_scheduled_time_ns=self.first_scheduled_time_ns,
            first_token_time_ns=self.first_token_time_ns,
            last_token_time_ns=self.last_token_time_ns,
            kv_cache_alloc_total_blocks=self.num_allocated_blocks + self.num_reused_blocks,
            kv_cache_alloc_new_blocks=self.num_allocated_blocks,
            kv_cache_reused_blocks=self.num_reused_blocks,
            kv_cache_missed_blocks=self.num_missed_blocks,
        )


def _by_last_token(words: list[list[int]]) -> dict[int, list[list[int]]]:
    """Stop words by their last token, so that most tokens are cleared by one look-up."""
    table: dict[int, list[list[int]]] = {}
    for word in words:
        table.setdefault(word[-1], []).append(word)
    return table
