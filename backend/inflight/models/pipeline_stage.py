"""The network of one pipeline stage: its own layers, between what the stage before sends and what the next one gets.

Between two stages travels the residual stream, with all that the layers so far have added to it, and the outputs of
layers that requests ask for. Legend: T tokens, B rows that sample, D hidden size, V vocabulary, O tensors that travel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from inflight.distributed.pipeline import PipelineGroup
from inflight.errors import ConfigurationError
from inflight.layers.attention import AttentionMetadata
from inflight.layers.state import LayerState, StateSpec
from inflight.models.network import LayeredNetwork, Network


def layers_of_stage(num_layers: int, group: PipelineGroup) -> range:
    """This stage's consecutive layers. Where they do not divide evenly, the earlier stages have one more: the last has
    the head too. Raises ConfigurationError if there are fewer layers than stages."""
    if num_layers < group.size:
        raise ConfigurationError(
            f"pipeline_parallel_size {group.size} is more than the checkpoint's {num_layers} layers; "
            f"set it to at most {num_layers}"
        )
    each, more = divmod(num_layers, group.size)
    start = each * group.stage + min(group.stage, more)
    return range(start, start + each + (group.stage < more))


@dataclass(slots=True, kw_only=True)
class PipelineStage:
    """See LayeredNetwork. The ranks of all stages call it equally often, with batches of the same shape."""

    network: Network
    """This stage's layers: from token ids or, behind the first stage, from the residual stream (T, D)."""
    group: PipelineGroup
    layers: range
    num_layers: int
    """Of all stages."""
    hidden_size: int
    dtype: torch.dtype

    @property
    def state_specs(self) -> tuple[StateSpec, ...]:
        """Of this stage's layers."""
        return self.network.state_specs

    def forward(self, token_ids_T: Tensor, states: Sequence[LayerState], metadata: AttentionMetadata) -> Tensor:
        """See Network. Ready for `logits` in the last stage only."""
        return self.forward_layers(token_ids_T, states, metadata, frozenset())[0]

    def forward_layers(
        self, token_ids_T: Tensor, states: Sequence[LayerState], metadata: AttentionMetadata, wanted: frozenset[int]
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """See LayeredNetwork. The outputs of all wanted layers come out of the last stage only."""
        x_T, outputs = token_ids_T, {}
        if not self.group.is_first:
            earlier = sorted(number for number in wanted if number < self.layers.start)
            shape = (1 + len(earlier), len(token_ids_T), self.hidden_size)
            x_T, *found = self.group.receive(shape, self.dtype, token_ids_T.device).unbind(0)
            outputs = dict(zip(earlier, found, strict=True))
        hidden_TD, own = self._run(x_T, states, metadata, wanted.intersection(self.layers))
        outputs |= own
        if not self.group.is_last:
            self.group.send(torch.stack([hidden_TD, *(outputs[number] for number in sorted(outputs))]))
        return hidden_TD, outputs

    def logits(self, hidden_BD: Tensor) -> Tensor:
        """See Network. Of the last stage only."""
        return self.network.logits(hidden_BD)

    def _run(
        self, x_T: Tensor, states: Sequence[LayerState], metadata: AttentionMetadata, wanted: frozenset[int]
    ) -> tuple[Tensor, dict[int, Tensor]]:
        if not wanted:
            return self.network.forward(x_T, states, metadata), {}
        assert isinstance(self.network, LayeredNetwork), "a layer that is not offered was not refused"
        return self.network.forward_layers(x_T, states, metadata, wanted)
