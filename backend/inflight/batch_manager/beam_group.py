"""The sequences of one beam search. They start, pause and end together; the Scheduler moves their blocks.

The first, the leader, computes the prompt and stands for all in queues. The others hold a row each from the start, and
nothing else until the first choice. A beam is not scheduled again before the choice that its last step is needed for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from inflight.batch_manager.beam_search import Beam, BeamSearch, Candidates
from inflight.result import FinishReason
from inflight.scheduler_output import BEAM_LOG_PROBS, RowTensors, top_names

if TYPE_CHECKING:
    from inflight.batch_manager.sequence import Sequence

Move = tuple["Sequence", "Sequence"]
"""A sequence, and the one whose text it continues from now on."""


class BeamGroup:
    """Sequence number i is slot i of the search; at the end it holds the i-th best hypothesis."""

    def __init__(self, sequences: tuple[Sequence, ...], num_returned: int) -> None:
        leader = sequences[0]
        sampling = leader.request.sampling_config
        self.sequences = sequences
        self.returned = sequences[:num_returned]
        self.search = BeamSearch(
            width=len(sequences),
            length_penalty=sampling.length_penalty,
            early_stopping=sampling.early_stopping,
            end_ids=leader.end_ids,
            max_tokens=leader.max_length - leader.num_prompt_tokens,
            widths=sampling.beam_width_array,
            diversity_rate=sampling.beam_search_diversity_rate,
            stop_words=leader.stop_words,
            min_tokens=sampling.min_tokens,
        )
        self._is_streamed = leader.request.streaming
        self.standing: list[Beam] = []
        """Of a search that is streamed: what it would be answered with if it ended now, the best first."""
        self._arrived: dict[int, Candidates] = {}

    @property
    def leader(self) -> Sequence:
        return self.sequences[0]

    @property
    def live(self) -> list[Sequence]:
        """Those that hold a beam, in order of their slots."""
        return [self.sequences[slot] for slot in sorted(beam.slot for beam in self.search.beams)]

    @property
    def streamed(self) -> tuple[Sequence, ...]:
        """Those that are answered with their place in `standing`."""
        return self.returned[: len(self.standing)]

    @property
    def has_pending(self) -> bool:
        return any(sequence.num_pending for sequence in self.sequences)

    def due(self) -> list[Sequence]:
        """Beams whose next tokens are known and not launched yet."""
        return [beam for beam in self.live if not beam.num_pending and beam.index not in self._arrived]

    def restart(self) -> None:
        """All beams compute their last token again: forget what they found in earlier steps."""
        self._arrived.clear()

    def add(self, sequence: Sequence, tensors: RowTensors) -> bool:
        """Take what a step found for one beam. Returns whether it was the last that the choice needs."""
        token_ids, log_probs = (tensors.generated[name] for name in top_names(BEAM_LOG_PROBS))
        self._arrived[sequence.index] = Candidates(token_ids=token_ids[0].tolist(), log_probs=log_probs[0].tolist())
        return len(self._arrived) == len(self.search.beams)

    def choose(self) -> list[Move]:
        """Choose the next beams. Returns who must take over another's text; `apply` follows."""
        self.search.advance(self._arrived)
        self._arrived = {}
        moved = [beam for beam in self.search.beams if beam.slot != beam.parent]
        return [(self.sequences[beam.slot], self.sequences[beam.parent]) for beam in moved]

    def apply(self, now_ns: int) -> None:
        """Give every live sequence the text of its beam."""
        self._note_time(now_ns)
        for beam in self.search.beams:
            sequence = self.sequences[beam.slot]
            if beam.slot == beam.parent:
                sequence.token_ids.append(beam.token_ids[-1])
            else:
                sequence.token_ids = [*sequence.request.input_token_ids, *beam.token_ids]
        if self._is_streamed:
            self.standing = self.search.results(len(self.returned))

    def conclude(self, now_ns: int = 0, reason: FinishReason = FinishReason.NOT_FINISHED) -> None:
        """Give the sequences that are returned the best hypotheses. `reason`: why the search was ended from outside.

        Their tokens are then no longer those in their blocks, which must have been taken back.
        """
        if now_ns:
            self._note_time(now_ns)
        results = self.search.results(len(self.returned))
        # There are fewer only if nearly all tokens were forbidden.
        results += [Beam(reason=FinishReason.LENGTH)] * (len(self.returned) - len(results))
        for sequence, beam in zip(self.returned, results, strict=True):
            sequence.token_ids = [*sequence.request.input_token_ids, *beam.token_ids]
            sequence.log_probs = beam.log_probs if sequence.wants_log_probs else []
            sequence.cum_log_prob = float(beam.total)
            sequence.finish_reason = reason or beam.reason or FinishReason.LENGTH

    def _note_time(self, now_ns: int) -> None:
        for sequence in self.sequences:
            sequence.first_token_time_ns = sequence.first_token_time_ns or now_ns
            sequence.last_token_time_ns = now_ns
            sequence.num_decoding_iters += 1
