"""A request that was accepted and whose final response was not sent yet, with its sequences. Knows no scheduler."""

from __future__ import annotations

from inflight.batch_manager.beam_group import BeamGroup
from inflight.batch_manager.sequence import Sequence
from inflight.request import Request
from inflight.result import PerfMetrics, Result
from inflight.speculative_decoding import NO_SPECULATION, SpeculativeDecodingConfig


class ActiveRequest:
    """Owns `num_return_sequences` sequences, or the beams of a search, which end together. It ends when all of them
    have ended, or when one of them fails."""

    __slots__ = ("_num_silent", "num_open", "request", "sequences")

    def __init__(
        self,
        request: Request,
        *,
        max_seq_len: int,
        arrival_time_ns: int,
        speculative_decoding: SpeculativeDecodingConfig = NO_SPECULATION,
    ) -> None:
        self.request = request
        prefix_identity = request.prefix_identity
        self.sequences = [
            Sequence(
                request,
                index=index,
                max_seq_len=max_seq_len,
                arrival_time_ns=arrival_time_ns,
                speculative_decoding=speculative_decoding,
                prefix_identity=prefix_identity,
            )
            for index in range(request.num_sequences)
        ]
        if request.sampling_config.beam_width > 1:
            group = BeamGroup(tuple(self.sequences), request.num_return_sequences)
            for sequence in self.sequences:
                sequence.beams = group
        elif len(self.sequences) > 1:
            siblings = tuple(self.queued)
            for sequence in siblings:
                sequence.siblings = siblings
            self._share_prompt()
        self.num_open = len([sequence for sequence in self.sequences if not sequence.is_finished])
        """Number of sequences without their final result."""
        self._num_silent = len(self.sequences) - request.num_return_sequences  # beams that are not returned

    def _share_prompt(self) -> None:
        first, *others = (sequence.speculation for sequence in self.sequences)
        for other in others:
            if first is not None and other is not None:
                other.share_prompt(first, len(self.request.input_token_ids))

    @property
    def queued(self) -> list[Sequence]:
        """Those that wait for rows by themselves: of a beam search the first, of others all that did not finish before
        a replay."""
        if self.sequences[0].beams is not None:
            return self.sequences[:1]
        return [sequence for sequence in self.sequences if not sequence.is_finished]

    def next_result(self, sequence: Sequence) -> Result:
        """A Result with the tokens of one of its sequences that no earlier Result held, or of a beam search with all. A
        sequence that has finished must be passed only once."""
        is_finished = sequence.is_finished
        is_first = not (sequence.index or sequence.num_returned_tokens)
        token_ids, log_probs, cum_log_prob = _beam(sequence) if sequence.beams is not None else _news(sequence)
        self.num_open -= is_finished
        is_final = self.num_open == self._num_silent
        if is_final:
            self.num_open = 0
        return Result(
            output_token_ids=token_ids,
            log_probs=log_probs,
            tensors=[] if sequence.gathered is None else sequence.gathered.take(),
            cum_log_prob=cum_log_prob,
            finish_reason=sequence.finish_reason,
            is_final=is_final,
            sequence_index=sequence.index,
            is_sequence_final=is_finished,
            decoding_iter=sequence.num_decoding_iters,
            num_cached_tokens=sequence.num_cached_prompt_tokens if is_first else 0,
            request_perf_metrics=self._perf_metrics() if is_final else None,
        )

    def _perf_metrics(self) -> PerfMetrics:
        """Of all its sequences: from the first start to the last token, with the blocks of all."""
        accounts = [sequence.perf_metrics() for sequence in self.sequences]
        if len(accounts) == 1:
            return accounts[0]
        starts = [account.first_scheduled_time_ns for account in accounts if account.first_scheduled_time_ns]
        first_tokens = [account.first_token_time_ns for account in accounts if account.first_token_time_ns]
        return PerfMetrics(
            arrival_time_ns=accounts[0].arrival_time_ns,
            first_scheduled_time_ns=min(starts, default=0),
            first_token_time_ns=min(first_tokens, default=0),
            last_token_time_ns=max(account.last_token_time_ns for account in accounts),
            kv_cache_alloc_total_blocks=sum(account.kv_cache_alloc_total_blocks for account in accounts),
            kv_cache_alloc_new_blocks=sum(account.kv_cache_alloc_new_blocks for account in accounts),
            kv_cache_reused_blocks=sum(account.kv_cache_reused_blocks for account in accounts),
            kv_cache_missed_blocks=sum(account.kv_cache_missed_blocks for account in accounts),
            num_cached_tokens=accounts[0].num_cached_tokens,
            total_draft_tokens=sum(account.total_draft_tokens for account in accounts),
            total_accepted_draft_tokens=sum(account.total_accepted_draft_tokens for account in accounts),
            first_iter=min((account.first_iter for account in accounts if account.first_iter), default=0),
            last_iter=max(account.last_iter for account in accounts),
        )


def _news(sequence: Sequence) -> tuple[list[int], list[float], float]:
    """(tokens, their log probabilities, the sum of all), without those that were returned before."""
    token_ids, log_probs = sequence.token_ids, sequence.log_probs
    new_tokens = token_ids[sequence.num_prompt_tokens + sequence.num_returned_tokens :]
    sequence.num_returned_tokens += len(new_tokens)
    if not log_probs:
        return new_tokens, [], sequence.cum_log_prob
    num_returned, sequence.num_returned_log_probs = sequence.num_returned_log_probs, len(log_probs)
    return new_tokens, log_probs[num_returned:], sequence.cum_log_prob


def _beam(sequence: Sequence) -> tuple[list[int], list[float], float]:
    """The same of the hypothesis that a finished sequence of a search holds, or that has its rank now."""
    assert sequence.beams is not None
    if sequence.is_finished:
        return sequence.token_ids[sequence.num_prompt_tokens :], sequence.log_probs, sequence.cum_log_prob
    beam = sequence.beams.standing[sequence.index]
    return beam.token_ids, beam.log_probs if sequence.wants_log_probs else [], float(beam.total)
