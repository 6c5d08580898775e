"""The state of each row on the device: length, blocks, last token, history, counts. So no step waits for the host.

Only steps read and write it, in their order, and they update it for their tokens and samples without the host. Legend:
R rows, and one more for padding, which no sequence uses; G groups of layers with blocks of their own; S rows that
sample, V vocabulary, F float fields. On a CPU history and counts are allocated when the first row needs them, on a GPU
at the start: later its memory may be in use.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from inflight.runtime.row_table import FLOAT_FIELDS, RowTable, is_biased, is_penalised, needs_history
from inflight.runtime.sampling_input import SamplingInput
from inflight.runtime.staging import to_host_tensor
from inflight.scheduler_output import NewSequence
from inflight_kernels.kv_cache.step_blocks import StepBlocks


class RowState:
    def __init__(
        self, table: RowTable, max_seq_len: int, vocab_size: int, device: torch.device, *, is_reserved: bool = False
    ) -> None:
        """State for as many rows and blocks as `table` has, and for the padding row. `is_reserved`: history and counts
        are allocated now."""
        self.padding_row = table.num_rows
        self._num_rows, self._history_len, self._vocab_size = table.num_rows + 1, max_seq_len + 1, vocab_size
        self._device = device

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        size = (self._num_rows, table.num_groups, table.max_blocks)
        self.block_tables = zeros(*size, dtype=torch.int32).fill_(table.filler_block)
        """int32 (R, G, max_blocks), of each group of layers."""
        self._by_group = self.block_tables.unbind(1)
        self.lengths_R = zeros(self._num_rows)
        """int64, tokens whose keys and values are in the cache, or will be after the steps that were started."""
        self.last_token_R = zeros(self._num_rows)
        self.seeds_R = zeros(self._num_rows)
        self.top_k_R = zeros(self._num_rows, dtype=torch.int32)
        self.floats_FR = zeros(len(FLOAT_FIELDS), self._num_rows, dtype=torch.float32)
        """float32 (F, R), in the order of FLOAT_FIELDS."""
        self.fields = dict(zip(FLOAT_FIELDS, self.floats_FR.unbind(0), strict=True))
        """By name, float32 (R) each, in the memory of `floats_FR`."""
        self.top_p_reset_R = zeros(self._num_rows)
        """Token that sets top_p back; -1 = none."""
        self.no_starts = zeros(1, dtype=torch.int32)
        """For the prefills of a step without any."""
        self.each_start = torch.arange(self._num_rows + 1, dtype=torch.int32, device=device)
        """int32 (R + 1), where the tokens of each row start in a step of one token for each."""
        self.history: Tensor | None = None
        """int64 (R, max_seq_len + 1), all tokens of rows with bad words or no_repeat_ngram_size."""
        self.prompt_mask_RV: Tensor | None = None
        """bool, the tokens of the prompt; rows with penalties only."""
        self.output_counts_RV: Tensor | None = None
        """int32, how often each token was generated so far; meaningful for rows with penalties only."""
        self.bias_RV: Tensor | None = None
        """float32, added to the logits; 0 in rows without a bias."""
        self._biased_rows: set[int] = set()  # those that are not 0
        if is_reserved:
            self._allocate_history()
            self._allocate_counts()

    def begin(self, new_sequences: list[NewSequence], staged: dict[str, Tensor]) -> None:
        """Apply the changes that a step brings: new sequences with their sampling, entries of the block table."""
        for sequence in new_sequences:
            self._place(sequence)
        if new_sequences:
            rows = staged["placed_rows"]
            self.lengths_R.index_copy_(0, rows, staged["placed_lengths"])
            self.seeds_R.index_copy_(0, rows, staged["placed_seeds"])
            self.top_k_R.index_copy_(0, rows, staged["placed_top_k"])
            self.floats_FR.index_copy_(1, rows, staged["placed_floats"])
            self.top_p_reset_R.index_copy_(0, rows, staged["placed_top_p_reset"])
        if "known_rows" in staged:
            self.lengths_R.index_copy_(0, staged["known_rows"], staged["known_lengths"])
        if "rejected_rows" in staged and self.output_counts_RV is not None:
            less = torch.full_like(staged["rejected_rows"], -1, dtype=torch.int32)
            self.output_counts_RV.index_put_(
                (staged["rejected_rows"], staged["rejected_tokens"]), less, accumulate=True
            )
        if "changed_blocks" in staged:
            self.block_tables.view(-1).index_copy_(0, staged["changed_blocks"], staged["changed_block_ids"])

    def step_blocks(self, slots: Iterable[Tensor]) -> tuple[StepBlocks, ...]:
        """Of each group: the `slots` of a step's tokens, and all rows' blocks."""
        return tuple(map(StepBlocks, slots, self._by_group))

    def note_drafts(self, staged: dict[str, Tensor]) -> None:
        """Write drafts that decide what may be sampled behind them."""
        if "draft_rows" in staged:
            assert self.history is not None
            self.history[staged["draft_rows"], staged["draft_positions"]] = staged["draft_tokens"]

    def end(self, sampling: SamplingInput, token_ids_S: Tensor) -> None:
        """Record the sampled tokens, each at position `lengths_S` of its row: what the step's rows need besides their
        last tokens, which the sampler has written."""
        needs, rows_S = sampling.needs, sampling.rows_S
        if needs.top_p_decays:
            self._decay_top_p(rows_S, token_ids_S)
        if self.history is not None and (needs.is_restricted or needs.repeats_no_ngram):
            self.history[rows_S, sampling.lengths_S] = token_ids_S
        if self.output_counts_RV is not None and needs.is_penalised:
            ones = torch.ones_like(token_ids_S, dtype=torch.int32)
            self.output_counts_RV.index_put_((rows_S, token_ids_S), ones, accumulate=True)

    def _decay_top_p(self, rows_S: Tensor, token_ids_S: Tensor) -> None:
        """The same as row_table.current_top_p. Rows without decay (1, and a smaller minimum) keep theirs."""
        fields = dict(zip(FLOAT_FIELDS, self.floats_FR.index_select(1, rows_S).unbind(0), strict=True))
        decayed_S = torch.maximum(fields["top_p"] * fields["top_p_decay"], fields["top_p_min"])
        is_reset_S = token_ids_S == self.top_p_reset_R.index_select(0, rows_S)
        top_p_S = torch.where(is_reset_S, fields["initial_top_p"], decayed_S)
        self.fields["top_p"].index_copy_(0, rows_S, top_p_S)

    def _place(self, sequence: NewSequence) -> None:
        if needs_history(sequence):
            self._place_history(sequence)
        if is_biased(sequence.sampling_config) or sequence.row in self._biased_rows:
            self._place_bias(sequence)
        if is_penalised(sequence.sampling_config):
            self._place_counts(sequence)

    def _place_history(self, sequence: NewSequence) -> None:
        history = self._allocate_history() if self.history is None else self.history
        history[sequence.row, : len(sequence.token_ids)] = self._to_device(sequence.token_ids)

    def _place_counts(self, sequence: NewSequence) -> None:
        if self.prompt_mask_RV is None or self.output_counts_RV is None:
            self._allocate_counts()
        assert self.prompt_mask_RV is not None and self.output_counts_RV is not None
        # A penalty is for tokens that can be sampled: a prompt may hold ids beyond the vocabulary.
        prompt_ids = sequence.token_ids[: sequence.num_prompt_tokens]
        prompt = self._to_device([token for token in prompt_ids if token < self._vocab_size])
        output = self._to_device(sequence.token_ids[sequence.num_prompt_tokens :])
        mask_V, counts_V = self.prompt_mask_RV[sequence.row], self.output_counts_RV[sequence.row]
        mask_V.zero_().index_fill_(0, prompt, True)
        counts_V.zero_().index_add_(0, output, torch.ones_like(output, dtype=torch.int32))

    def _allocate_history(self) -> Tensor:
        shape = (self._num_rows, self._history_len)
        self.history = torch.zeros(shape, dtype=torch.int64, device=self._device)
        return self.history

    def _allocate_counts(self) -> None:
        shape = (self._num_rows, self._vocab_size)
        self.prompt_mask_RV = torch.zeros(shape, dtype=torch.bool, device=self._device)
        self.output_counts_RV = torch.zeros(shape, dtype=torch.int32, device=self._device)

    def _place_bias(self, sequence: NewSequence) -> None:
        if self.bias_RV is None:
            shape = (self._num_rows, self._vocab_size)
            self.bias_RV = torch.zeros(shape, dtype=torch.float32, device=self._device)
        sampling, bias_V = sequence.sampling_config, self.bias_RV[sequence.row]
        self._biased_rows.discard(sequence.row)
        if sampling.embedding_bias:
            dense = to_host_tensor(np.frombuffer(sampling.embedding_bias, dtype="<f4").copy(), self._device)
            bias_V.copy_(dense, non_blocking=True)
        else:
            bias_V.zero_()
        if sampling.logit_bias:
            values = to_host_tensor(np.array(list(sampling.logit_bias.values()), dtype=np.float32), self._device)
            # No token twice: the order of the sums does not matter.
            bias_V.index_add_(0, self._to_device(list(sampling.logit_bias)), values.to(self._device, non_blocking=True))
        if is_biased(sampling):
            self._biased_rows.add(sequence.row)

    def _to_device(self, token_ids: list[int]) -> Tensor:
        tokens = torch.tensor(token_ids, dtype=torch.int64, pin_memory=self._device.type == "cuda")
        return tokens.to(self._device, non_blocking=True)
