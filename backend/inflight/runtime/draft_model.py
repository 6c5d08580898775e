"""The draft model on one rank: a second network, and the passes in which it makes a step's drafts on the device.

Its keys and values lie in caches of its own, in the same blocks and slots as the network's. Where it has computed none
(a block that another sequence has cached while it decoded without drafts), or where a row has given back its block, it
reads what was left there, and drafts are worse: never wrong, because each of them is verified. States of sequences lie
in the network's slots too: that behind each draft in the slot of the network's own, so that a row which goes on from
there has both; and where it computes none, what it knows of the row is copied there. Drafts are sampled as the row's
tokens are, with the randomness of their own positions, but without what is staged for each position: words, n-grams and
end tokens that are forbidden, a typical_p, the drafts before it in penalties. Nothing here waits for the host.

Legend: as in draft_passes; S rows that sample in the first pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

import inflight_kernels
from inflight.layers.attention import AttentionMetadata
from inflight.layers.state import LayerState, Unit
from inflight.models.network import Network
from inflight.runtime.batch_layout import lay_out, lay_out_decodes
from inflight.runtime.draft_passes import DraftPasses
from inflight.runtime.row_state import RowState
from inflight.runtime.sampler import Sampler
from inflight.runtime.sampling_input import SamplingInput, find_sampling
from inflight.runtime.staging import InputBuffer
from inflight.scheduler_output import DRAFTED


class DraftModel:
    def __init__(
        self,
        network: Network,
        states: Sequence[LayerState],
        *,
        block_size: int,
        state: RowState,
        sampler: Sampler,
        input_buffer: InputBuffer,
        filler_block: int | None = None,
    ) -> None:
        """`input_buffer`: its own, as large as that of a step. `filler_block`: see StateStore; None = no row gives back
        blocks while it runs."""
        self._network = network
        self._states = states
        self._slot_tensors = [
            tensor
            for spec, layer in zip(network.state_specs, states, strict=True)
            if spec.unit is Unit.SEQUENCE
            for tensor in layer.values()
        ]
        self._block_size = block_size
        self._state = state
        self._sampler = sampler
        self._input = input_buffer
        self._filler_block = filler_block

    def draft(self, passes: DraftPasses, staged: dict[str, Tensor]) -> Tensor | None:
        """The step's drafts, int64 (passes * M), by their numbers (see `number_drafts`); None if there are none."""
        first, state = passes.first, self._state
        arrays = self._input.load(first.arrays)
        lengths_R = state.lengths_R.clone()
        state.lengths_R.index_copy_(0, staged["draft_pass_rows"], staged["draft_pass_starts"])
        layout = lay_out(first, arrays, state, self._block_size, has_sequences=bool(self._slot_tensors))
        state.lengths_R.copy_(lengths_R)
        hidden_TD = self._network.forward(layout.token_ids_T, self._states, self._storing(layout.metadata))
        if first.needs is None:
            return None
        sampling = find_sampling(first.needs, arrays, layout.rows_S, layout.lengths_S)
        if layout.sampling_tokens_S is not None:
            hidden_TD = hidden_TD.index_select(0, layout.sampling_tokens_S)
        order_M = staged["draft_order"]
        tokens_S = self._sampler(self._network.logits(hidden_TD), sampling, state).token_ids_S
        tokens_M = tokens_S.index_select(0, order_M)
        rows_M, positions_M = sampling.rows_S.index_select(0, order_M), sampling.lengths_S.index_select(0, order_M)
        drafts = torch.zeros(((1 + len(passes.num_rows)), len(order_M)), dtype=torch.int64, device=order_M.device)
        drafts[0] = tokens_M
        for number, size in enumerate(passes.num_rows, 1):
            is_live_M = staged["draft_lengths"][:size] > number
            kept_M = None
            if self._slot_tensors:
                kept_M = staged["draft_kept"].view(-1, len(order_M))[number, :size].contiguous()
            metadata = lay_out_decodes(state, rows_M[:size], positions_M[:size], is_live_M, self._block_size, kept_M)
            hidden_MD = self._network.forward(tokens_M[:size].contiguous(), self._states, metadata)
            positions_M = positions_M[:size] + 1
            needed = SamplingInput(
                rows_S=rows_M[:size], lengths_S=positions_M, needs=sampling.needs, restrictions=None, ngrams=None
            )
            tokens_M = self._sampler(self._network.logits(hidden_MD), needed, state).token_ids_S
            drafts[number, :size] = tokens_M
        return drafts.view(-1)

    def _storing(self, metadata: AttentionMetadata) -> AttentionMetadata:
        """What it stores of tokens with which it catches up goes nowhere where their row has given back the block."""
        if self._filler_block is None:
            return metadata
        end = self._filler_block * self._block_size
        stored = (replace(each, slots_T=each.slots_T.masked_fill(each.slots_T >= end, -1)) for each in metadata.blocks)
        return replace(metadata, blocks=tuple(stored))

    def carry_states(self, staged: dict[str, Tensor]) -> None:
        """Fill slots that a step keeps of tokens which this network does not compute."""
        if "draft_states_from" in staged:
            sources, destinations = staged["draft_states_from"], staged["draft_states_to"]
            inflight_kernels.copy_blocks(self._slot_tensors, sources.contiguous(), destinations.contiguous())


def keeps_states(network: Network) -> bool:
    """Of sequences."""
    return any(spec.unit is Unit.SEQUENCE for spec in network.state_specs)


def place_drafts(staged: dict[str, Tensor], drafts: Tensor) -> None:
    """Replace the numbers of drafts by the drafts, in the arrays of a step that name them."""
    for name in ("token_ids", "draft_tokens", "counted_tokens"):
        if name in staged:
            token_ids = staged[name]
            numbers = (DRAFTED - token_ids).clamp_(0, len(drafts) - 1)
            token_ids.copy_(torch.where(token_ids <= DRAFTED, drafts.index_select(0, numbers), token_ids))
