"""The state of each row on the device: length, blocks, last token, history, counts. So no step waits for the host.

Only steps read and write it, in their order, and they update it for their tokens and samples without the host. Legend:
R rows, and one more for padding, which no sequence uses; S rows that sample, V vocabulary, F float fields. History and
counts are allocated when the first row needs them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from inflight.runtime.row_table import FLOAT_FIELDS, RowTable, is_penalised
from inflight.scheduler_output import NewSequence


class RowState:
    def __init__(self, table: RowTable, max_seq_len: int, vocab_size: int, device: torch.device) -> None:
        """State for as many rows and blocks as `table` has, and for the padding row."""
        self.padding_row = table.num_rows
        self._num_rows, self._history_len, self._vocab_size = table.num_rows + 1, max_seq_len + 1, vocab_size
        self._device = device

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.block_table = zeros(self._num_rows, table.max_blocks, dtype=torch.int32).fill_(table.filler_block)
        """int32 (R, max_blocks)."""
        self.lengths_R = zeros(self._num_rows)
        """int64, tokens whose keys and values are in the cache, or will be after the steps that were started."""
        self.last_token_R = zeros(self._num_rows)
        self.seeds_R = zeros(self._num_rows)
        self.top_k_R = zeros(self._num_rows, dtype=torch.int32)
        self.floats_FR = zeros(len(FLOAT_FIELDS), self._num_rows, dtype=torch.float32)
        """float32 (F, R), in the order of FLOAT_FIELDS."""
        i32 = torch.int32
        self.no_prefills = (zeros(0, 0, dtype=i32), zeros(0, dtype=i32), zeros(1, dtype=i32))
        """Empty block table, lengths and starts, for the prefills of a step without any."""
        self.history: Tensor | None = None
        """int64 (R, max_seq_len + 1), all tokens of rows with bad words."""
        self.prompt_mask_RV: Tensor | None = None
        """bool, the tokens of the prompt; rows with penalties only."""
        self.output_counts_RV: Tensor | None = None
        """int32, how often each token was generated so far; meaningful for rows with penalties only."""

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
        if "changed_blocks" in staged:
            self.block_table.view(-1).index_copy_(0, staged["changed_blocks"], staged["changed_block_ids"])

    def end(self, rows_S: Tensor, lengths_S: Tensor, token_ids_S: Tensor) -> None:
        """Record the sampled tokens, each at position `lengths_S` of its row."""
        self.last_token_R.index_copy_(0, rows_S, token_ids_S)
        if self.history is not None:
            self.history[rows_S, lengths_S] = token_ids_S
        if self.output_counts_RV is not None:
            # Rows without penalties are counted too, although their counts are never read.
            ones = torch.ones_like(token_ids_S, dtype=torch.int32)
            self.output_counts_RV.index_put_((rows_S, token_ids_S), ones, accumulate=True)

    def _place(self, sequence: NewSequence) -> None:
        if sequence.bad_words:
            self._place_history(sequence)
        if is_penalised(sequence.sampling_config):
            self._place_counts(sequence)

    def _place_history(self, sequence: NewSequence) -> None:
        if self.history is None:
            shape = (self._num_rows, self._history_len)
            self.history = torch.zeros(shape, dtype=torch.int64, device=self._device)
        self.history[sequence.row, : len(sequence.token_ids)] = self._to_device(sequence.token_ids)

    def _place_counts(self, sequence: NewSequence) -> None:
        if self.prompt_mask_RV is None or self.output_counts_RV is None:
            shape = (self._num_rows, self._vocab_size)
            self.prompt_mask_RV = torch.zeros(shape, dtype=torch.bool, device=self._device)
            self.output_counts_RV = torch.zeros(shape, dtype=torch.int32, device=self._device)
        prompt = self._to_device(sequence.token_ids[: sequence.num_prompt_tokens])
        output = self._to_device(sequence.token_ids[sequence.num_prompt_tokens :])
        mask_V, counts_V = self.prompt_mask_RV[sequence.row], self.output_counts_RV[sequence.row]
        mask_V.zero_().index_fill_(0, prompt, True)
        counts_V.zero_().index_add_(0, output, torch.ones_like(output, dtype=torch.int32))

    def _to_device(self, token_ids: list[int]) -> Tensor:
        tokens = torch.tensor(token_ids, dtype=torch.int64, pin_memory=self._device.type == "cuda")
        return tokens.to(self._device, non_blocking=True)
