"""The device's half of a step's preparation: from a step's arrays and the state of its rows to the network's inputs.

The host knows every shape beforehand and no value is copied to it, so nothing here synchronises with the device. What a
step of padded decodes launches depends on their number alone. Legend: as in step_input.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from inflight.layers.attention import AttentionMetadata
from inflight.runtime.prompt_embeddings import find_embeddings
from inflight.runtime.row_state import RowState
from inflight.runtime.step_input import StepInput


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLayout:
    token_ids_T: Tensor
    """int64"""
    metadata: AttentionMetadata
    sampling_tokens_S: Tensor | None
    """int64, indices of those of the T tokens that sample; None = all."""
    rows_S: Tensor
    """int64, row of each token that samples."""
    lengths_S: Tensor
    """int64, tokens of that row up to this one: the position of the token that is sampled."""


def lay_out(step: StepInput, arrays: dict[str, Tensor], state: RowState, block_size: int) -> BatchLayout:
    """The ids, positions and cache slots of the step's tokens. Adds to the length of each row its number of tokens.

    `arrays`: those of StepInput, on the device.
    """
    rows_B, counts_B = arrays["rows"].contiguous(), arrays["counts"]
    lengths_B = state.lengths_R.index_select(0, rows_B)
    seq_lens_B = lengths_B + counts_B
    # A row that verifies drafts stands here several times. Its length is then the host's to tell, see runtime.drafts.
    state.lengths_R.index_copy_(0, rows_B, seq_lens_B)
    positions_T, rows_T, lengths_S = lengths_B, rows_B, seq_lens_B
    if step.num_prefills:
        positions_T, rows_T = (values_B.index_select(0, arrays["token_places"]) for values_B in (lengths_B, rows_B))
    if "token_offsets" in arrays:
        positions_T = positions_T + arrays["token_offsets"]
    if step.num_prefills:
        lengths_S = positions_T + 1
    token_ids_T = state.last_token_R.index_select(0, rows_T)
    if "token_ids" in arrays:
        token_ids_T = torch.where(arrays["token_ids"] < 0, token_ids_T, arrays["token_ids"])
    slots_T = _slots(state, rows_T, positions_T, block_size)
    if step.is_padded:
        slots_T.masked_fill_(rows_T == state.padding_row, -1)
    rows_S, tokens_S = rows_T, arrays.get("sampled_tokens")
    if tokens_S is not None:
        rows_S, lengths_S = arrays["sampling_rows"], lengths_S.index_select(0, tokens_S)
    return BatchLayout(
        token_ids_T=token_ids_T,
        metadata=_metadata(step, arrays, state, rows_B, seq_lens_B.int(), positions_T, slots_T),
        sampling_tokens_S=tokens_S,
        rows_S=rows_S,
        lengths_S=lengths_S,
    )


def _metadata(
    step: StepInput,
    arrays: dict[str, Tensor],
    state: RowState,
    rows_B: Tensor,
    seq_lens_B: Tensor,
    positions_T: Tensor,
    slots_T: Tensor,
) -> AttentionMetadata:
    decodes, adapters_T = step.num_decodes, arrays.get("adapters")
    return AttentionMetadata(
        positions_T=positions_T,
        slot_mapping_T=slots_T,
        block_table=state.block_table,
        num_decodes=decodes,
        decode_rows_N=rows_B[:decodes],
        decode_seq_lens_N=seq_lens_B[:decodes],
        num_prefills=step.num_prefills,
        prefill_rows_P=rows_B[decodes:],
        prefill_seq_lens_P=seq_lens_B[decodes:],
        prefill_start_loc=arrays.get("prefill_starts", state.no_starts).contiguous(),
        max_prefill_len=step.max_prefill_len,
        given=find_embeddings(arrays),
        adapters_T=None if adapters_T is None else adapters_T.contiguous(),
    )


def lay_out_decodes(
    state: RowState, rows_N: Tensor, positions_N: Tensor, is_live_N: Tensor, block_size: int
) -> AttentionMetadata:
    """Of a batch of one token for each row, at the given positions. Rows that are not live count as padding."""
    positions_N = torch.where(is_live_N, positions_N, 0)
    slots_N = _slots(state, rows_N, positions_N, block_size).masked_fill_(~is_live_N, -1)
    seq_lens_N = torch.where(is_live_N, positions_N + 1, 0).int()
    return AttentionMetadata(
        positions_T=positions_N,
        slot_mapping_T=slots_N,
        block_table=state.block_table,
        num_decodes=len(rows_N),
        decode_rows_N=rows_N,
        decode_seq_lens_N=seq_lens_N,
        num_prefills=0,
        prefill_rows_P=rows_N[:0],
        prefill_seq_lens_P=seq_lens_N[:0],
        prefill_start_loc=state.no_starts,
        max_prefill_len=0,
    )


def _slots(state: RowState, rows_T: Tensor, positions_T: Tensor, block_size: int) -> Tensor:
    """int64 (T): the slot of each token's keys and values."""
    width = state.block_table.shape[1]
    places_T = torch.add(positions_T.div(block_size, rounding_mode="floor"), rows_T, alpha=width)
    block_ids_T = state.block_table.view(-1).index_select(0, places_T)
    return torch.add(positions_T.remainder(block_size), block_ids_T, alpha=block_size)
