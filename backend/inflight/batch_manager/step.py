"""A step while the Scheduler puts it together."""

from __future__ import annotations

from inflight.batch_manager.sequence import Sequence
from inflight.scheduler_output import NewSequence, RowWork


class Step:
    """What becomes a SchedulerOutput, and whose it is."""

    __slots__ = (
        "adapter_loads",
        "block_copies",
        "budget",
        "forks",
        "gathering",
        "new_sequences",
        "prefilling",
        "rows",
        "sampling",
    )

    def __init__(self, budget: int) -> None:
        self.budget = budget
        """Tokens left for prompts."""
        self.new_sequences: list[NewSequence] = []
        self.rows: list[RowWork] = []
        self.block_copies: list[tuple[int, int]] = []
        self.adapter_loads: list[tuple[int, int]] = []
        self.sampling: list[Sequence] = []
        """Who gets a token: the order of SchedulerOutput.sampling_rows."""
        self.prefilling: list[Sequence] = []
        """Who computes tokens of its prompt, or takes a row."""
        self.gathering: dict[int, Sequence] = {}
        """By row, those that ask for tensors."""
        self.forks: list[tuple[Sequence, Sequence]] = []
        """Sequences that took a row to continue the prompt of a sibling, each with that sibling."""
