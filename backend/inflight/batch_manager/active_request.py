"""A request that was accepted and has not had its final response, with its sequences. Knows no step, no scheduler."""

from __future__ import annotations

from inflight.batch_manager.sequence import Sequence
from inflight.request import Request
from inflight.result import Result


class ActiveRequest:
    """Owns `num_return_sequences` sequences. It ends when all of them have, or with the first that fails."""

    __slots__ = ("num_open", "request", "sequences")

    def __init__(self, request: Request, *, max_seq_len: int, arrival_time_ns: int) -> None:
        self.request = request
        self.sequences = [
            Sequence(request, index=index, max_seq_len=max_seq_len, arrival_time_ns=arrival_time_ns)
            for index in range(request.num_return_sequences)
        ]
        self.num_open = len(self.sequences)
        """Sequences that have not had their final result."""

    def next_result(self, sequence: Sequence) -> Result:
        """The tokens of one of its sequences that no earlier Result carried. Once only for a finished sequence."""
        start, num_log_probs = sequence.num_returned_tokens, sequence.num_returned_log_probs
        sequence.num_returned_tokens = sequence.num_output_tokens
        sequence.num_returned_log_probs = len(sequence.log_probs)
        is_finished = sequence.is_finished
        self.num_open -= is_finished
        is_final = self.num_open == 0
        return Result(
            output_token_ids=sequence.token_ids[sequence.num_prompt_tokens + start :],
            log_probs=sequence.log_probs[num_log_probs:],
            tensors=[] if sequence.gathered is None else sequence.gathered.take(),
            cum_log_prob=sequence.cum_log_prob,
            finish_reason=sequence.finish_reason,
            is_final=is_final,
            sequence_index=sequence.index,
            is_sequence_final=is_finished,
            perf_metrics=sequence.perf_metrics() if is_final else None,
        )
