"""One step, as decided and as done: what the scheduler tells the model runner, and what the runner answers.

Lists of plain integers, no tensors: every rank's scheduler makes an equal SchedulerOutput from equal input. A running
sequence owns a *row* (0 <= row < max_batch_size) of the runner's persistent tensors from its first step to its last;
the scheduler sends the difference, never the state: a sequence in full when it takes its row, then new blocks only.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from inflight.request import SamplingConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class NewSequence:
    """A sequence that takes a row in this step: everything the runner must know of it."""

    row: int
    token_ids: list[int]
    """All tokens known so far: the prompt, and after a pause what was generated before it."""
    num_prompt_tokens: int
    block_ids: list[int]
    """Blocks that already belong to it (cached prefix and first allocation), in order."""
    sampling_config: SamplingConfig
    end_ids: list[int] = field(default_factory=list)
    bad_words: list[list[int]] = field(default_factory=list)
    return_log_probs: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledSequence:
    """The work of one row in this step: `num_tokens` tokens from position `start` on."""

    row: int
    start: int
    """Position of its first token = tokens whose keys and values are in the cache before the step."""
    num_tokens: int
    token_ids: list[int] | None = None
    """The tokens; None = the one that the row sampled last, which may still be on the device only."""
    new_block_ids: list[int] = field(default_factory=list)
    """Appended to the row's block table."""
    samples: bool = True
    """False for a prompt chunk that is not the last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerOutput:
    """Everything one step computes. `decodes` come first in the batch, then `prefills`."""

    new_sequences: list[NewSequence]
    decodes: list[ScheduledSequence]
    """One token each, `token_ids` is None."""
    prefills: list[ScheduledSequence]

    @property
    def num_tokens(self) -> int:
        return len(self.decodes) + sum(sequence.num_tokens for sequence in self.prefills)

    @property
    def sampling_rows(self) -> list[int]:
        """Rows that get new tokens, in batch order: the order of StepOutput.token_ids."""
        return [sequence.row for sequence in (*self.decodes, *self.prefills) if sequence.samples]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutput:
    """What a step found, one entry for each of SchedulerOutput.sampling_rows, on the host."""

    token_ids: list[list[int]]
    """New tokens of each row: one, or several under speculation; empty where `errors` names the row."""
    log_probs: list[list[float]] | None = None
    """Log probabilities of those tokens; None if no row of the step asked."""
    errors: dict[int, str] = field(default_factory=dict)
    """Row -> sentence, for a row that cannot go on (its logits were not finite)."""
