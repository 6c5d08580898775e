"""How many tokens a step may have while sequences decode, so that each gets its next token in time.

The chunk of a prompt that a step computes beside decodes is what makes those wait. The budget follows the measured
steps: one that took too long lowers it in proportion, one that used it up and was faster raises it. What of a step does
not depend on its tokens needs no model this way, and where the machine is slower for a while, chunks are smaller.

It depends on a clock, so only the leader has one; ranks are told what comes of it with their input.
"""

from __future__ import annotations

from inflight.scheduler_output import SchedulerOutput

LARGEST_CUT, LARGEST_RISE = 0.5, 1.25
"""Of the tokens of one measured step: a step that was slow for another reason must not decide alone."""


class TokenBudget:
    def __init__(self, target_ns: int, max_num_tokens: int) -> None:
        """`target_ns`: longest time of a step in which sequences decode. `max_num_tokens`: of any step."""
        self._target_ns = target_ns
        self._max_num_tokens = max_num_tokens
        self._told = self._num_tokens = max_num_tokens

    def step_ended(self, scheduled: SchedulerOutput, duration_ns: int) -> None:
        """`duration_ns`: from the end of the step before."""
        num_tokens, num_prefills = 0, 0
        for work in scheduled.rows:
            num_tokens += work.num_tokens
            num_prefills += work.is_prefill
        if not 0 < num_prefills < len(scheduled.rows):
            return
        ratio = min(max(self._target_ns / max(duration_ns, 1), LARGEST_CUT), LARGEST_RISE)
        wanted = int(num_tokens * ratio)
        if ratio < 1:
            # Steps that were launched before the last cut say it again: theirs is no further one.
            self._num_tokens = max(min(self._num_tokens, wanted), 1)
        elif num_tokens >= self._num_tokens:
            self._num_tokens = min(max(self._num_tokens, wanted), self._max_num_tokens)

    def take_change(self) -> int:
        """The budget, if it has changed since the last call; else 0."""
        if self._num_tokens == self._told:
            return 0
        self._told = self._num_tokens
        return self._told
