"""Any history of requests, stops, failing steps and time that passes, on two ranks at once.

Requests fork and search with beams, are paused where the policy allows it, share prefixes in whole blocks and within
them, and keep their blocks for longer or shorter; blocks go to host memory and come back. Some end with their context
phase, and of others the prompt's blocks come from elsewhere.

Held after every step: the books of rows and blocks balance (used and free blocks are all blocks, on the device and on
the host), both ranks decided the same, no request got two final responses, and whoever followed the events knows what
is cached where. Held at the end of every history: everybody was answered within finitely many steps, with exactly the
tokens that the request gets alone, and all memory is free.

A feature that makes rows of another kind adds its options to `submit`, and to `start` what the engine must have for it.
INFLIGHT_FUZZ_EXAMPLES sets the number of histories; `make test-full` runs 2,000.
"""

from __future__ import annotations

import os

import pytest
from cache_model import CacheModel
from fake_network import states_of
from fake_runner import EMPTY
from harness import Harness, drafts_for, make_request
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from msgspec import structs

from inflight.batch_manager.event_buffer import EventBuffer
from inflight.block_groups import BlockGroups
from inflight.config import SchedulerPolicy
from inflight.context_phase import ContextTransfer, RequestType
from inflight.errors import StepFailed
from inflight.kv_cache_retention import KvCacheRetentionConfig, TokenRangeRetentionConfig
from inflight.result import FinishReason
from inflight.speculative_decoding import (
    DraftTargetDecodingConfig,
    ExternalDraftTokensConfig,
    LookaheadDecodingConfig,
    NGramDecodingConfig,
)

MAX_SEQ_LEN = 40
PREFIX = [(position * 11) % 97 for position in range(30)]
LOOKAHEADS = [
    None,
    None,
    LookaheadDecodingConfig(),
    LookaheadDecodingConfig(max_window_size=1, max_ngram_size=2, max_verification_set_size=1),
    LookaheadDecodingConfig(max_window_size=5, max_ngram_size=4, max_verification_set_size=0),
]
RETENTIONS = st.one_of(
    st.none(),
    st.builds(
        lambda priority, duration, end, decode, decode_duration: KvCacheRetentionConfig(
            token_range_retention_configs=[
                TokenRangeRetentionConfig(token_start=0, token_end=end, priority=priority, duration_ms=duration)
            ],
            decode_retention_priority=decode,
            decode_duration_ms=decode_duration,
        ),
        st.sampled_from([0, 35, 80, 100]),
        st.sampled_from([None, 20, 500]),
        st.sampled_from([None, 5, 12]),
        st.sampled_from([0, 35, 90]),
        st.sampled_from([None, 50]),
    ),
)


