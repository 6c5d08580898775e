"""Loads one rank's weights: from what a family declares to the parts of a network. Knows no architecture.

Legend: I input features, O output features, D hidden size. The weights of layers with a common input are stacked while
they are read. All weights are copied: none is mapped from the files afterwards. Those that another process has read
into shared memory are taken from there, in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from inflight.distributed.tensor_parallel import TensorParallelGroup
from inflight.errors import ConfigurationError
from inflight.layers.experts import Experts
from inflight.layers.linear import ColumnParallelLinear, RowParallelLinear
from inflight.layers.lora import LoraSlots
from inflight.layers.rms_norm import RMSNorm
from inflight.layers.vocabulary import VocabularyParallelEmbedding
from inflight.layers.weight import CodedGroups, DenseWeight, Weight
from inflight.models.adapter_places import AdapterPlace, AdapterPlaces
from inflight.models.cache_scales import CacheScales, read_cache_scales
from inflight.models.checkpoint import Checkpoint
from inflight.models.expert_blocks import ExpertBlocks, find_experts
from inflight.models.family import ExpertTensors, NotSplit, SplitByInputs, SplitByOutputs, SplitByVocabulary
from inflight.models.formats.coded import CodedFormat
from inflight.models.formats.dense import DenseFormat
from inflight.models.formats.format import Block, Target, WeightFormat
from inflight.models.formats.gguf import GgufFormat
from inflight.models.formats.on_load import HEAD_CODES, OnLoadFormat, quantize_into
from inflight.models.shared_weights import SharedWeights
from inflight_kernels import CodedWeight


@dataclass(frozen=True, slots=True)
class Section:
    """Features that belong together (queries, say), and those of them that this rank has."""

    num_features: int
    start: int
    size: int


@dataclass(frozen=True, slots=True)
class WeightLoader:
    """Reads a checkpoint's tensors as the parts of a network, on this rank's device and in its dtype."""

    checkpoint: Checkpoint
    weight_format: WeightFormat
    group: TensorParallelGroup
    dtype: torch.dtype
    device: torch.device
    adapters: AdapterPlaces | None = None
    """Where to note the products that take low-rank adapters; None = none does."""
    deterministic: bool = False
    """Of every part: the bits of a token's result depend on nothing but its own inputs."""
    memory: SharedWeights | None = None
    """Where the tensors lie; None = in the device's memory."""
    stores_fp8: bool = False
    """The KV cache is float8_e4m3fn; else it has the type of the activations."""
    keeps_codes: bool = False
    """See Target."""

    @property
    def elsewhere(self) -> WeightLoader:
        """For what another pipeline stage holds: it checks the tensors, and reads none of them."""
        return replace(self, device=torch.device("meta"), memory=None)

    def split(self, what: str, value: int) -> int:
        """This rank's share of `value`; ConfigurationError, naming `what`, if it does not split evenly."""
        if value % self.group.size:
            raise ConfigurationError(
                f"tensor_parallel_size {self.group.size} does not divide the checkpoint's {what} ({value})"
            )
        return value // self.group.size

    def even_section(self, what: str, num_features: int) -> Section:
        """This rank's even share of `num_features`."""
        size = self.split(what, num_features)
        return Section(num_features, self.group.rank * size, size)

    def by_outputs(
        self, tensors: SplitByOutputs, prefix: str, sections: Sequence[Section], num_inputs: int
    ) -> ColumnParallelLinear:
        """One layer with this rank's output features of every section. `prefix` is prepended to the tensors' names."""
        blocks = [
            Block(
                name=f"{prefix}{name}",
                num_outputs=num_outputs,
                num_inputs=num_inputs,
                outputs=outputs,
                inputs=range(num_inputs),
            )
            for name, num_outputs, outputs in _rows(tensors.names, sections)
        ]
        weight = self.weight_format.read(self.checkpoint, blocks, self._target)
        bias_O = self._stacked_bias(blocks) if tensors.bias else None
        return ColumnParallelLinear(weight, bias_O, self._adapters_of(blocks), self.deterministic)

    def by_inputs(self, tensors: SplitByInputs, prefix: str, num_outputs: int, inputs: Section) -> RowParallelLinear:
        """A layer with this rank's share of the input features and all output features."""
        name = f"{prefix}{tensors.name}"
        block = Block(
            name=name,
            num_outputs=num_outputs,
            num_inputs=inputs.num_features,
            outputs=range(num_outputs),
            inputs=range(inputs.start, inputs.start + inputs.size),
        )
        weight = self.weight_format.read(self.checkpoint, [block], self._target)
        # One rank adds the bias. The others check it, so that it does not count as a tensor that nobody asked for.
        leads = self.group.rank == 0
        if tensors.bias and not leads:
            self.checkpoint.check(f"{name}.bias", (num_outputs,))
        bias_O = self.vector(f"{name}.bias", num_outputs) if tensors.bias and leads else None
        return RowParallelLinear(weight, bias_O, self.group, self._adapters_of([block]), self.deterministic)

    def experts(self, tensors: ExpertTensors, prefix: str, hidden_size: int) -> Experts:
        """This rank's share of every expert's intermediate features, and the whole router. No adapter changes them."""
        own = self.even_section("intermediate size of an expert", tensors.intermediate_size)
        weight_format, router_format = self.weight_format, self.weight_format
        router_name = f"{prefix}{tensors.router.name}"
        gate_up: Tensor | CodedWeight
        down: Tensor | CodedWeight
        first = f"{prefix}{tensors.experts}.0.{tensors.gate}"
        if (
            isinstance(weight_format, CodedFormat)
            and not isinstance(weight_format, OnLoadFormat)
            and not weight_format.is_dense(self.checkpoint, first)
        ):
            gate_up, down = self._coded_experts(weight_format, tensors, prefix, hidden_size, own)
        else:
            router_name, blocks = find_experts(self.checkpoint, tensors, prefix, hidden_size, own.start)
            for of_one in blocks:
                for block in (of_one.gate, of_one.up, of_one.down):
                    self.checkpoint.check(block.name, block.shape)
            if isinstance(weight_format, OnLoadFormat):
                # A wrong choice of experts would cost more than a router's memory.
                router_format = DenseFormat()
                gate_up, down = self._experts_on_load(weight_format, blocks, hidden_size, own.size)
            else:
                gate_up = self._empty(tensors.num_experts, 2 * own.size, hidden_size)
                down = self._empty(tensors.num_experts, hidden_size, own.size)
                for of_one, gate_up_CD, down_DI in zip(blocks, gate_up, down, strict=True):
                    self._copy_expert(of_one, gate_up_CD, down_DI)
        router = Block(
            name=router_name,
            num_outputs=tensors.num_experts,
            num_inputs=hidden_size,
            outputs=range(tensors.num_experts),
            inputs=range(hidden_size),
        )
        return Experts(
            router=router_format.read(self.checkpoint, [router], self._target),
            gate_up_ECD=gate_up,
            down_EDI=down,
            num_chosen=tensors.num_chosen,
            renormalize=tensors.renormalize,
            group=self.group,
            deterministic=self.deterministic,
        )

    def _copy_expert(self, blocks: ExpertBlocks, gate_up_CD: Tensor, down_DI: Tensor) -> None:
        gate_ID, up_ID = gate_up_CD.chunk(2)
        for target, block in ((gate_ID, blocks.gate), (up_ID, blocks.up), (down_DI, blocks.down)):
            stacked = target.view((1,) * (len(block.shape) - target.dim()) + target.shape)
            self.checkpoint.copy_into(stacked, block.name, block.shape, block.starts)

    def _coded_experts(
        self, weight_format: CodedFormat, tensors: ExpertTensors, prefix: str, hidden_size: int, own: Section
    ) -> list[Tensor | CodedWeight]:
        """Gate and up, and down, of a checkpoint whose experts have codes, in tensors of their own."""
        self._refuse_coded_experts(weight_format.quantized)
        features, every = range(own.start, own.start + own.size), range(hidden_size)

        def wide(name: str) -> Block:
            count = own.num_features
            return Block(name=name, num_outputs=count, num_inputs=hidden_size, outputs=features, inputs=every)

        def tall(name: str) -> Block:
            count = own.num_features
            return Block(name=name, num_outputs=hidden_size, num_inputs=count, outputs=every, inputs=features)

        names = [f"{prefix}{tensors.experts}.{number}" for number in range(tensors.num_experts)]
        gate_up = [[wide(f"{name}.{each}") for each in (tensors.gate, tensors.up)] for name in names]
        down = [[tall(f"{name}.{tensors.down}")] for name in names]
        return [weight_format.read_experts(self.checkpoint, each, self._target) for each in (gate_up, down)]

    def _experts_on_load(
        self, weight_format: OnLoadFormat, blocks: Sequence[ExpertBlocks], hidden_size: int, inner_size: int
    ) -> list[CodedWeight]:
        """The same of one whose experts have floats, which become codes."""
        self._refuse_coded_experts(weight_format.quantized)
        shapes = (2 * inner_size, hidden_size), (hidden_size, inner_size)
        weights = [weight_format.allocate(weight_format.code, (len(blocks), *shape), self._target) for shape in shapes]
        if self.checkpoint.is_read and self.device.type != "meta":
            gate_up_CD, down_DI = (torch.empty(shape) for shape in shapes)
            for expert, of_one in enumerate(blocks):
                self._copy_expert(of_one, gate_up_CD, down_DI)
                for weight, values in zip(weights, (gate_up_CD, down_DI), strict=True):
                    quantize_into(weight.of_expert(expert), values)
        return weights

    def _refuse_coded_experts(self, quantized: str) -> None:
        if self.device.type == "cuda":
            raise ConfigurationError(
                f"{self.checkpoint.folder}: quantized experts ({quantized}) are multiplied on CPUs only; use the "
                "float16 or bfloat16 checkpoint, with quantization none"
            )

    def norm(self, tensor: NotSplit, prefix: str, size: int, eps: float) -> RMSNorm:
        return RMSNorm(self.vector(f"{prefix}{tensor.name}.weight", size), eps)

    @property
    def cache_dtype(self) -> torch.dtype:
        """Of keys and values in the KV cache."""
        return torch.float8_e4m3fn if self.stores_fp8 else self.dtype

    def cache_scales(self, attention: str) -> CacheScales:
        """Of the KV cache of the layer with this attention module. A cache of another type than fp8 has none, and the
        checkpoint's are read only to be checked."""
        scales = read_cache_scales(self.checkpoint, attention)
        return scales if self.stores_fp8 else CacheScales()

    def vector(self, name: str, size: int) -> Tensor:
        """The one-dimensional tensor `name`, whole."""
        self.checkpoint.check(name, (size,))
        values = self._empty(size)
        self.checkpoint.copy_into(values, name, (size,))
        return values

    def by_vocabulary(
        self, tensor: SplitByVocabulary, vocab_size: int, hidden_size: int
    ) -> VocabularyParallelEmbedding:
        """This rank's rows of a table with one row per token; the last rank's are padded with zeros."""
        size = -(-vocab_size // self.group.size)
        name, shape = f"{tensor.name}.weight", (vocab_size, hidden_size)
        self.checkpoint.check(name, shape)
        weight_UD = self._empty(size, hidden_size)
        if self.checkpoint.is_read:
            weight_UD.zero_()
        self.checkpoint.copy_into(weight_UD, name, shape, (self.group.rank * size,))
        return VocabularyParallelEmbedding(weight_UD, self.group)

    def head(
        self, tensor: SplitByVocabulary, vocab_size: int, hidden_size: int, table_UD: Tensor | None = None
    ) -> Weight:
        """This rank's rows of the head. `table_UD`: those of the embedding, if it has the same table, which is kept."""
        weight_format, size = self.weight_format, -(-vocab_size // self.group.size)
        if isinstance(weight_format, GgufFormat) and self.keeps_codes and vocab_size % size == 0:
            first = self.group.rank * size
            outputs, inputs = range(first, first + size), range(hidden_size)
            block = Block(
                name=tensor.name, num_outputs=vocab_size, num_inputs=hidden_size, outputs=outputs, inputs=inputs
            )
            if table_UD is None or weight_format.has_codes(self.checkpoint, [block]):
                return weight_format.read(self.checkpoint, [block], self._target)
        is_embedding = table_UD is not None
        if table_UD is None:
            table_UD = self.by_vocabulary(tensor, vocab_size, hidden_size).weight_UD
        if not (isinstance(weight_format, OnLoadFormat) and self.keeps_codes):
            return DenseWeight(table_UD)
        weight = weight_format.allocate(
            HEAD_CODES.get(weight_format.code, weight_format.code), table_UD.shape, self._target
        )
        if self.checkpoint.is_read and self.device.type != "meta":
            quantize_into(weight, table_UD)
        if self.memory is not None and not is_embedding:
            self.memory.release(table_UD)
        return CodedGroups(weight)

    def _adapters_of(self, blocks: Sequence[Block]) -> LoraSlots | None:
        """Slots for the adapters of a product, if it takes any. Blocks of one tensor are one layer to an adapter."""
        if self.adapters is None:
            return None
        by_name: dict[str, list[Block]] = {}
        for block in blocks:
            by_name.setdefault(block.name, []).append(block)
        widths = tuple(sum(len(block.outputs) for block in of_one) for of_one in by_name.values())
        on_meta = self.device.type == "meta"
        slots = None if on_meta else LoraSlots(len(blocks[0].inputs), widths, self.deterministic)
        for index, (name, of_one) in enumerate(by_name.items()):
            place = AdapterPlace(
                num_inputs=of_one[0].num_inputs,
                num_outputs=of_one[0].num_outputs,
                inputs=of_one[0].inputs,
                outputs=tuple(block.outputs for block in of_one),
                slots=slots,
                index=index,
            )
            self.adapters.add(name, place)
        return slots

    def _stacked_bias(self, blocks: Sequence[Block]) -> Tensor:
        for block in blocks:
            self.checkpoint.check(f"{block.name}.bias", (block.num_outputs,))
        bias_O = self._empty(sum(len(block.outputs) for block in blocks))
        parts = torch.split(bias_O, [len(block.outputs) for block in blocks])
        for block, part in zip(blocks, parts, strict=True):
            self.checkpoint.copy_into(part, f"{block.name}.bias", (block.num_outputs,), (block.outputs.start,))
        return bias_O

    @property
    def _target(self) -> Target:
        return Target(dtype=self.dtype, device=self.device, empty=self._empty, keeps_codes=self.keeps_codes)

    def _empty(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """See Allocate."""
        dtype = dtype or self.dtype
        if self.memory is not None:
            return self.memory.empty(shape, dtype)
        return torch.empty(shape, dtype=dtype, device=self.device)


def _rows(names: Sequence[str], sections: Sequence[Section]) -> list[tuple[str, int, range]]:
    """For each section: the tensor that holds it, the tensor's output features, and this rank's rows of it."""
    if len(names) > 1:
        return [
            (name, section.num_features, range(section.start, section.start + section.size))
            for name, section in zip(names, sections, strict=True)
        ]
    total = sum(section.num_features for section in sections)
    rows, before = [], 0
    for section in sections:
        start = before + section.start
        rows.append((names[0], total, range(start, start + section.size)))
        before += section.num_features
    return rows
