"""Loads one rank's part of a mixture of experts: from what a family declares to a part of a network.

Legend: I input features, O output features, D hidden size, C gate and up of a rank, E experts, of weights a rank's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeGuard, TypeVar

import torch
from torch import Tensor

from inflight.distributed.tensor_parallel import TensorParallelGroup
from inflight.errors import ConfigurationError
from inflight.layers.experts import Experts, SharedExperts
from inflight.layers.linear import ColumnParallelLinear, RowParallelLinear
from inflight.layers.mlp import MLP, GatedMLP
from inflight.layers.norm import RMSNorm
from inflight.layers.weight import Weight
from inflight.models.expert_blocks import ExpertBlock, ExpertBlocks, find_experts, find_layout
from inflight.models.family import BesideMLP, ChoiceBias, ExpertTensors, NormStyle, StackedExperts
from inflight.models.formats.coded import CodedFormat
from inflight.models.formats.dense import DenseFormat
from inflight.models.formats.format import Block, WeightFormat
from inflight.models.formats.gguf import GgufFormat
from inflight.models.formats.mxfp4 import Mxfp4Experts, StackedBlocks
from inflight.models.formats.on_load import OnLoadFormat, quantize_into
from inflight.models.weights import Section, WeightLoader
from inflight_kernels import CodedWeight
from inflight_kernels.moe import ExpertWeights

Each = TypeVar("Each")


def load_mixture(
    loader: WeightLoader, tensors: ExpertTensors, prefix: str, hidden_size: int, norms: NormStyle
) -> Experts | SharedExperts:
    """The second half of a layer: experts, and those that compute every token, if there are any. `norms`: of experts
    beside an MLP."""
    if tensors.beside is not None:
        return _with_norms(loader, tensors, tensors.beside, prefix, hidden_size, norms)
    if tensors.shared is None:
        return load_experts(loader, tensors, prefix, hidden_size)
    shared, alone = tensors.shared, TensorParallelGroup()
    own = loader.even_section("intermediate size of the shared experts", shared.intermediate_size)
    first = loader.by_outputs(shared.gate_up, prefix, (own,) * len(tensors.first_products), hidden_size)
    down = replace(loader.by_inputs(shared.down, prefix, hidden_size, own), group=alone)
    return SharedExperts(
        # What both compute is summed over the ranks together.
        chosen=replace(load_experts(loader, tensors, prefix, hidden_size), group=alone),
        shared=(MLP if tensors.gate is None else GatedMLP)(first, down, tensors.activation),
        gate=None if shared.gate is None else _read_whole(loader, f"{prefix}{shared.gate.name}", 1, hidden_size),
        group=loader.group,
        deterministic=loader.deterministic,
    )


def _with_norms(
    loader: WeightLoader, tensors: ExpertTensors, beside: BesideMLP, prefix: str, hidden_size: int, norms: NormStyle
) -> Experts:
    experts = load_experts(loader, tensors, prefix, hidden_size)
    scale_D = loader.vector(f"{prefix}{beside.router_scale}", hidden_size, torch.float32, times=hidden_size**-0.5)
    experts.router_norm = RMSNorm(scale_D, norms.eps)
    experts.norm = RMSNorm(loader.norm_weight(beside.norm, prefix, hidden_size, norms), norms.eps)
    experts.factors_E = loader.vector(f"{prefix}{beside.factors}", tensors.num_experts, torch.float32)
    return experts


def load_experts(loader: WeightLoader, tensors: ExpertTensors, prefix: str, hidden_size: int) -> Experts:
    """This rank's experts, or its share of their intermediate features, and the whole router. No adapter changes
    them."""
    return _ExpertLoader(loader, tensors, prefix, hidden_size).load()


def _read_whole(loader: WeightLoader, name: str, num_outputs: int, num_inputs: int) -> Weight:
    """A small product that every rank computes. It is not quantised on load: a wrong choice of experts would cost more
    than its memory."""
    block = Block(
        name=name,
        num_outputs=num_outputs,
        num_inputs=num_inputs,
        outputs=range(num_outputs),
        inputs=range(num_inputs),
    )
    is_dense = isinstance(loader.weight_format, OnLoadFormat)
    weight_format = DenseFormat() if is_dense else loader.weight_format
    return weight_format.read(loader.checkpoint, [block], loader.target)


@dataclass(frozen=True, slots=True)
class _ExpertLoader:
    """Of one layer."""

    loader: WeightLoader
    tensors: ExpertTensors
    prefix: str
    """Of the layer's tensors."""
    hidden_size: int

    @property
    def size(self) -> int:
        """Of what an expert reads and writes."""
        return self.hidden_size if self.tensors.narrow is None else self.tensors.narrow.size

    @property
    def own(self) -> Section:
        """This rank's share of the intermediate features of each of its experts."""
        return self.loader.features_of_experts(self.tensors.intermediate_size)

    @property
    def numbers(self) -> range:
        """Of this rank's experts."""
        return self.loader.experts_of_rank(self.tensors.num_experts)

    @property
    def adds_bias(self) -> bool:
        """Whether this rank adds the bias of their down: one of those that have the same experts does."""
        return self.own.start == 0

    def load(self) -> Experts:
        loader, tensors = self.loader, self.tensors
        layout = find_layout(loader.checkpoint, tensors, self.prefix)
        gate_up, down = self._weights(layout)
        gate_up_bias, down_bias = self._biases(layout) if tensors.has_biases else (None, None)
        narrow, widen = self._around()
        router = f"{self.prefix}{tensors.router.name if layout is None else layout.router}"
        return Experts(
            router=_read_whole(loader, router, tensors.num_experts, self.hidden_size),
            router_bias_E=loader.vector(f"{router}.bias", tensors.num_experts) if tensors.router_bias else None,
            choice_bias_E=None if tensors.choice_bias is None else self._choice_bias(tensors.choice_bias),
            first_expert=self.numbers.start,
            gate_up_ECD=gate_up,
            gate_up_bias_EC=gate_up_bias,
            down_EDI=down,
            down_bias_ED=down_bias,
            routing=tensors.routing,
            activation=tensors.activation,
            group=loader.group,
            deterministic=loader.deterministic,
            narrow=narrow,
            widen=widen,
        )

    def _around(self) -> tuple[ColumnParallelLinear | None, RowParallelLinear | None]:
        """The products around narrow experts, which no adapter changes. Ranks make hidden features of their parts of
        the sum."""
        if self.tensors.narrow is None:
            return None, None
        loader, narrow = replace(self.loader, adapters=None), self.tensors.narrow
        whole = Section(narrow.size, 0, narrow.size)
        output = loader.by_inputs(narrow.output, self.prefix, self.hidden_size, whole)
        inputs = loader.by_outputs(narrow.inputs, self.prefix, (whole,), self.hidden_size)
        return inputs, replace(output, group=TensorParallelGroup())

    def _weights(self, layout: StackedExperts | None) -> Sequence[ExpertWeights]:
        """Gate and up, and down."""
        loader, tensors, weight_format = self.loader, self.tensors, self.loader.weight_format
        if isinstance(weight_format, Mxfp4Experts) and layout is not None:
            return self._of_mxfp4(weight_format, layout)
        if self._reads_experts(weight_format):
            return self._of_format(weight_format)
        blocks = find_experts(layout, tensors, self.prefix, self.size, self.own.start)
        for of_one in blocks:
            for block in (*of_one.first, of_one.down):
                loader.checkpoint.check(block.name, block.shape)
        if isinstance(weight_format, OnLoadFormat):
            return self._on_load(weight_format, blocks)
        num_first, num_own = len(tensors.first_products), len(self.numbers)
        gate_up = loader.empty(num_own, num_first * self.own.size, self.size)
        down = loader.empty(num_own, self.size, self.own.size)
        for of_one, gate_up_CD, down_DI in zip(self._of_rank(blocks), gate_up, down, strict=True):
            for target, block in zip(
                (*gate_up_CD.chunk(num_first), down_DI), (*of_one.first, of_one.down), strict=True
            ):
                self._copy_block(block, target)
        return gate_up, down

    def _of_rank(self, experts: Sequence[Each]) -> Sequence[Each]:
        """Of something of each expert."""
        return experts[self.numbers.start : self.numbers.stop]

    def _biases(self, layout: StackedExperts | None) -> tuple[Tensor, Tensor | None]:
        """Of gate and up, and of down, see `adds_bias`."""
        return self._own_biases() if layout is None else self._stacked_biases(layout)

    def _own_biases(self) -> tuple[Tensor, Tensor | None]:
        """Of experts with tensors of their own."""
        loader, own, tensors = self.loader, self.own, self.tensors
        wide, tall = (own.num_features,), (self.size,)
        experts = [f"{self.prefix}{tensors.experts}.{number}" for number in range(tensors.num_experts)]
        for expert in experts:
            for name, shape in (*((name, wide) for name in tensors.first_products), (tensors.down, tall)):
                loader.checkpoint.check(f"{expert}.{name}.bias", shape)
        own_experts, num_first = self._of_rank(experts), len(tensors.first_products)
        gate_up_EC = loader.empty(len(own_experts), num_first * own.size)
        for expert, gate_up_C in zip(own_experts, gate_up_EC, strict=True):
            for half_I, name in zip(gate_up_C.chunk(num_first), tensors.first_products, strict=True):
                loader.checkpoint.copy_into(half_I, f"{expert}.{name}.bias", wide, (own.start,))
        if not self.adds_bias:
            return gate_up_EC, None
        down_ED = loader.empty(len(own_experts), *tall)
        for expert, down_D in zip(own_experts, down_ED, strict=True):
            loader.checkpoint.copy_into(down_D, f"{expert}.{tensors.down}.bias", tall)
        return gate_up_EC, down_ED

    def _stacked_biases(self, layout: StackedExperts) -> tuple[Tensor, Tensor | None]:
        loader, own, num_experts, numbers = self.loader, self.own, self.tensors.num_experts, self.numbers
        gate_up, wide = f"{self.prefix}{layout.gate_up}_bias", (num_experts, 2 * own.num_features)
        down, tall = f"{self.prefix}{layout.down}_bias", (num_experts, self.hidden_size)
        for name, shape in ((gate_up, wide), (down, tall)):
            loader.checkpoint.check(name, shape)
        gate_up_EC = loader.empty(len(numbers), 2 * own.size)
        halves_EI = gate_up_EC.chunk(2, 1)
        if layout.is_transposed:
            pairs_EC = torch.zeros_like(gate_up_EC)
            loader.checkpoint.copy_into(pairs_EC, gate_up, wide, (numbers.start, 2 * own.start))
            if loader.checkpoint.is_read:
                for place, half_EI in enumerate(halves_EI):
                    half_EI.copy_(pairs_EC[:, place::2])
        else:
            for place, half_EI in enumerate(halves_EI):
                starts = numbers.start, place * own.num_features + own.start
                loader.checkpoint.copy_into(half_EI, gate_up, wide, starts)
        if not self.adds_bias:
            return gate_up_EC, None
        down_ED = loader.empty(len(numbers), self.hidden_size)
        loader.checkpoint.copy_into(down_ED, down, tall, (numbers.start,))
        return gate_up_EC, down_ED

    def _choice_bias(self, bias: ChoiceBias) -> Tensor:
        checkpoint, num_experts = self.loader.checkpoint, self.tensors.num_experts
        names = [f"{self.prefix}{name}" for name in bias.names]
        name = next((name for name in names if name in checkpoint), names[0])
        shape = (1, num_experts) if bias.is_row else (num_experts,)
        checkpoint.check(name, shape)
        bias_E = self.loader.empty(num_experts, dtype=torch.float32)
        checkpoint.copy_into(bias_E.view(shape), name, shape)
        return bias_E

    def _copy_block(self, block: ExpertBlock, target: Tensor) -> None:
        checkpoint = self.loader.checkpoint
        if not block.is_transposed:
            stacked = target.view((1,) * (len(block.shape) - target.dim()) + target.shape)
            checkpoint.copy_into(stacked, block.name, block.shape, block.starts)
        elif checkpoint.is_read and not target.is_meta:
            num_outputs, num_inputs = target.shape
            first, step = block.turn
            columns = target.new_empty(1, num_inputs, step * num_outputs)
            checkpoint.copy_into(columns, block.name, block.shape, block.starts)
            target.copy_(columns[0, :, first::step].T)

    def _reads_experts(self, weight_format: WeightFormat) -> TypeGuard[CodedFormat | GgufFormat]:
        """Whether the format reads experts itself."""
        if isinstance(weight_format, CodedFormat) and not isinstance(weight_format, OnLoadFormat):
            first = f"{self.prefix}{self.tensors.experts}.0.{self.tensors.up}"
            return not weight_format.is_dense(self.loader.checkpoint, first)
        return isinstance(weight_format, GgufFormat)

    def _of_mxfp4(self, weight_format: Mxfp4Experts, layout: StackedExperts) -> list[ExpertWeights]:
        own, num_experts, hidden_size = self.own, self.tensors.num_experts, self.hidden_size
        gate_up = StackedBlocks(
            name=f"{self.prefix}{layout.gate_up}",
            num_experts=num_experts,
            experts=self.numbers,
            num_outputs=2 * own.num_features,
            num_inputs=hidden_size,
            outputs=range(2 * own.start, 2 * (own.start + own.size)),
            inputs=range(hidden_size),
            in_turn=True,
        )
        down = StackedBlocks(
            name=f"{self.prefix}{layout.down}",
            num_experts=num_experts,
            experts=self.numbers,
            num_outputs=hidden_size,
            num_inputs=own.num_features,
            outputs=range(hidden_size),
            inputs=range(own.start, own.start + own.size),
        )
        loader = self.loader
        return [weight_format.read_stacked(loader.checkpoint, each, loader.target) for each in (gate_up, down)]

    def _of_format(self, weight_format: CodedFormat | GgufFormat) -> list[ExpertWeights]:
        """Gate and up, and down, of a checkpoint that has, for its format, a tensor for each expert."""
        if not weight_format.has_expert_kernel:
            self._refuse_codes(weight_format.quantized)
        loader, tensors, hidden_size, own = self.loader, self.tensors, self.size, self.own
        features, every, count = range(own.start, own.start + own.size), range(hidden_size), own.num_features

        def wide(name: str) -> Block:
            return Block(name=name, num_outputs=count, num_inputs=hidden_size, outputs=features, inputs=every)

        def tall(name: str) -> Block:
            return Block(name=name, num_outputs=hidden_size, num_inputs=count, outputs=every, inputs=features)

        names = [f"{self.prefix}{tensors.experts}.{number}" for number in range(tensors.num_experts)]
        gate_up = [[wide(f"{name}.{each}") for each in tensors.first_products] for name in names]
        down = [[tall(f"{name}.{tensors.down}")] for name in names]
        others = [number for number in range(tensors.num_experts) if number not in self.numbers]
        for each in (gate_up, down) if others else ():
            # They are checked only.
            weight_format.read_experts(loader.checkpoint, [each[number] for number in others], loader.elsewhere.target)
        return [
            weight_format.read_experts(loader.checkpoint, self._of_rank(each), loader.target)
            for each in (gate_up, down)
        ]

    def _on_load(self, weight_format: OnLoadFormat, blocks: Sequence[ExpertBlocks]) -> list[CodedWeight]:
        """The same of one whose experts have floats, which become codes."""
        self._refuse_codes(weight_format.quantized)
        loader, tensors, hidden_size, own = self.loader, self.tensors, self.size, self.own
        shapes = (len(tensors.first_products) * own.size, hidden_size), (hidden_size, own.size)
        num_own = len(self.numbers)
        weights = [weight_format.allocate(weight_format.code, (num_own, *shape), loader.target) for shape in shapes]
        if not loader.checkpoint.is_read or loader.device.type == "meta":
            return weights
        features, every = range(own.start, own.start + own.size), range(hidden_size)
        for place, (expert, of_one) in enumerate(zip(self.numbers, self._of_rank(blocks), strict=True)):
            gate_up, down = (weight.of_expert(place) for weight in weights)
            first = [
                (gate_up.rows(slice(half * own.size, (half + 1) * own.size)), block, name, features, every)
                for half, (block, name) in enumerate(zip(of_one.first, tensors.first_products, strict=True))
            ]
            for weight, block, name, outputs, inputs in (*first, (down, of_one.down, tensors.down, every, features)):
                name = f"{self.prefix}{tensors.experts}.{expert}.{name}"
                weight_format.keep(weight, name, outputs, inputs, partial(self._quantize, weight, block))
        return weights

    def _quantize(self, weight: CodedWeight, block: ExpertBlock) -> None:
        values = torch.empty(weight.shape)
        self._copy_block(block, values)
        quantize_into(weight, values)

    def _refuse_codes(self, quantized: str) -> None:
        if self.loader.device.type == "cuda":
            raise ConfigurationError(
                f"{self.loader.checkpoint.folder}: quantized experts ({quantized}) are multiplied on CPUs only; use "
                "the float16 or bfloat16 checkpoint, with quantization none"
            )
