"""A linear layer of a network of transformers whose product is one of this engine's: its weight has any format, runs in
C++ where that multiplies it, and takes low-rank adapters. Knows no architecture.

Legend: T tokens, I input features, O output features, both of a rank.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from inflight.layers.lora import LoraSlots
from inflight.layers.weight import (
    CodedGroups,
    DenseWeight,
    Fp8BlockWeight,
    Fp8Weight,
    Int4Groups,
    Weight,
)
from inflight.models.transformers_plan import Share, Split
from inflight.models.transformers_step import current_step


class ReplacedLinear(nn.Module):
    """In the place of an nn.Linear, or of transformers' Conv1D: this rank's part of it.

    Until `settle` it computes nothing: while a network is inspected, it notes how it is used and gives zeros.
    """

    bias: nn.Parameter | None

    def __init__(
        self,
        share: Share,
        bias_O: nn.Parameter | None,
        dtype: torch.dtype,
        device: torch.device,
        *,
        is_transposed: bool = False,
    ) -> None:
        """`is_transposed`: whether who reads the weight expects (I, O). `device`: of the activations."""
        super().__init__()
        self.share = share
        self.in_features, self.out_features = len(share.inputs), len(share.outputs)
        self.bias = bias_O
        self.lora: LoraSlots | None = None
        self.rows_seen: set[int] = set()
        """Numbers of tokens with which it was called before it was settled."""
        self.is_read = False
        """Whether the network has read the weight itself, instead of calling the layer."""
        self._dtype, self._device, self._is_transposed = dtype, device, is_transposed
        self._weight: Weight | None = None
        self._product: Callable[[Tensor], Tensor] | None = None

    @property
    def stored(self) -> Weight:
        """The weight that was put in."""
        assert self._weight is not None, "a layer without its weight"
        return self._weight

    @property
    def is_dense(self) -> bool:
        return isinstance(self._weight, DenseWeight)

    def put(self, weight: Weight) -> None:
        """To be called once, before the network is."""
        self._weight = weight

    def settle(self, product: Callable[[Tensor], Tensor] | None = None) -> None:
        """From now on the layer computes. `product`: (T, I) to (T, O), in place of the weight's own, which is given up;
        None = the weight's own. If the network has read the weight itself, it is kept as floats."""
        if product is not None:
            self._weight, self._product = None, product
            return
        if self.is_read and not self.is_dense:
            self._weight = DenseWeight(floats_of(self.stored, self._dtype))
        weight = self.stored
        bias_O = self._bias
        self._product = lambda x_TI: weight.multiply(x_TI, bias_O)

    @property
    def _bias(self) -> Tensor | None:
        return None if self.bias is None else self.bias.data

    @property
    def weight(self) -> Tensor:
        """(O, I), or as a Conv1D has it, for classes that read it. Raises AttributeError once it has been given up."""
        if self._weight is not None:
            self.is_read = True
            values_OI = floats_of(self._weight, self._dtype)
        elif self._product is None:
            # Some classes initialise it before it is read.
            values_OI = torch.empty((self.out_features, self.in_features), dtype=self._dtype, device="meta")
        else:
            raise AttributeError("the weight has been given up for a packed one")
        return values_OI.T if self._is_transposed else values_OI

    def forward(self, x: Tensor) -> Tensor:
        """(…, inputs given) to (…, outputs returned), of one dtype: see Share. Collective if it is split."""
        share = self.share
        if x.dtype != self._dtype or x.shape[-1] != share.num_given:
            raise ValueError(f"a layer for {share.num_given} features of {self._dtype} got {x.shape} of {x.dtype}")
        x_TI, shape = x.reshape(-1, share.num_given), (*x.shape[:-1], share.num_returned)
        if self._product is None:
            self.rows_seen.add(len(x_TI))
            return x.new_zeros(shape)
        if not len(x_TI):
            return x.new_empty(shape)
        if share.split is Split.INPUTS_OF_ALL:
            x_TI = x_TI[:, share.inputs.start : share.inputs.stop]
        x_TI = x_TI.contiguous()
        y_TO = self._product(x_TI)
        if self.lora is not None and (step := current_step()) is not None:
            y_TO = self.lora.add(y_TO, x_TI, step.metadata)
        match share.split:
            case Split.GATHERED_OUTPUTS:
                y_TO = share.group.all_gather(y_TO)[:, : share.num_outputs]
            case Split.INPUTS | Split.INPUTS_OF_ALL:
                y_TO = share.group.all_reduce(y_TO)
        return y_TO.reshape(shape)


def floats_of(weight: Weight, dtype: torch.dtype) -> Tensor:
    """(O, I)."""
    match weight:
        case DenseWeight():
            return weight.values_OI
        case CodedGroups():
            return weight.packed.dequantize(dtype)
        case Int4Groups():
            return weight.packed.dequantize().to(dtype)
        case Fp8Weight():
            return (weight.values_OI.float() * weight.scale_O[:, None]).to(dtype)
        case Fp8BlockWeight():
            return weight.packed.dequantize().to(dtype)
    raise TypeError(f"{type(weight).__name__} has no floats")
