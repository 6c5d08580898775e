"""The device's half of a step's preparation: from the rows of a StepInput and their state to what the network takes.

Every shape is known to the host beforehand, every operation stays on the device: nothing here waits.
Legend: as in step_input.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from inflight.layers.attention import AttentionMetadata
from inflight.runtime.row_state import RowState
from inflight.runtime.sampling_input import SamplingInput, find_restrictions
from inflight.runtime.step_input import StepInput


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLayout:
    token_ids_T: Tensor
    """int64"""
    metadata: AttentionMetadata
    sampling_tokens_S: Tensor | None
    """int64, which of the T tokens sample; None = all."""
    sampling: SamplingInput | None
    """None = no row samples."""


def lay_out(step: StepInput, parts: list[Tensor], state: RowState, block_size: int) -> BatchLayout:
    """Where the step's tokens lie, and which they are. The rows' lengths are advanced by their tokens.

    `parts`: the step's numbers on the device, see StepInput.numbers.
    """
    rows_B, counts_B, host_tokens_T, places_T, offsets_T, start_loc, sampled_S, sampling_rows_S = parts
    lengths_B = state.lengths_R.index_select(0, rows_B)
    seq_lens_B = lengths_B + counts_B
    state.lengths_R.index_copy_(0, rows_B, seq_lens_B)
    if step.num_prefills:
        positions_T = lengths_B.index_select(0, places_T) + offsets_T
        rows_T = rows_B.index_select(0, places_T)
    else:
        positions_T, rows_T = lengths_B, rows_B
    token_ids_T = state.last_token_R.index_select(0, rows_T)
    if len(host_tokens_T):
        token_ids_T = torch.where(host_tokens_T < 0, token_ids_T, host_tokens_T)
    decodes = step.num_decodes
    seq_lens = seq_lens_B.int()
    metadata = AttentionMetadata(
        positions_T=positions_T,
        slot_mapping_T=_slots(step, state, rows_T, positions_T, block_size),
        num_decodes=decodes,
        decode_block_table=state.block_table[:, : step.decode_blocks].index_select(0, rows_B[:decodes]),
        decode_seq_lens_N=seq_lens[:decodes],
        num_prefills=step.num_prefills,
        prefill_block_table=state.block_table[:, : step.prefill_blocks].index_select(0, rows_B[decodes:]),
        prefill_seq_lens_P=seq_lens[decodes:],
        prefill_start_loc=start_loc.int() if step.num_prefills else seq_lens.new_zeros(1),
        max_prefill_len=step.max_prefill_len,
    )
    sampling = None
    if step.needs is not None:
        rows_S, lengths_S = rows_T, positions_T + 1
        if len(sampled_S):
            rows_S, lengths_S = sampling_rows_S, lengths_S.index_select(0, sampled_S)
        restrictions = find_restrictions(step.staged, rows_S, lengths_S)
        sampling = SamplingInput(rows_S=rows_S, lengths_S=lengths_S, needs=step.needs, restrictions=restrictions)
    return BatchLayout(
        token_ids_T=token_ids_T,
        metadata=metadata,
        sampling_tokens_S=sampled_S if len(sampled_S) else None,
        sampling=sampling,
    )


def _slots(step: StepInput, state: RowState, rows_T: Tensor, positions_T: Tensor, block_size: int) -> Tensor:
    """int64 (T): where each token's keys and values go; padding's go nowhere."""
    width = state.block_table.shape[1]
    places_T = torch.add(positions_T.div(block_size, rounding_mode="floor"), rows_T, alpha=width)
    block_ids_T = state.block_table.view(-1).index_select(0, places_T)
    slots_T = torch.add(positions_T.remainder(block_size), block_ids_T, alpha=block_size)
    if step.is_padded:
        slots_T.masked_fill_(rows_T == state.padding_row, -1)
    return slots_T
