"""What the device knows of each row, so that no step waits for the host: blocks, last token, history, counts.

Lives on the device and is touched only by steps, in their order. Legend: R rows, S rows that sample, V vocabulary.
History and counts are allocated when the first row needs them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from inflight.runtime.row_table import RowTable
from inflight.runtime.step_input import StepInput
from inflight.scheduler_output import NewSequence


class RowState:
    def __init__(self, table: RowTable, max_seq_len: int, vocab_size: int, device: torch.device) -> None:
        """As many rows and blocks as `table`, which it shares no memory with."""
        self._num_rows, self._history_len, self._vocab_size = len(table.sequences), max_seq_len + 1, vocab_size
        self._device = device
        self.block_table = torch.from_numpy(table.block_table.copy()).to(device)
        """int32 (R, max_blocks)."""
        self.last_token_R = torch.zeros(self._num_rows, dtype=torch.int64, device=device)
        self.history: Tensor | None = None
        """int64 (R, max_seq_len + 1), all tokens of rows with bad words."""
        self.prompt_mask_RV: Tensor | None = None
        """bool, and int32 counts of the tokens generated so far: rows with penalties only."""
        self.output_counts_RV: Tensor | None = None

    def begin(self, step: StepInput) -> None:
        """Take in what the step changes, and put the decoding rows' last tokens into its token ids."""
        for sequence in step.new_sequences:
            self._place(sequence)
        if step.changed_blocks is not None:
            assert step.changed_block_ids is not None
            self.block_table.view(-1).index_copy_(0, step.changed_blocks, step.changed_block_ids)
        if step.num_decodes:
            step.token_ids_T[: step.num_decodes] = self.last_token_R.index_select(0, step.rows[: step.num_decodes])

    def end(self, step: StepInput, token_ids_S: Tensor) -> None:
        """Remember what was sampled."""
        sampling = step.sampling
        assert sampling is not None
        self.last_token_R.index_copy_(0, sampling.rows_S, token_ids_S)
        if self.history is not None:
            self.history[sampling.rows_S, sampling.lengths_S] = token_ids_S
        if self.output_counts_RV is not None:
            # Rows without penalties are counted too: nobody reads their counts.
            ones = torch.ones_like(token_ids_S, dtype=torch.int32)
            self.output_counts_RV.index_put_((sampling.rows_S, token_ids_S), ones, accumulate=True)

    def _place(self, sequence: NewSequence) -> None:
        sampling = sequence.sampling_config
        if sequence.bad_words:
            self._place_history(sequence)
        penalties = (sampling.repetition_penalty - 1, sampling.presence_penalty, sampling.frequency_penalty)
        if any(penalties):
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
