"""The device's half of a step's preparation: from a step's arrays and the state of its rows to the network's inputs.

The host knows every shape beforehand and no value is copied to it, so nothing here synchronises with the device. What a
step of padded decodes launches depends on their number alone. Legend: as in step_input.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

import inflight_kernels
from inflight.layers.attention import AttentionMetadata
from inflight.runtime.prompt_embeddings import find_embeddings
from inflight.runtime.row_state import RowState
from inflight.runtime.step_input import StepInput
from inflight_kernels import StepTokens
from inflight_kernels.recurrent.step_sequences import StepSequences


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


def lay_out(
    step: StepInput, arrays: dict[str, Tensor], state: RowState, block_size: int, *, has_sequences: bool = False
) -> BatchLayout:
    """The ids, positions and cache slots of the step's tokens. Adds to the length of each row its number of tokens.

    `arrays`: those of StepInput, on the device. `has_sequences`: the network must know whose
    tokens the step has.
    """
    rows_B = arrays["rows"].contiguous()
    # A row that verifies drafts stands here several times. Its length is then the host's to tell, see runtime.drafts.
    tokens = inflight_kernels.advance_rows(
        rows_B,
        arrays["counts"].contiguous(),
        state.lengths_R,
        state.last_token_R,
        state.block_tables,
        block_size,
        state.padding_row if step.is_padded else None,
        _contiguous(arrays.get("token_offsets")),
        _contiguous(arrays.get("token_ids")),
        _contiguous(arrays.get("token_places")),
    )
    rows_S, lengths_S, tokens_S = tokens.rows, tokens.ends, arrays.get("sampled_tokens")
    if tokens_S is not None:
        rows_S, lengths_S = arrays["sampling_rows"].contiguous(), lengths_S.index_select(0, tokens_S)
    return BatchLayout(
        token_ids_T=tokens.token_ids,
        metadata=_metadata(step, arrays, state, rows_B, tokens, has_sequences=has_sequences),
        sampling_tokens_S=tokens_S,
        rows_S=rows_S,
        lengths_S=lengths_S,
    )


def _metadata(
    step: StepInput,
    arrays: dict[str, Tensor],
    state: RowState,
    rows_B: Tensor,
    tokens: StepTokens,
    *,
    has_sequences: bool,
) -> AttentionMetadata:
    sizes = (step.num_decodes, step.num_prefills)
    decode_rows_N, prefill_rows_P = rows_B.split_with_sizes(sizes)
    decode_seq_lens_N, prefill_seq_lens_P = tokens.seq_lens.split_with_sizes(sizes)
    return AttentionMetadata(
        positions_T=tokens.positions,
        blocks=state.step_blocks(tokens.slots),
        num_decodes=step.num_decodes,
        decode_rows_N=decode_rows_N,
        decode_seq_lens_N=decode_seq_lens_N,
        num_prefills=step.num_prefills,
        prefill_rows_P=prefill_rows_P,
        prefill_seq_lens_P=prefill_seq_lens_P,
        prefill_start_loc=arrays.get("prefill_starts", state.no_starts).contiguous(),
        max_prefill_len=step.max_prefill_len,
        given=find_embeddings(arrays),
        adapters_T=_contiguous(arrays.get("adapters")),
        sequences=_sequences(arrays, state, rows_B, tokens.positions) if has_sequences else None,
        token_types_T=_contiguous(arrays.get("token_types")),
    )


def _sequences(arrays: dict[str, Tensor], state: RowState, rows_B: Tensor, positions_T: Tensor) -> StepSequences:
    """A row's slot has its number. The host says where each one's tokens start unless each has one token."""
    starts = arrays.get("sequence_starts", state.each_start[: len(rows_B) + 1])
    return StepSequences(
        slots_B=arrays.get("sequence_slots", rows_B).contiguous(),
        starts=starts.contiguous(),
        positions_T=positions_T,
        kept_T=_contiguous(arrays.get("kept_states")),
    )


def _contiguous(values: Tensor | None) -> Tensor | None:
    return None if values is None else values.contiguous()


def lay_out_decodes(
    state: RowState,
    rows_N: Tensor,
    positions_N: Tensor,
    is_live_N: Tensor,
    block_size: int,
    kept_N: Tensor | None = None,
) -> AttentionMetadata:
    """Of a batch of one token for each row, at the given positions. Rows that are not live count as padding. `kept_N`:
    StepSequences.kept_T; None = the network keeps no state of a sequence."""
    positions_N = torch.where(is_live_N, positions_N, 0)
    slots = inflight_kernels.cache_slots(state.block_tables, rows_N, positions_N, block_size)
    seq_lens_N = torch.where(is_live_N, positions_N + 1, 0).int()
    return AttentionMetadata(
        positions_T=positions_N,
        blocks=state.step_blocks([slots_N.masked_fill_(~is_live_N, -1) for slots_N in slots]),
        num_decodes=len(rows_N),
        decode_rows_N=rows_N,
        decode_seq_lens_N=seq_lens_N,
        num_prefills=0,
        prefill_rows_P=rows_N[:0],
        prefill_seq_lens_P=seq_lens_N[:0],
        prefill_start_loc=state.no_starts,
        max_prefill_len=0,
        sequences=None
        if kept_N is None
        else StepSequences(
            slots_B=torch.where(is_live_N, rows_N, state.padding_row),
            starts=state.each_start[: len(rows_N) + 1].contiguous(),
            positions_T=positions_N,
            kept_T=kept_N,
        ),
    )
