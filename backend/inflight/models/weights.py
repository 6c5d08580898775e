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
from inflight.layers.linear import ColumnParallelLinear, RowParallelLinear
from inflight.layers.lora import LoraSlots
from inflight.layers.norm import LayerNorm, NoNorm, RMSNorm
from inflight.layers.vocabulary import VocabularyParallelEmbedding
from inflight.layers.weight import CodedGroups, DenseWeight, Weight
from inflight.models.adapter_places import AdapterPlace, AdapterPlaces
from inflight.models.cache_scales import CacheScales, read_cache_scales
from inflight.models.checkpoint import Checkpoint
from inflight.models.family import LearnedPositions, NormStyle
from inflight.models.formats.coded import CodedFormat
from inflight.models.formats.dense import DenseFormat
from inflight.models.formats.format import Block, Target, WeightFormat
from inflight.models.formats.gguf import GgufFormat
from inflight.models.formats.on_load import HEAD_CODES, OnLoadFormat, quantize_into
from inflight.models.shared_weights import SharedWeights
from inflight.models.split_tensors import NotSplit, SplitByInputs, SplitByOutputs, SplitByVocabulary
from inflight_kernels import Inputs


@dataclass(frozen=True, slots=True)
class Section:
    """Features that belong together (queries, say), and those of them that this rank has."""

    num_features: int
    start: int
    size: int


