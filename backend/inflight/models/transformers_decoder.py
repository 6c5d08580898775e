"""Any decoder of transformers, run by its own modelling code, with attention over our paged KV cache.

transformers calls a registered function for the attention of every layer; the one registered here writes keys and
values into the layer's cache and attends to that cache. All sequences of a step are concatenated to a single row of
tokens. That is correct because only attention depends on where a sequence begins: everything else in such a network is
computed for each token separately.

Knows no architecture. Legend: T tokens, B rows that sample, H query heads, K key/value heads, E head size, D hidden
size, V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

import inflight_kernels
from inflight.layers.attention import AttentionMetadata, KeyValueCache, KeyValueSpec, attend
from inflight.layers.state import LayerState, StateSpec
from inflight.models.transformers_step import Step, current_step, within

PAGED_ATTENTION = "inflight"
"""Name of our attention in transformers. No mask function is registered under it, so transformers creates no mask."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedStep(Step):
    """What the attention function needs while a network runs."""

    specs: Sequence[KeyValueSpec]
    states: Sequence[LayerState]
    cos_sin: Tensor
    """float32 (1, 2R), a rotation by the angle 0: the layers rotate queries and keys themselves."""
    no_positions_T: Tensor
    """int64, zeros: each token's row of `cos_sin`."""


@dataclass(slots=True, kw_only=True)
class TransformersDecoder:
    """See Network."""

    specs: tuple[KeyValueSpec, ...]
    """Of each layer."""
    backbone: nn.Module
    """Token ids to hidden states."""
    head: nn.Module
    """Hidden states to logits, see `make_head`."""
    last_position: int
    """The highest position. When a sequence ends, its next step may have been launched already; that token, whose
    result is discarded, is computed at this position."""
    cos_sin: Tensor
    embedding: nn.Module
    """Token ids to what the backbone takes as `inputs_embeds`."""
    embedding_size: int = 0
    """Features of that; 0 = the backbone does not give the same with it as with token ids."""

    @classmethod
    def assemble(
        cls,
        network: PreTrainedModel,
        backbone: str,
        specs: tuple[KeyValueSpec, ...],
        max_seq_len: int,
        device: torch.device,
    ) -> TransformersDecoder:
        """Switch `network`, of transformers, to paged attention. `backbone` names its submodule that computes hidden
        states."""
        network.set_attn_implementation(PAGED_ATTENTION)
        pairs = min(spec.head_dim for spec in specs) // 2
        return cls(
            specs=specs,
            backbone=network.get_submodule(backbone),
            head=make_head(network, backbone),
            last_position=max_seq_len - 1,
            cos_sin=torch.tensor([[1.0] * pairs + [0.0] * pairs], device=device),
            embedding=network.get_input_embeddings(),
        )

    @property
    def state_specs(self) -> tuple[StateSpec, ...]:
        """See Network."""
        return tuple(spec.state_spec for spec in self.specs)

    def forward(self, token_ids_T: Tensor, states: Sequence[LayerState], metadata: AttentionMetadata) -> Tensor:
        """See Network."""
        step = PagedStep(
            specs=self.specs,
            states=states,
            metadata=metadata,
            cos_sin=self.cos_sin,
            no_positions_T=torch.zeros_like(metadata.positions_T),
        )
        positions_T = metadata.positions_T.clamp(max=self.last_position)
        inputs = {"input_ids": token_ids_T[None]}
        if metadata.given is not None:
            inputs = {"inputs_embeds": metadata.given.put_into(self.embedding(token_ids_T))[None]}
        with within(step):
            output = self.backbone(**inputs, position_ids=positions_T[None], use_cache=False)
        hidden_TD: Tensor = output.last_hidden_state[0]
        return hidden_TD

    def logits(self, hidden_BD: Tensor) -> Tensor:
        """See Network."""
        logits_BV: Tensor = self.head(inputs_embeds=hidden_BD[None], use_cache=False).logits[0]
        return logits_BV


def paged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **ignored: Any,
) -> tuple[Tensor, None]:
    """Attention of one layer as transformers calls it: query (1, H, T, E), key (1, K, T, E) and value (1, K, T, F) to
    (1, T, H, F). `s_aux` (H): sinks.

    Other arguments, windows too, were checked by inspection.py when the network was loaded.
    """
    step = current_step()
    assert isinstance(step, PagedStep), "attention outside of a step"
    layer: Any = module.layer_idx
    spec = step.specs[layer]
    cache = KeyValueCache.of(step.states[layer], spec.k_scale, spec.v_scale)
    # The layer has rotated its queries and keys already.
    q_THE = inflight_kernels.rope_and_kv_write(
        _by_token(query, spec.head_dim),
        _by_token(key, spec.head_dim),
        _by_token(value, spec.head_dim),
        step.cos_sin,
        step.no_positions_T,
        cache.keys,
        cache.values,
        step.metadata.blocks[cache.group].slots_T,
        k_scale=cache.k_scale,
        v_scale=cache.v_scale,
    )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    attended_THE = attend(
        q_THE,
        cache,
        step.metadata,
        scale,
        spec.sliding_window,
        soft_cap=softcap or 0.0,
        sinks_H=None if s_aux is None else s_aux.float(),
    )
    return attended_THE[None, ..., : value.shape[-1]], None


def _by_token(states: Tensor, head_dim: int) -> Tensor:
    """(1, heads, T, elements) to (T, heads, E): with zeros where keys or values have fewer elements than the others,
    which change neither scores nor sums."""
    by_token = states[0].transpose(0, 1)
    missing = head_dim - by_token.shape[-1]
    return nn.functional.pad(by_token, (0, missing)) if missing else by_token


AttentionInterface.register(PAGED_ATTENTION, paged_attention)


class _GivenOutput:
    """A backbone's output that holds hidden states only: every other attribute is None."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, index: int) -> Tensor:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        return None


class _Given(nn.Module):
    """Replaces a backbone: returns the hidden states that it is given."""

    def forward(self, *ignored: Any, inputs_embeds: Tensor, **more: Any) -> _GivenOutput:
        return _GivenOutput(inputs_embeds)


def make_head(network: nn.Module, backbone: str) -> nn.Module:
    """A copy of `network` without its submodule `backbone`: from hidden states, as `inputs_embeds`, to logits.

    This runs the class's own code after the backbone, including any scaling or capping of logits. Weights are shared
    with `network`.
    """
    name, _, rest = backbone.partition(".")
    twin = copy.copy(network)
    part = make_head(network.get_submodule(name), rest) if rest else _Given()
    twin._modules = {**network._modules, name: part}
    return twin
