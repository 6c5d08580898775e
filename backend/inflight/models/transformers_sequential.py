"""A decoder of transformers whose attention is its own code's, run for one sequence after the other on a CPU.

Such a network asks transformers' cache for the keys and values of earlier tokens. The cache that it is given here is a
view of this engine's blocks: what a layer puts into it is written to the sequence's slots, and what it gets back is
read from them. So whatever the class does with keys and values, its masks and biases, is right as it is; but nothing is
computed for several sequences together, and each step copies their keys and values.

Knows no architecture. Legend: T tokens, B rows that sample, S tokens of a sequence so far, K key/value heads, E and F
size of a key and of a value, D hidden size, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer

from inflight.layers.attention import KEYS, VALUES, AttentionMetadata
from inflight.layers.state import LayerState, StateSpec, TensorSpec, Unit
from inflight.models.inspection import NUM_TOKENS, Unfit, first_part_called, try_token_ids
from inflight.models.transformers_decoder import make_head
from inflight.models.transformers_step import Step, within

OTHER_STATE = "its layers keep other states than a key and a value for each token"


@dataclass(slots=True, kw_only=True)
class SequentialDecoder:
    """See Network."""

    specs: tuple[StateSpec | None, ...]
    """Of each layer of transformers' cache; None = the layer puts nothing into it."""
    backbone: nn.Module
    """Token ids to hidden states."""
    head: nn.Module
    """Hidden states to logits, see `make_head`."""
    hidden_size: int
    dtype: torch.dtype
    max_seq_len: int
    takes_positions: bool
    embedding_size: int = 0
    """See TransformersDecoder: it takes none."""

    @property
    def state_specs(self) -> tuple[StateSpec, ...]:
        """See Network."""
        return tuple(spec for spec in self.specs if spec is not None)

    def forward(self, token_ids_T: Tensor, states: Sequence[LayerState], metadata: AttentionMetadata) -> Tensor:
        """See Network."""
        # A sequence that has ended may have one more token, whose result nobody reads.
        hidden_TD = torch.zeros((len(token_ids_T), self.hidden_size), dtype=self.dtype)
        for chunk in _chunks(metadata):
            if chunk.length <= self.max_seq_len:
                hidden_TD[chunk.first : chunk.end] = self._compute(token_ids_T, states, metadata, chunk)
        return hidden_TD

    def _compute(
        self, token_ids_T: Tensor, states: Sequence[LayerState], metadata: AttentionMetadata, chunk: _Chunk
    ) -> Tensor:
        own = slice(chunk.first, chunk.end)
        block_size = next(iter(states[0].values())).shape[1]
        places_S = torch.arange(chunk.length)
        blocks_S = metadata.blocks[0].block_table[chunk.row, places_S // block_size]
        slots_S = blocks_S.long() * block_size + places_S % block_size
        cache = PagedCache(self.specs, states, slots_S, chunk.start)
        inputs: dict[str, Tensor] = {"input_ids": token_ids_T[None, own]}
        if self.takes_positions:
            inputs["position_ids"] = places_S[None, chunk.start :]
        adapters_T = None if metadata.adapters_T is None else metadata.adapters_T[own]
        with within(Step(metadata=replace(metadata, adapters_T=adapters_T))):
            output = self.backbone(**inputs, past_key_values=cache, use_cache=True)
        hidden_TD: Tensor = output.last_hidden_state[0]
        return hidden_TD

    def logits(self, hidden_BD: Tensor) -> Tensor:
        """See Network."""
        logits_BV: Tensor = self.head(inputs_embeds=hidden_BD[None], use_cache=False).logits[0]
        return logits_BV


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Tokens [first, end) of a step, the last ones of a sequence that has `length` then."""

    row: int
    """Of the block table."""
    first: int
    end: int
    length: int

    @property
    def start(self) -> int:
        return self.length - (self.end - self.first)


def _chunks(metadata: AttentionMetadata) -> Iterator[_Chunk]:
    decodes = zip(metadata.decode_rows_N.tolist(), metadata.decode_seq_lens_N.tolist(), strict=True)
    for first, (row, length) in enumerate(decodes):
        yield _Chunk(row, first, first + 1, length)
    starts = [metadata.num_decodes + start for start in metadata.prefill_start_loc.tolist()]
    prefills = zip(metadata.prefill_rows_P.tolist(), metadata.prefill_seq_lens_P.tolist(), strict=True)
    for place, (row, length) in enumerate(prefills):
        yield _Chunk(row, starts[place], starts[place + 1], length)


class PagedCache(DynamicCache):  # type: ignore[misc]
    """transformers' cache of one sequence, in this engine's blocks."""

    def __init__(
        self, specs: Sequence[StateSpec | None], states: Sequence[LayerState], slots_S: Tensor, start: int
    ) -> None:
        """`slots_S`: int64, of all its tokens, those of this step included, which begin at `start`."""
        own = iter(states)
        layers = [DynamicLayer() if spec is None else PagedLayer(next(own), slots_S, start) for spec in specs]
        Cache.__init__(self, layers=layers)


class PagedLayer(DynamicLayer):  # type: ignore[misc]
    """One layer of a PagedCache."""

    def __init__(self, state: LayerState, slots_S: Tensor, start: int) -> None:
        super().__init__()
        self._state, self._slots_S, self._start = state, slots_S, start
        self.is_initialized = start > 0
        self._is_updated = False

    def update(self, key_states: Tensor, value_states: Tensor, *ignored: Any, **more: Any) -> tuple[Tensor, Tensor]:
        """Write this step's keys (1, K, T, E) and values (1, K, T, F), and return those of all tokens."""
        states = ((KEYS, key_states), (VALUES, value_states))
        self.keys, self.values = (
            self._exchange(name, each[0].transpose(0, 1)).transpose(0, 1)[None] for name, each in states
        )
        self.is_initialized = self._is_updated = True
        return self.keys, self.values

    def _exchange(self, name: str, new_T: Tensor) -> Tensor:
        """Write what this step's tokens have (T, …), and return what all have (S, …)."""
        slots = self._state[name].flatten(0, 1)
        slots[self._slots_S[self._start :]] = new_T
        return slots[self._slots_S]

    def get_seq_length(self) -> int:
        return len(self._slots_S) if self._is_updated else self._start


@torch.inference_mode()
def make_sequential(network: Any, max_seq_len: int) -> SequentialDecoder:
    """The decoder of `network`, which is on the CPU, and whose own code attends. Raises Unfit."""
    cache = DynamicCache(config=network.config)
    # Not those that drop what a window has passed: blocks hold all, and masks hide it.
    cache.layers = [DynamicLayer() if isinstance(each, DynamicSlidingWindowLayer) else each for each in cache.layers]
    token_ids = try_token_ids(network, NUM_TOKENS, torch.device("cpu"))
    with first_part_called(network) as names:
        network(input_ids=token_ids, past_key_values=cache, use_cache=True)
    if not names:
        raise Unfit("it has no submodule that computes hidden states")
    specs = tuple(_spec_of(layer) for layer in cache.layers)
    if not any(specs):
        raise Unfit("its layers put no keys and values into transformers' cache")
    backbone = network.get_submodule(names[0])
    hidden = backbone(input_ids=token_ids, use_cache=False).last_hidden_state
    return SequentialDecoder(
        specs=specs,
        backbone=backbone,
        head=make_head(network, names[0]),
        hidden_size=hidden.shape[-1],
        dtype=hidden.dtype,
        max_seq_len=max_seq_len,
        takes_positions=wants_positions(network) and _takes_positions(backbone),
    )


def _spec_of(layer: Any) -> StateSpec | None:
    """What a layer of transformers' cache holds after NUM_TOKENS tokens."""
    if type(layer) is not DynamicLayer:
        raise Unfit(OTHER_STATE)
    if not layer.is_initialized:
        return None
    tensors = []
    for name, states in ((KEYS, layer.keys), (VALUES, layer.values)):
        if states.dim() != 4 or states.shape[0] != 1 or states.shape[2] != NUM_TOKENS:
            raise Unfit(OTHER_STATE)
        tensors.append(TensorSpec(name, (states.shape[1], states.shape[3]), states.dtype))
    return StateSpec(unit=Unit.BLOCK, tensors=tuple(tensors))


def wants_positions(network: nn.Module) -> bool:
    """Whether transformers' `generate` tells it the positions of its tokens, which then begin at 0."""
    return "position_ids" in inspect.signature(type(network).forward).parameters


def _takes_positions(part: nn.Module) -> bool:
    parameters = inspect.signature(type(part).forward).parameters
    return "position_ids" in parameters or any(each.kind is each.VAR_KEYWORD for each in parameters.values())
