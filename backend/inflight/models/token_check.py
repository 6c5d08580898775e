"""Tests on two short sequences whether a network of transformers gives the same logits with paged attention.

Knows no architecture. Legend: T tokens, V vocabulary.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from inflight.layers.attention import AttentionMetadata
from inflight.layers.given_embeddings import GivenEmbeddings
from inflight.layers.state import LayerState, StateSpec
from inflight.models.inspection import Unfit, try_token_ids
from inflight.models.transformers_decoder import TransformersDecoder
from inflight.models.transformers_sequential import SequentialDecoder, wants_positions
from inflight_kernels.kv_cache.step_blocks import StepBlocks

logger = logging.getLogger(__name__)

LENGTHS = (7, 5)
"""Lengths of the sequences in tokens."""
BLOCK_SIZE = 4
TOLERANCE = {torch.float32: 1e-2}
HALF_TOLERANCE = 0.1
"""Tolerances of the relative error: the norm of the difference of a token's logits over their norm, median over all
tokens. In half precision a different order of additions causes a few percent in a deep network. An attention mask, a
score cap or a recurrent state that is missing causes a few tenths."""


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Positions [start, end) of one of the test sequences."""

    sequence: int
    start: int
    end: int


@torch.inference_mode()
def check_tokens(
    network: Any, decoder: TransformersDecoder | SequentialDecoder, max_seq_len: int, device: torch.device
) -> None:
    """Compare the logits of two short sequences, computed in chunks and in one batch, with those of the class's own
    attention. Raises Unfit.

    This reveals a network that keeps state outside the states, or that depends on a token's index in the row.
    """
    first, second = (min(length, max_seq_len) for length in LENGTHS)
    sequences = [try_token_ids(network, length, device) for length in (first, second)]
    expected = [_expected(network, ids) for ids in sequences]
    blocks = -(-LENGTHS[0] // BLOCK_SIZE)
    states = [_state(spec, blocks * len(sequences), device) for spec in decoder.state_specs]
    table = torch.arange(blocks * len(sequences), dtype=torch.int32, device=device).view(len(sequences), blocks)
    errors: list[Tensor] = []
    for decodes, prefills in (
        ([], [_Chunk(0, 0, first // 2), _Chunk(1, 0, second - 1)]),
        ([_Chunk(1, second - 1, second)], [_Chunk(0, first // 2, first)]),
    ):
        chunks = [*decodes, *prefills]
        token_ids_T = torch.cat([sequences[chunk.sequence][0, chunk.start : chunk.end] for chunk in chunks])
        hidden_TD = decoder.forward(token_ids_T, states, _metadata(decodes, prefills, table))
        logits_TV = decoder.logits(hidden_TD).float()
        expected_TV = torch.cat([expected[chunk.sequence][chunk.start : chunk.end] for chunk in chunks]).float()
        if logits_TV.shape != expected_TV.shape:
            raise Unfit(f"its head returns logits of shape {tuple(logits_TV.shape)} for {len(expected_TV)} tokens")
        errors.append((logits_TV - expected_TV).norm(dim=1) / expected_TV.norm(dim=1))
    error = float(torch.cat(errors).median())
    if not error < TOLERANCE.get(expected[0].dtype, HALF_TOLERANCE):
        raise Unfit(
            f"with paged attention its logits are off by {error:.0%}: it keeps state or mixes tokens outside attention"
        )


def _expected(network: Any, token_ids: Tensor) -> Tensor:
    """Logits (T, V) as the class computes them from ids and, as for `generate`, positions from 0 on."""
    attends_by_interface = network._can_set_attn_implementation()
    if attends_by_interface:
        former = network.config._attn_implementation
        network.set_attn_implementation("eager")
    positions = torch.arange(token_ids.shape[1], device=token_ids.device)[None]
    inputs = {"position_ids": positions} if wants_positions(network) else {}
    logits_TV: Tensor = network(input_ids=token_ids, use_cache=False, **inputs).logits[0]
    if attends_by_interface:
        network.set_attn_implementation(former)
    return logits_TV


@torch.inference_mode()
def find_embedding_size(network: Any, decoder: TransformersDecoder, max_seq_len: int, device: torch.device) -> int:
    """Features of the embeddings that the network takes instead of token ids.

    0 if it gives other hidden states for the embeddings of a short sequence than for its ids, or fails: some networks
    need the ids for more than their embeddings.
    """
    length = min(LENGTHS[0], max_seq_len)
    token_ids_T = try_token_ids(network, length, device)[0]
    num_blocks = -(-length // BLOCK_SIZE)
    states = [_state(spec, num_blocks, device) for spec in decoder.state_specs]
    metadata = _metadata([], [_Chunk(0, 0, length)], torch.arange(num_blocks, device=device).int()[None])
    expected_TD = decoder.forward(token_ids_T, states, metadata)
    try:
        rows_TE = decoder.embedding(token_ids_T)
        given = GivenEmbeddings(places_G=torch.arange(length, device=device), rows_GD=rows_TE.float())
        found_TD = decoder.forward(torch.zeros_like(token_ids_T), states, replace(metadata, given=given))
    except Exception as error:  # whatever the class raises
        logger.info("the network takes no embeddings: %s", error)
        return 0
    return int(rows_TE.shape[1]) if torch.equal(found_TD, expected_TD) else 0


def _state(spec: StateSpec, num_blocks: int, device: torch.device) -> LayerState:
    return spec.allocate(num_blocks, BLOCK_SIZE, lambda size, dtype: torch.zeros(size, dtype=dtype, device=device))


def _metadata(decodes: list[_Chunk], prefills: list[_Chunk], block_table: Tensor) -> AttentionMetadata:
    def ints(values: list[int], dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=block_table.device)

    chunks = [*decodes, *prefills]
    positions = [(chunk.sequence, place) for chunk in chunks for place in range(chunk.start, chunk.end)]
    # The blocks of a sequence are consecutive.
    slots = [sequence * block_table.shape[1] * BLOCK_SIZE + place for sequence, place in positions]
    counts = [chunk.end - chunk.start for chunk in prefills]
    return AttentionMetadata(
        positions_T=ints([place for _, place in positions], torch.int64),
        blocks=(StepBlocks(ints(slots, torch.int64), block_table),),
        num_decodes=len(decodes),
        decode_rows_N=ints([chunk.sequence for chunk in decodes], torch.int64),
        decode_seq_lens_N=ints([chunk.end for chunk in decodes]),
        num_prefills=len(prefills),
        prefill_rows_P=ints([chunk.sequence for chunk in prefills], torch.int64),
        prefill_seq_lens_P=ints([chunk.end for chunk in prefills]),
        prefill_start_loc=ints([sum(counts[:place]) for place in range(len(counts) + 1)]),
        max_prefill_len=max(counts),
    )