class Histories(RuleBasedStateMachine):
    """`ranks` are two managers that get the same input, as if it were broadcast."""

    def __init__(self) -> None:
        super().__init__()
        self.ranks: list[Harness] = []
        self.max_batch_size = 1
        self.num_requests = 0
        self.stopped: set[int] = set()
        self.failing_steps: set[int] = set()
        self.now_ms = 0
        self.model = CacheModel()

    @initialize(
        policy=st.sampled_from(list(SchedulerPolicy)),
        block_size=st.sampled_from([1, 2, 4, 8]),
        spare_blocks=st.integers(0, 12),
        max_batch_size=st.integers(1, 6),
        spare_tokens=st.integers(0, 20),
        chunked=st.booleans(),
        reuse=st.sampled_from([True, True, False]),
        partial=st.booleans(),
        copies_used_blocks=st.booleans(),
        num_host_blocks=st.sampled_from([0, 1, 4, 20]),
        min_offload_priority=st.sampled_from([0, 30, 50]),
        preempts=st.booleans(),
        num_stages=st.sampled_from([1, 1, 2, 3]),
        num_state_slots=st.sampled_from([None, None, 0, 1, 3, 30]),
        num_host_state_slots=st.sampled_from([0, 1, 3, 30]),
        blocks_between_states=st.sampled_from([1, 2, 5]),
        windows=st.sampled_from([(0,), (0,), (0, 5), (3,), (0, 12, 12), (4, 0, 9), (1,)]),
    )
    def start(
        self,
        policy: SchedulerPolicy,
        block_size: int,
        spare_blocks: int,
        max_batch_size: int,
        spare_tokens: int,
        chunked: bool,
        reuse: bool,
        partial: bool,
        copies_used_blocks: bool,
        num_host_blocks: int,
        min_offload_priority: int,
        preempts: bool,
        num_stages: int,
        num_state_slots: int | None,
        num_host_state_slots: int,
        blocks_between_states: int,
        windows: tuple[int, ...],
    ) -> None:
        """A pool that holds the longest sequence and little more. Only the first rank notes events."""
        self.max_batch_size = max_batch_size
        max_num_tokens = max_batch_size + spare_tokens + (0 if chunked else MAX_SEQ_LEN)
        longest = BlockGroups(block_size, windows).most_held_of_all(MAX_SEQ_LEN - 1, max_num_tokens)
        for rank in range(2):
            self.ranks.append(
                Harness(
                    policy=policy,
                    block_size=block_size,
                    num_blocks=longest + spare_blocks,
                    max_batch_size=max_batch_size,
                    max_num_tokens=max_num_tokens,
                    max_seq_len=MAX_SEQ_LEN,
                    enable_chunked_context=chunked,
                    enable_reuse=reuse,
                    priority_preemption=preempts and policy is not SchedulerPolicy.STATIC_BATCH,
                    hash_key=bytes([rank]),
                    num_stages=num_stages,
                    num_state_slots=num_state_slots,
                    num_host_state_slots=num_host_state_slots,
                    windows=windows,
                    state_interval=blocks_between_states * block_size,
                    kv_cache={
                        "enable_partial_reuse": partial,
                        "copy_on_partial_reuse": copies_used_blocks,
                        "num_host_blocks": num_host_blocks,
                        "min_offload_priority": min_offload_priority,
                        "events": EventBuffer(10_000) if rank == 0 else None,
                    },
                    runner={"fail_collect": self.failing_steps.__contains__},
                )
            )

    @rule(
        beam_width=st.sampled_from([1, 1, 1, 2, 3, 4]),
        length_penalty=st.sampled_from([1.0, 0.0, -1.0, 2.0]),
        early_stopping=st.integers(0, 2),
        shared=st.integers(0, 30),
        tail=st.lists(st.integers(0, 96), min_size=1, max_size=8),
        max_tokens=st.integers(1, 30),
        streaming=st.booleans(),
        priority=st.sampled_from([0.0, 0.5, 1.0]),
        end_ids=st.sampled_from([[], [1, 2, 3, 4, 5, 6, 7, 8], list(range(0, 97, 3))]),
        min_tokens=st.integers(0, 4),
        stop_word=st.lists(st.integers(0, 96), max_size=1),
        salt=st.sampled_from(["", "a"]),
        seed=st.integers(0, 5),
        num_sequences=st.sampled_from([1, 1, 1, 2, 3, 6]),
        logits=st.sampled_from([False, False, True]),
        drafts=st.sampled_from([None, None, "right", "half right", "wrong"]),
        threshold=st.sampled_from([None, None, 0.5]),
        lookup=st.sampled_from([None, 1, 2, 8]),
        lookahead=st.sampled_from(LOOKAHEADS),
        by_model=st.sampled_from([None, None, 1, 3, 8]),
        retention=RETENTIONS,
        context=st.sampled_from(["", "", "has arrived", "only"]),
    )
    def submit(
        self,
        beam_width: int,
        length_penalty: float,
        early_stopping: int,
        shared: int,
        tail: list[int],
        max_tokens: int,
        streaming: bool,
        priority: float,
        end_ids: list[int],
        min_tokens: int,
        stop_word: list[int],
        salt: str,
        seed: int,
        num_sequences: int,
        logits: bool,
        drafts: str | None,
        threshold: float | None,
        lookup: int | None,
        lookahead: LookaheadDecodingConfig | None,
        by_model: int | None,
        retention: KvCacheRetentionConfig | None,
        context: str,
    ) -> None:
        self.num_requests += 1
        prompt = [*PREFIX[:shared], *tail]
        beam_width = self.possible_width(beam_width, len(prompt) + max_tokens, end_ids)
        beams = {"beam_width": beam_width, "length_penalty": length_penalty, "early_stopping": early_stopping}
        most = self.max_batch_size if beam_width == 1 else beam_width
        request = make_request(
            self.num_requests,
            prompt,
            max_tokens,
            **beams,
            streaming=streaming and beam_width == 1,
            priority=priority,
            end_ids=end_ids,
            min_tokens=min_tokens,
            stop_words=[stop_word] if stop_word and beam_width == 1 else [],
            cache_salt=salt,
            seed=seed,
            num_return_sequences=min(num_sequences, most),
            logits=logits and beam_width == 1,
            ngram_config=NGramDecodingConfig(max_draft_len=lookup or 0, max_matching_ngram_size=1),
            lookahead_config=lookahead,
            draft_target_config=DraftTargetDecodingConfig(max_draft_len=by_model or 0),
            kv_cache_retention_config=retention,
        )
        if drafts is not None and beam_width == 1:
            tokens = drafts_for(request, drafts, MAX_SEQ_LEN)
            given = ExternalDraftTokensConfig(tokens=tokens, acceptance_threshold=threshold)
            request = structs.replace(request, external_draft_tokens_config=given)
        if context == "has arrived":
            request = structs.replace(request, context_transfer=ContextTransfer(num_arrived_tokens=len(prompt)))
        elif context == "only" and beam_width == 1:
            transfer = ContextTransfer(export_key=bytes([self.num_requests]))
            request = structs.replace(request, request_type=RequestType.CONTEXT_ONLY, context_transfer=transfer)
        for rank in self.ranks:
            if context == "has arrived":
                rank.runner.arrive(request)
            rank.submit(request)

    def possible_width(self, beam_width: int, length: int, end_ids: list[int]) -> int:
        """`beam_width`, or 1 where so many beams would be refused."""
        kv_cache = self.ranks[0].kv_cache
        num_blocks = beam_width * kv_cache.num_blocks_for(min(length, MAX_SEQ_LEN) - 1)
        fits = beam_width <= self.max_batch_size and num_blocks <= kv_cache.num_blocks
        return beam_width if fits and beam_width * (1 + len(end_ids)) <= 97 else 1

    @precondition(lambda self: self.num_requests > 0)
    @rule(choice=st.integers(0, 1000))
    def stop(self, choice: int) -> None:
        request_id = 1 + choice % self.num_requests
        self.stopped.add(request_id)
        for rank in self.ranks:
            rank.stops = {*rank.stops, request_id}

    @precondition(lambda self: self.num_requests > 0)
    @rule(choice=st.integers(0, 1000), index=st.integers(0, 3))
    def cancel_sequence(self, choice: int, index: int) -> None:
        request_id = 1 + choice % self.num_requests
        self.stopped.add(request_id)
        for rank in self.ranks:
            rank.manager.cancel_sequence(request_id, index)

    @rule(milliseconds=st.sampled_from([5, 30, 600]))
    def pass_time(self, milliseconds: int) -> None:
        self.now_ms += milliseconds
        for rank in self.ranks:
            rank.manager.note_time(self.now_ms)

    @rule(ahead=st.integers(0, 3))
    def fail_a_step(self, ahead: int) -> None:
        self.failing_steps.add(self.ranks[0].runner.num_launches + ahead)

    @rule(count=st.integers(1, 8))
    def run(self, count: int) -> None:
        for _ in range(count):
            for rank in self.ranks:
                rank.step()

    @invariant()
    def ranks_agree(self) -> None:
        if self.ranks:
            first, second = self.ranks
            assert first.runner.launched == second.runner.launched
            assert first.calls == second.calls

    @invariant()
    def events_tell_what_is_cached(self) -> None:
        if self.ranks:
            self.model.follow(self.ranks[0].manager.take_kv_cache_events())
            self.model.check(self.ranks[0].kv_cache)

    @invariant()
    def nobody_is_answered_twice(self) -> None:
        for rank in self.ranks:
            assert all(rank.num_finals(request_id) <= 1 for request_id in rank.responses)

    def teardown(self) -> None:
        for rank in self.ranks:
            rank.run_until_idle()
            assert rank.runner.num_outstanding <= 1, "at most the step behind the last one"
            assert rank.kv_cache.num_free_blocks == rank.kv_cache.num_blocks
            for request_id in range(1, self.num_requests + 1):
                self.check_answer(rank, request_id)

    def check_answer(self, rank: Harness, request_id: int) -> None:
        assert rank.num_finals(request_id) == 1
        _, _, error = rank.responses[request_id][-1]
        if rank.requests[request_id].sampling_config.beam_width > 1:
            self.check_beams(rank, request_id)
            return
        for index in range(rank.requests[request_id].num_return_sequences):
            tokens, expected = rank.tokens(request_id, index), rank.expected(request_id, index)
            results = rank.results(request_id, index)
            if error is not None:
                assert isinstance(error, StepFailed) and self.failing_steps
                assert tokens == expected[: len(tokens)]
                continue
            self.check_export(rank, request_id)
            assert [result.is_sequence_final for result in results] == [False] * (len(results) - 1) + [True]
            if results[-1].finish_reason is FinishReason.CANCELLED:
                assert request_id in self.stopped and tokens == expected[: len(tokens)]
            else:
                assert tokens == expected
            self.check_tensors(rank, request_id, index)

    def check_export(self, rank: Harness, request_id: int) -> None:
        """Whoever was answered with its first tokens has left what others go on from, unless a step failed."""
        request = rank.requests[request_id]
        if request.request_type is RequestType.CONTEXT_ONLY and rank.tokens(request_id) and not self.failing_steps:
            states, found = states_of(request.input_token_ids), rank.runner.exported.get(bytes([request_id]))
            if found is None:
                # A state may have found no slot, and what is computed again after a pause may pass windows at once.
                assert rank.runner.slots is not None or self.went_on(rank, request.input_token_ids)
                assert rank.runner.slots is not None or rank.kv_cache.groups.have_windows
                return
            wanted = rank.runner.handed_over(request.input_token_ids)
            if rank.runner.slots is not None:
                wanted.append(states[-2])
            assert len(found) == len(wanted)
            assert all(mine == its for mine, its in zip(found, wanted, strict=True) if its != EMPTY)

    @staticmethod
    def went_on(rank: Harness, prompt: list[int]) -> bool:
        """Whether a sequence with this prompt has taken a row with tokens behind it: after a pause."""
        placed = (new for step in rank.runner.launched for new in step.new_sequences)
        return any(
            len(new.token_ids) > new.num_prompt_tokens and new.token_ids[: new.num_prompt_tokens] == prompt
            for new in placed
        )

    def check_beams(self, rank: Harness, request_id: int) -> None:
        """One result for each hypothesis that is returned, or one error."""
        results, errors = zip(*((result, error) for result, _, error in rank.responses[request_id]), strict=True)
        if errors[-1] is not None:
            assert results == (None,) and isinstance(errors[-1], StepFailed) and self.failing_steps
            return
        request = rank.requests[request_id]
        assert sorted(result.sequence_index for result in results) == list(range(request.num_return_sequences))
        assert all(result.is_sequence_final for result in results)
        if results[0].finish_reason is FinishReason.CANCELLED:
            assert request_id in self.stopped
            return
        for result, beam in zip(
            sorted(results, key=lambda r: r.sequence_index), rank.expected_beams(request_id), strict=True
        ):
            assert result.output_token_ids == beam.token_ids
            assert result.cum_log_prob == float(beam.total) and result.finish_reason is beam.reason

    def check_tensors(self, rank: Harness, request_id: int, index: int) -> None:
        """Every token of the output once, and of the prompt once if there is an output; nothing unless asked."""
        request, tokens = rank.requests[request_id], rank.tokens(request_id, index)
        found = rank.tensors(request_id, index)
        if not request.output_config.return_context_logits:
            assert found == {}
            return
        assert found.get("generation_logits", []) == tokens
        prompt = found.get("context_logits", [])
        assert prompt == request.input_token_ids[: len(prompt)]
        if tokens and index == 0:
            assert len(prompt) == len(request.input_token_ids)


NUM_HISTORIES = int(os.environ.get("INFLIGHT_FUZZ_EXAMPLES", "100"))

TestHistories = Histories.TestCase
# A history takes about a tenth of a second: the usual minute is enough for a hundred, but not for thousands.
TestHistories.pytestmark = [pytest.mark.timeout(180 + 3 * NUM_HISTORIES)]
TestHistories.settings = settings(
    max_examples=NUM_HISTORIES,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)