def times(heads: Section, size: int) -> Section:
    """The features of these heads, `size` of each."""
    return Section(heads.num_features * size, heads.start * size, heads.size * size)


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
    kv_dtype: torch.dtype | None = None
    """Of the KV cache: float8_e4m3fn or int8; None = that of the activations."""
    keeps_codes: bool = False
    inputs: Inputs | None = None
    """See Target."""
    expert_parallel_size: int = 1
    """Sets of ranks that divide a layer's experts: a rank has those of its number modulo this, and what it has of each
    is a part of as many as there are ranks in its set."""

    @property
    def elsewhere(self) -> WeightLoader:
        """For what another pipeline stage holds: it checks the tensors, and reads none of them."""
        return replace(self, device=torch.device("meta"), memory=None)

    def split(self, what: str, value: int) -> int:
        """This rank's share of `value`; ConfigurationError, naming `what`, if it does not split evenly."""
        return _part(value, self.group.size, "tensor_parallel_size", what)

    def even_section(self, what: str, num_features: int) -> Section:
        """This rank's even share of `num_features`."""
        size = self.split(what, num_features)
        return Section(num_features, self.group.rank * size, size)

    def experts_of_rank(self, num_experts: int) -> range:
        """Numbers of those of a layer that this rank has, whole or in part. Raises ConfigurationError."""
        count, place = self.expert_parallel_size, self.group.rank % self.expert_parallel_size
        size = _part(num_experts, count, "moe_expert_parallel_size", "number of experts")
        return range(place * size, (place + 1) * size)

    def features_of_experts(self, intermediate_size: int) -> Section:
        """This rank's share of the intermediate features of each of them. Raises ConfigurationError."""
        num_sets = self.expert_parallel_size
        place, count = self.group.rank // num_sets, self.group.size // num_sets
        divisor = "tensor_parallel_size" if num_sets == 1 else "tensor_parallel_size / moe_expert_parallel_size ="
        size = _part(intermediate_size, count, divisor, "intermediate size of an expert")
        return Section(intermediate_size, place * size, size)

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
                transposed=tensors.transposed,
            )
            for name, num_outputs, outputs in _rows(tensors, sections)
        ]
        weight = self.weight_format.read(self.checkpoint, blocks, self.target)
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
            transposed=tensors.transposed,
        )
        weight = self.weight_format.read(self.checkpoint, [block], self.target)
        # One rank adds the bias. The others check it, so that it does not count as a tensor that nobody asked for.
        leads = self.group.rank == 0
        if tensors.bias and not leads:
            self.checkpoint.check(f"{name}.bias", (num_outputs,))
        bias_O = self.vector(f"{name}.bias", num_outputs) if tensors.bias and leads else None
        return RowParallelLinear(weight, bias_O, self.group, self._adapters_of([block]), self.deterministic)

    def norm(self, tensor: NotSplit | None, prefix: str, size: int, style: NormStyle) -> RMSNorm | LayerNorm | NoNorm:
        if tensor is None:
            return NoNorm()
        weight_D = self.norm_weight(tensor, prefix, size, style)
        if not style.centers:
            return RMSNorm(weight_D, style.eps)
        return LayerNorm(weight_D, self.vector(f"{prefix}{tensor.name}.bias", size) if style.bias else None, style.eps)

    def norm_weight(
        self, tensor: NotSplit, prefix: str, size: int, style: NormStyle, part: Section | None = None
    ) -> Tensor:
        """What a norm multiplies. `part`: see `vector`."""
        dtype = torch.float32 if style.rounds_once and not style.centers else self.dtype
        return self.vector(f"{prefix}{tensor.name}.weight", size, dtype, float(style.adds_one), part)

    def floats(self, block: Block) -> Tensor:
        """(O, I) of the activations' type, read into memory that no part of a network keeps, from whichever format; not
        filled where the checkpoint is not read."""

        def empty(*shape: int, dtype: torch.dtype | None = None) -> Tensor:
            return torch.empty(shape, dtype=dtype or self.dtype, device=self.device)

        target = replace(self.target, empty=empty, keeps_codes=False)
        weight_format = self.weight_format
        if isinstance(weight_format, CodedFormat):
            return weight_format.read_floats(self.checkpoint, [block], target)
        weight = (DenseFormat() if isinstance(weight_format, OnLoadFormat) else weight_format).read(
            self.checkpoint, [block], target
        )
        assert isinstance(weight, DenseWeight)
        return weight.values_OI

    def of_heads(self, name: str, heads: Section, ones: tuple[int, int] = (0, 0)) -> Tensor:
        """float32, a number of each of this rank's heads, from the tensor `name`, which has so many dimensions of 1
        before that of heads, and behind it."""
        values_H = self.empty(heads.size, dtype=torch.float32)
        before, behind = ((1,) * count for count in ones)
        shape, starts = (*before, heads.num_features, *behind), (*(0,) * len(before), heads.start)
        self.checkpoint.copy_into(values_H.view(*before, -1, *behind), name, shape, starts)
        return values_H

    @property
    def cache_dtype(self) -> torch.dtype:
        """Of keys and values in the KV cache."""
        return self.kv_dtype or self.dtype

    def cache_scales(self, attention: str) -> CacheScales:
        """Of the KV cache of the layer with this attention module. A cache of another type than fp8 has none, and the
        checkpoint's are read only to be checked."""
        scales = read_cache_scales(self.checkpoint, attention)
        return scales if self.kv_dtype == torch.float8_e4m3fn else CacheScales()

    def rounded(self, factor: float) -> float:
        """To the type of the activations."""
        return torch.tensor(factor, dtype=self.dtype).item()

    def vector(
        self,
        name: str,
        size: int,
        dtype: torch.dtype | None = None,
        added: float = 0.0,
        part: Section | None = None,
        times: float = 1.0,
    ) -> Tensor:
        """The one-dimensional tensor `name`, whole or a `part` of it, `added` to its values, or each `times` a number;
        without `dtype` of that of activations."""
        part = part or Section(size, 0, size)
        self.checkpoint.check(name, (size,))
        values = self.empty(part.size, dtype=dtype)
        self.checkpoint.copy_into(values, name, (size,), (part.start,), added=added, times=times)
        return values

    def stacked_rows(
        self,
        names: str | Sequence[str],
        sections: Sequence[Section],
        shape: tuple[int, ...] = (),
        multipliers: Sequence[float] = (),
    ) -> Tensor:
        """This rank's rows of each section, which stand one behind the other in one tensor, or have each its own; each
        is of `shape`, and flat here, or a number. `multipliers`: of each section; with any other than 1 rows are
        float32."""
        names = (names,) * len(sections) if isinstance(names, str) else names
        sizes: dict[str, int] = {}
        for name, section in zip(names, sections, strict=True):
            sizes[name] = sizes.get(name, 0) + section.num_features
        for name, size in sizes.items():
            self.checkpoint.check(name, (size, *shape))
        multipliers = multipliers or (1.0,) * len(sections)
        dtype = None if set(multipliers) == {1.0} else torch.float32
        rows = self.empty(sum(section.size for section in sections), *shape, dtype=dtype)
        before, firsts = 0, dict.fromkeys(sizes, 0)
        for name, section, multiplier in zip(names, sections, multipliers, strict=True):
            own, starts = rows[before : before + section.size], (firsts[name] + section.start,)
            self.checkpoint.copy_into(own, name, (sizes[name], *shape), starts, times=multiplier)
            before += section.size
            firsts[name] += section.num_features
        return rows.flatten(1) if shape else rows

    def by_vocabulary(
        self, tensor: SplitByVocabulary, vocab_size: int, hidden_size: int, head: Weight | None = None
    ) -> VocabularyParallelEmbedding:
        """This rank's rows of a table with one row per token; the last rank's are padded with zeros. `head`: the one
        that has the same table, which is then in memory once, unless its codes have zeros and so its rows are rounded
        otherwise."""
        if head is None and (block := self._rows_of_gguf(tensor, vocab_size, hidden_size)) is not None:
            assert isinstance(self.weight_format, GgufFormat)
            if self.weight_format.has_exact_codes(self.checkpoint, block):
                head = self.weight_format.read(self.checkpoint, [block], self._target_of_head)
        match head:
            case CodedGroups(packed=packed) if packed.zeros is None:
                return VocabularyParallelEmbedding(packed, self.group, self.dtype)
            case DenseWeight(values_OI=table_UD):
                return VocabularyParallelEmbedding(table_UD, self.group, self.dtype)
        return VocabularyParallelEmbedding(self._dense_table(tensor, vocab_size, hidden_size), self.group, self.dtype)

    def positions(self, tensor: LearnedPositions, num_rows: int, num_positions: int, hidden_size: int) -> Tensor:
        """The first `num_positions` rows of a table with `num_rows` positions; zeros behind them."""
        shape = (num_rows + tensor.first, hidden_size)
        self.checkpoint.check(f"{tensor.name}.weight", shape)
        table_SD = self.empty(num_positions, hidden_size)
        if self.checkpoint.is_read:
            table_SD.zero_()
        self.checkpoint.copy_into(table_SD, f"{tensor.name}.weight", shape, (tensor.first,))
        return table_SD

    def table(self, tensor: NotSplit, num_rows: int, hidden_size: int) -> Tensor:
        """All rows of a table, which every rank has."""
        self.checkpoint.check(f"{tensor.name}.weight", (num_rows, hidden_size))
        table_ND = self.empty(num_rows, hidden_size)
        self.checkpoint.copy_into(table_ND, f"{tensor.name}.weight", (num_rows, hidden_size))
        return table_ND

    def head_bias(self, tensor: SplitByVocabulary, vocab_size: int) -> Tensor | None:
        """This rank's elements of the head's bias, if it has one; the last rank's are padded with zeros."""
        if not tensor.bias:
            return None
        bias_U = self.empty(-(-vocab_size // self.group.size))
        if self.checkpoint.is_read:
            bias_U.zero_()
        self.checkpoint.check(f"{tensor.name}.bias", (vocab_size,))
        self.checkpoint.copy_into(bias_U, f"{tensor.name}.bias", (vocab_size,), (self.group.rank * len(bias_U),))
        return bias_U

    def _rows_of_gguf(self, tensor: SplitByVocabulary, vocab_size: int, hidden_size: int) -> Block | None:
        """This rank's rows of a table of a GGUF file, which may be codes; None where it is read as floats."""
        size = -(-vocab_size // self.group.size)
        if not isinstance(self.weight_format, GgufFormat) or not self.keeps_codes or vocab_size % size:
            return None
        first = self.group.rank * size
        outputs, inputs = range(first, first + size), range(hidden_size)
        return Block(name=tensor.name, num_outputs=vocab_size, num_inputs=hidden_size, outputs=outputs, inputs=inputs)

    def _dense_table(self, tensor: SplitByVocabulary, vocab_size: int, hidden_size: int) -> Tensor:
        table_UD = self._empty_table(tensor, vocab_size, hidden_size)
        self._fill_table(table_UD, tensor, vocab_size, hidden_size)
        return table_UD

    def _empty_table(self, tensor: SplitByVocabulary, vocab_size: int, hidden_size: int) -> Tensor:
        self.checkpoint.check(f"{tensor.name}.weight", (vocab_size, hidden_size))
        return self.empty(-(-vocab_size // self.group.size), hidden_size)

    def _fill_table(self, table_UD: Tensor, tensor: SplitByVocabulary, vocab_size: int, hidden_size: int) -> None:
        if self.checkpoint.is_read:
            table_UD.zero_()
        first = self.group.rank * len(table_UD)
        self.checkpoint.copy_into(table_UD, f"{tensor.name}.weight", (vocab_size, hidden_size), (first,))

    def head(self, tensor: SplitByVocabulary, vocab_size: int, hidden_size: int) -> Weight:
        """This rank's rows of the head."""
        if (block := self._rows_of_gguf(tensor, vocab_size, hidden_size)) is not None:
            return self.weight_format.read(self.checkpoint, [block], self._target_of_head)
        weight_format, size = self.weight_format, -(-vocab_size // self.group.size)
        if not (isinstance(weight_format, OnLoadFormat) and self.keeps_codes):
            return DenseWeight(self._dense_table(tensor, vocab_size, hidden_size))
        values_UD = self._empty_table(tensor, vocab_size, hidden_size)
        code = HEAD_CODES.get(weight_format.code, weight_format.code)
        weight = weight_format.allocate(code, values_UD.shape, self._target_of_head)

        def quantize() -> None:
            self._fill_table(values_UD, tensor, vocab_size, hidden_size)
            quantize_into(weight, values_UD)

        if self.checkpoint.is_read and self.device.type != "meta":
            outputs = range(self.group.rank * size, (self.group.rank + 1) * size)
            weight_format.keep(weight, tensor.name, outputs, range(hidden_size), quantize)
        if self.memory is not None:
            self.memory.release(values_UD)
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
        bias_O = self.empty(sum(len(block.outputs) for block in blocks))
        parts = torch.split(bias_O, [len(block.outputs) for block in blocks])
        for block, part in zip(blocks, parts, strict=True):
            self.checkpoint.copy_into(part, f"{block.name}.bias", (block.num_outputs,), (block.outputs.start,))
        return bias_O

    @property
    def target(self) -> Target:
        """Of weights that are read."""
        return Target(
            dtype=self.dtype,
            device=self.device,
            empty=self.empty,
            keeps_codes=self.keeps_codes,
            inputs=self.inputs,
        )

    @property
    def _target_of_head(self) -> Target:
        """The head's inputs are kept: a wrong logit is a wrong token."""
        return replace(self.target, inputs=Inputs.KEPT)

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """See Allocate."""
        dtype = dtype or self.dtype
        if self.memory is not None:
            return self.memory.empty(shape, dtype)
        return torch.empty(shape, dtype=dtype, device=self.device)


def _part(value: int, num_parts: int, divisor: str, what: str) -> int:
    """`divisor`: what says how many parts."""
    if value % num_parts:
        raise ConfigurationError(f"{divisor} {num_parts} does not divide the checkpoint's {what} ({value})")
    return value // num_parts


def _rows(tensors: SplitByOutputs, sections: Sequence[Section]) -> list[tuple[str, int, range]]:
    """For each section: the tensor that holds it, the tensor's output features, and this rank's rows of it. Of sections
    that alternate each turn's rows stand alone."""
    names = tensors.names if len(tensors.names) > 1 else tensors.names * len(sections)
    turns = tensors.alternating or (0,) * len(sections)
    rows: list[tuple[str, int, range]] = []
    for place, (name, section, turn) in enumerate(zip(names, sections, turns, strict=True)):
        mates = [other for other, its_name in enumerate(names) if its_name == name]
        before = [other for other in mates if other < place]
        total = sum(sections[other].num_features for other in mates)
        if turn:
            period, offset = sum(turns[other] for other in mates), sum(turns[other] for other in before)
            starts = [
                number * period + offset
                for number in range(section.start // turn, (section.start + section.size) // turn)
            ]
            rows += [(name, total, range(start, start + turn)) for start in starts]
        else:
            start = sum(sections[other].num_features for other in before) + section.start
            rows.append((name, total, range(start, start + section.size)))
    return rows
