"""The device's half of a step's preparation: from a StepInput and the state of its rows to the network's inputs.

The host knows every shape beforehand and no value is copied to it, so nothing here synchronises with the device.
Legend: as in step_input.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from inflight.layers.attention import AttentionMetadata
from inflight.runtime.prompt_embeddings import find_embeddings
from inflight.runtime.repeated_ngrams import find_ngrams
from inflight.runtime.row_state import RowState
from inflight.runtime.sampling_input import SamplingInput, find_counted, find_restrictions
from inflight.runtime.step_input import StepInput
from inflight.runtime.weighed_drafts import find_weighed


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLayout:
    token_ids_T: Tensor
    """int64"""
    metadata: AttentionMetadata
    sampling_tokens_S: Tensor | None
    """int64, indices of those of the T tokens that sample; None = all."""
    sampling: SamplingInput | None
    """None = no row samples."""


def lay_out(step: StepInput, parts: list[Tensor], state: RowState, block_size: int) -> BatchLayout:
    """The ids, positions and cache slots of the step's tokens. Adds to the length of each row its number of tokens.

    `parts`: the step's numbers on the device, see StepInput.numbers.
    """
    rows_B, counts_B, host_tokens_T, places_T, offsets_T, start_loc, sampled_S, sampling_rows_S = parts
    lengths_B = state.lengths_R.index_select(0, rows_B)
    seq_lens_B = lengths_B + counts_B
    # A row that verifies drafts stands here several times. Its length is then the host's to tell, see runtime.drafts.
    state.lengths_R.index_copy_(0, rows_B, seq_lens_B)
    is_ragged = len(places_T) > 0
    if is_ragged:
        positions_T = lengths_B.index_select(0, places_T) + offsets_T
        rows_T = rows_B.index_select(0, places_T)
    else:
        positions_T, rows_T = lengths_B, rows_B
    token_ids_T = state.last_token_R.index_select(0, rows_T)
    if len(host_tokens_T):
        token_ids_T = torch.where(host_tokens_T < 0, token_ids_T, host_tokens_T)
    slots_T = _slots(state, rows_T, positions_T, block_size)
    if step.is_padded:
        slots_T.masked_fill_(rows_T == state.padding_row, -1)
    metadata = _metadata(step, state, rows_B, seq_lens_B.int(), start_loc, positions_T, slots_T)
    sampling = None
    if step.needs is not None:
        # A token samples the one at the next position, which is the row's length where a row brings a single token.
        rows_S, lengths_S = rows_T, positions_T + 1 if is_ragged else seq_lens_B
        if len(sampled_S):
            rows_S, lengths_S = sampling_rows_S, lengths_S.index_select(0, sampled_S)
        restrictions = find_restrictions(step.staged, rows_S, lengths_S)
        sampling = SamplingInput(
            rows_S=rows_S,
            lengths_S=lengths_S,
            needs=step.needs,
            restrictions=restrictions,
            ngrams=find_ngrams(step.staged, step.ngram_extent, rows_S, lengths_S),
            counted=find_counted(step.staged),
            typical_K=step.staged.get("typical_owners"),
            weighed=find_weighed(step.staged),
        )
    return BatchLayout(
        token_ids_T=token_ids_T,
        metadata=metadata,
        sampling_tokens_S=sampled_S if len(sampled_S) else None,
        sampling=sampling,
    )


def _metadata(
    step: StepInput,
    state: RowState,
    rows_B: Tensor,
    seq_lens_B: Tensor,
    start_loc: Tensor,
    positions_T: Tensor,
    slots_T: Tensor,
) -> AttentionMetadata:
    decodes, table = step.num_decodes, state.block_table
    adapters_T = step.staged.get("adapters")
    decode_rows, decode_lens = rows_B, seq_lens_B
    prefill_table, prefill_lens, prefill_start_loc = state.no_prefills
    if step.num_prefills:
        decode_rows, decode_lens = rows_B[:decodes], seq_lens_B[:decodes]
        prefill_table = table[:, : step.prefill_blocks].index_select(0, rows_B[decodes:])
        prefill_lens, prefill_start_loc = seq_lens_B[decodes:], start_loc.int()
    return AttentionMetadata(
        positions_T=positions_T,
        slot_mapping_T=slots_T,
        num_decodes=decodes,
        decode_block_table=table[:, : step.decode_blocks].index_select(0, decode_rows),
        decode_seq_lens_N=decode_lens,
        num_prefills=step.num_prefills,
        prefill_block_table=prefill_table,
        prefill_seq_lens_P=prefill_lens,
        prefill_start_loc=prefill_start_loc,
        max_prefill_len=step.max_prefill_len,
        given=find_embeddings(step.staged),
        adapters_T=None if adapters_T is None else adapters_T.contiguous(),
    )


def lay_out_decodes(
    state: RowState, rows_N: Tensor, positions_N: Tensor, is_live_N: Tensor, num_blocks: int, block_size: int
) -> AttentionMetadata:
    """Of a batch of one token for each row, at the given positions. Rows that are not live count as padding.

    `num_blocks`: width of the block table.
    """
    positions_N = torch.where(is_live_N, positions_N, 0)
    slots_N = _slots(state, rows_N, positions_N, block_size).masked_fill_(~is_live_N, -1)
    prefill_table, prefill_lens, prefill_start_loc = state.no_prefills
    return AttentionMetadata(
        positions_T=positions_N,
        slot_mapping_T=slots_N,
        num_decodes=len(rows_N),
        decode_block_table=state.block_table[:, :num_blocks].index_select(0, rows_N),
        decode_seq_lens_N=torch.where(is_live_N, positions_N + 1, 0).int(),
        num_prefills=0,
        prefill_block_table=prefill_table,
        prefill_seq_lens_P=prefill_lens,
        prefill_start_loc=prefill_start_loc,
        max_prefill_len=0,
    )


def _slots(state: RowState, rows_T: Tensor, positions_T: Tensor, block_size: int) -> Tensor:
    """int64 (T): the slot of each token's keys and values."""
    width = state.block_table.shape[1]
    places_T = torch.add(positions_T.div(block_size, rounding_mode="floor"), rows_T, alpha=width)
    block_ids_T = state.block_table.view(-1).index_select(0, places_T)
    return torch.add(positions_T.remainder(block_size), block_ids_T, alpha=block_size)
