"""The states of sequences, which recurrent layers keep instead of keys and values: where they are written besides the
slot of each row, and on which of them a sequence starts. Knows no tensors.

While a step computes a row's tokens, the state behind any of them can be written into another slot too. So a snapshot
costs no step of its own, and its place in the prompt does not depend on how that is chunked. Snapshots are taken

- every `interval` tokens, and behind the last full block of what a sequence has to prefill,
- behind each full block of its output, in place of the one before: whoever continues the text starts there,
- behind the prompt but for one token, where siblings wait to start on it, or other ranks are to get it,
- behind each token of a step that verifies drafts: the row goes on with the one behind the last accepted token.

A sequence starts on the longest cached prefix that has a snapshot, and on nothing else.
"""

from __future__ import annotations

from collections.abc import Callable

from inflight.batch_manager.kept_states import NO_STATE, KeptStates
from inflight.batch_manager.sequence import Sequence, SequenceStatus
from inflight.batch_manager.state_slots import StateSlots

STARTED = (SequenceStatus.RUNNING, SequenceStatus.FINISHED)


class SequenceStates:
    def __init__(
        self,
        slots: StateSlots,
        *,
        block_size: int,
        interval: int,
        enable_reuse: bool,
        may_offload: Callable[[bytes], bool],
    ) -> None:
        """`interval`: tokens between snapshots, a multiple of `block_size`. Without `enable_reuse` no prefix is looked
        up, so that none is taken. `may_offload`: whether the snapshot behind a cached block, given by its hash, is
        worth host memory."""
        self.slots = slots
        self._block_size = block_size
        self._interval = interval
        self._enable_reuse = enable_reuse
        self._may_offload = may_offload

    def num_usable(self, block_hashes: list[bytes]) -> int:
        """Of leading blocks that are cached, given by their hashes: those behind which a sequence can start."""
        return next((n for n in range(len(block_hashes), 0, -1) if block_hashes[n - 1] in self.slots), 0)

    def start(self, sequence: Sequence, block_hash: bytes) -> None:
        """Start on the snapshot behind a cached block."""
        sequence.states.source = self.slots.hold_snapshot(block_hash)

    def fork(self, sequence: Sequence, source: Sequence) -> None:
        """Start on what `source` knows behind the prompt; a beam, on all that it knows, which is in its row."""
        slot = source.states.behind_prompt if sequence.beams is None else source.row
        self.slots.hold(slot)
        sequence.states.source = slot

    @staticmethod
    def has_prompt(source: Sequence, num_tokens: int) -> bool:
        """Whether a sibling can start on what `source` knows behind so many tokens."""
        return source.states.behind_prompt != NO_STATE and source.states.prompt_length == num_tokens

    def arrive(self, sequence: Sequence) -> list[int]:
        """Start on the state behind its prompt but for one token, which has come from other ranks. Returns the slots
        that it is copied to behind all other copies: its row's, and one that its siblings start on."""
        states, length = sequence.states, sequence.num_prompt_tokens - 1
        if sequence.num_prefix_tokens > length or not self._has_waiting_siblings(sequence) or not self.slots.num_free:
            return [sequence.row]
        states.behind_prompt, states.prompt_length = self._take(), length
        return [sequence.row, states.behind_prompt]

    def take_source(self, sequence: Sequence) -> int:
        """What has to be copied into its row's slot before the step that is put together; NO_STATE = nothing, or what
        `slots` says."""
        slot, sequence.states.source = sequence.states.source, NO_STATE
        if slot != NO_STATE and self.slots.is_on_host(slot):
            self.slots.read(slot, sequence.row)
            return NO_STATE
        if slot != NO_STATE:
            self.slots.release(slot)
        return slot

    def keep(self, sequence: Sequence, start: int, end: int, num_drafts: int) -> list[tuple[int, int]]:
        """For a step of the tokens from `start` to `end`: (index among them, slot) of those behind which the state is
        kept."""
        states = sequence.states
        shares_prompt = self._shares_prompt(sequence, start)
        if states.behind_prompt != NO_STATE and not shares_prompt:
            self.slots.release(states.behind_prompt)
            states.behind_prompt = NO_STATE
        if num_drafts:
            assert not states.behind_drafts, "two steps verify drafts of one sequence"
            # Behind the last one the row's own state is right, if all are accepted.
            num_kept = num_drafts + (end % self._block_size == 0)
            states.behind_drafts = [(start + 1 + index, self._take()) for index in range(num_kept)]
            return [(index, slot) for index, (_, slot) in enumerate(states.behind_drafts)]
        kept: dict[int, int] = {}  # number of leading tokens -> slot
        for num_tokens in self._borders(sequence, start, end):
            if self.slots.num_free:
                kept[num_tokens] = self._take()
        states.behind_tokens += kept.items()
        prefix = sequence.num_prefix_tokens
        if start < prefix <= end and states.behind_prompt == NO_STATE and shares_prompt:
            self._keep_prompt(states, prefix, kept)
        return [(num_tokens - start - 1, slot) for num_tokens, slot in kept.items()]

    def _borders(self, sequence: Sequence, start: int, end: int) -> list[int]:
        """Numbers of leading tokens behind which a step takes a snapshot, if there is a slot."""
        if not self._enable_reuse:
            return []
        if start >= sequence.num_prefill_tokens:
            return [end] if end % self._block_size == 0 else []
        first = start // self._interval * self._interval + self._interval
        borders = set(range(first, end + 1, self._interval))
        last_full = (sequence.num_prefill_tokens - 1) // self._block_size * self._block_size
        if start < last_full <= end:
            borders.add(last_full)
        return sorted(borders)

    def _keep_prompt(self, states: KeptStates, length: int, kept: dict[int, int]) -> None:
        if length in kept:
            self.slots.hold(kept[length])
        elif self.slots.num_free:
            kept[length] = self._take()
        else:
            return
        states.behind_prompt, states.prompt_length = kept[length], length

    def _take(self) -> int:
        return self.slots.take(self._may_offload)

    def _shares_prompt(self, sequence: Sequence, start: int) -> bool:
        """Whether somebody may still want what it knows behind its prompt, in the step that begins at token `start`."""
        is_exported = sequence.export_key and start < sequence.num_prefill_tokens
        return bool(is_exported) or self._has_waiting_siblings(sequence)

    @staticmethod
    def _has_waiting_siblings(sequence: Sequence) -> bool:
        return any(sibling.status not in STARTED for sibling in sequence.siblings)

    def take_back(self, sequence: Sequence, num_drafts: int, num_accepted: int) -> None:
        """Of the drafts that a step has verified so many were accepted: the row goes on behind these. What it knows
        behind a full block is a snapshot."""
        states = sequence.states
        kept, states.behind_drafts = states.behind_drafts, []
        for index, (num_tokens, slot) in enumerate(kept):
            if index == num_accepted < num_drafts:
                self.slots.hold(slot)
                states.source = slot
            if index <= num_accepted and self._enable_reuse and num_tokens % self._block_size == 0:
                states.behind_tokens.append((num_tokens, slot))
            else:
                self.slots.release(slot)

    def enter(self, sequence: Sequence, num_tokens: int) -> None:
        """So many leading tokens are known and in cached blocks: snapshots behind them can be found."""
        states = sequence.states
        while states.behind_tokens and states.behind_tokens[0][0] <= num_tokens:
            border, slot = states.behind_tokens.pop(0)
            block_hash = sequence.block_hashes[border // self._block_size - 1]
            is_new = block_hash not in self.slots
            self.slots.enter(slot, block_hash)
            self.slots.release(slot)
            self.slots.forget(states.standing)
            stays = border <= sequence.num_prefill_tokens or border % self._interval == 0
            states.standing = block_hash if is_new and not stays else b""

    def free(self, sequence: Sequence) -> None:
        """Release all that the sequence holds. Snapshots that can be found stay."""
        states = sequence.states
        for slot in states.slots:
            self.slots.release(slot)
        states.source = states.behind_prompt = NO_STATE
        states.standing = b""
        states.behind_tokens, states.behind_drafts = [], []

    def check(self, sequences: list[Sequence]) -> None:
        """Raise AssertionError unless `sequences` hold exactly the slots that are held."""
        self.slots.check(slot for sequence in sequences for slot in sequence.states.slots)
