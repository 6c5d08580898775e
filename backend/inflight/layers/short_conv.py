"""A short convolution between two gates (LFM2): out(c * conv(b * x)), where b, c and x are products of what it reads.

Legend: T tokens, D hidden size, C channels of this rank, W tokens that the convolution is over.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import inflight_kernels
from inflight.layers.attention import AttentionMetadata
from inflight.layers.part import Part
from inflight.layers.state import CONVOLUTION, LayerState, StateSpec, Unit, last_inputs


@dataclass(slots=True, kw_only=True)
class ShortConv:
    inputs: Part[Any]
    """To b, c and x, of C channels each."""
    conv_weight_CW: Tensor
    conv_bias_C: Tensor | None
    output: Part[Tensor]
    dtype: torch.dtype
    """Of the activations."""

    @property
    def state_spec(self) -> StateSpec:
        return StateSpec(unit=Unit.SEQUENCE, tensors=(last_inputs(self.conv_weight_CW, self.dtype),))

    def __call__(self, hidden_TD: Any, state: LayerState, metadata: AttentionMetadata) -> Tensor:
        """See StatefulPart."""
        assert metadata.sequences is not None, "a step that does not say whose its tokens are"
        mixed, size = self.inputs(hidden_TD, metadata), self.conv_weight_CW.shape[0]
        convolved_TC = inflight_kernels.causal_conv(
            mixed[:, :size] * mixed[:, 2 * size :],
            self.conv_weight_CW,
            self.conv_bias_C,
            state[CONVOLUTION],
            metadata.sequences,
        )
        return self.output(mixed[:, size : 2 * size] * convolved_TC, metadata)
