"""How transformers' `tp_plan` of a class splits its network over the ranks: the plan's styles as this engine's kinds of
split, and what of each module a rank then has. Knows no architecture.

Legend: V vocabulary, I intermediate size of an expert.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from inflight.distributed.tensor_parallel import TensorParallelGroup
from inflight.models.transformers_refusals import NOT_SPLIT


class Split(Enum):
    """Of a linear layer: see SplitByOutputs and SplitByInputs for what a rank has of it."""

    OUTPUTS = "outputs"
    """Who reads them computes with this rank's alone."""
    GATHERED_OUTPUTS = "gathered outputs"
    """Every rank gets all of them."""
    INPUTS = "inputs"
    """What the layer is called with is this rank's alone."""
    INPUTS_OF_ALL = "inputs of all"
    """It is called with all of them."""

    @property
    def is_by_outputs(self) -> bool:
        return self in (Split.OUTPUTS, Split.GATHERED_OUTPUTS)


LINEAR_STYLES: Mapping[str, Split] = {
    "colwise": Split.OUTPUTS,
    "colwise_gather_output": Split.GATHERED_OUTPUTS,
    "rowwise": Split.INPUTS,
    "rowwise_split_input": Split.INPUTS_OF_ALL,
}
EXPERTS = "moe_tp_experts"
"""A module of experts. What a rank has of it is an ExpertShare, of other modules of experts that this engine computes,
too."""
OF_EXPERTS = frozenset({"packed_colwise", "colwise", "rowwise"})
"""Styles of its parameters."""
WHOLE_STYLES = frozenset({"replicated_with_grad_allreduce", "mla_kv_a_proj", "embedding_rowwise"})
"""Of modules that every rank has whole; and of embeddings, which are split by vocabulary whatever a plan says."""
KNOWN_STYLES = LINEAR_STYLES.keys() | WHOLE_STYLES | {EXPERTS} | OF_EXPERTS
HEAD_COUNTS = ("num_attention_heads", "swa_num_attention_heads", "num_attention_heads_per_layer")
"""Keys of configurations; the last one has a number for each layer."""
KEY_HEAD_COUNTS = ("num_key_value_heads", "num_global_key_value_heads", "swa_num_key_value_heads")
KEY_LAYERS = ("k_proj", "v_proj")
"""Names of layers that make keys and values alone, of which ranks may have copies of a head."""


EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Likewise. A layer with so many outputs is a router."""
NO_PLAN = "it has no tp_plan in transformers 5.17"
NO_EXPERTS = "has no experts that this engine computes; set moe_expert_parallel_size to 1"


class NotSplit(Exception):
    """The network cannot be split over so many ranks; the message is a clause about it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What a rank has of a linear layer, and what ranks exchange."""

    num_inputs: int
    num_outputs: int
    """Both of the whole layer."""
    inputs: range
    outputs: range
    split: Split | None = None
    """None = the rank has all of it."""
    group: TensorParallelGroup = field(default_factory=TensorParallelGroup)

    @classmethod
    def whole(cls, num_inputs: int, num_outputs: int) -> Share:
        return cls(num_inputs=num_inputs, num_outputs=num_outputs, inputs=range(num_inputs), outputs=range(num_outputs))

    @classmethod
    def of(cls, name: str, sizes: tuple[int, int], split: Split, group: TensorParallelGroup) -> Share:
        """Of a layer with so many inputs and outputs. Raises NotSplit."""
        num_inputs, num_outputs = sizes
        inputs, outputs = range(num_inputs), range(num_outputs)
        if split.is_by_outputs:
            outputs = part_of(num_outputs, group, f"outputs of {name}")
        else:
            inputs = part_of(num_inputs, group, f"inputs of {name}")
        return cls(
            num_inputs=num_inputs, num_outputs=num_outputs, inputs=inputs, outputs=outputs, split=split, group=group
        )

    @classmethod
    def of_key_heads(cls, sizes: tuple[int, int], num_heads: int, group: TensorParallelGroup) -> Share:
        """Of a layer with the keys, or the values, of so many heads, fewer than ranks, which have copies of them."""
        num_inputs, num_outputs = sizes
        size = num_outputs // num_heads
        first = group.rank * num_heads // group.size * size
        return cls(
            num_inputs=num_inputs,
            num_outputs=num_outputs,
            inputs=range(num_inputs),
            outputs=range(first, first + size),
            split=Split.OUTPUTS,
            group=group,
        )

    @classmethod
    def of_head(cls, sizes: tuple[int, int], group: TensorParallelGroup) -> Share:
        """Of a head: see `padded_part_of`."""
        num_inputs, num_outputs = sizes
        outputs = padded_part_of(num_outputs, group)
        split, inputs = Split.GATHERED_OUTPUTS, range(num_inputs)
        return cls(
            num_inputs=num_inputs, num_outputs=num_outputs, inputs=inputs, outputs=outputs, split=split, group=group
        )

    @property
    def is_padded(self) -> bool:
        """Whether the last rank has more outputs than there are, of zeros."""
        return self.split is Split.GATHERED_OUTPUTS and self.num_outputs % self.group.size > 0

    @property
    def num_given(self) -> int:
        """Inputs that the layer is called with."""
        return self.num_inputs if self.split is Split.INPUTS_OF_ALL else len(self.inputs)

    @property
    def num_returned(self) -> int:
        """Outputs that it returns."""
        return self.num_outputs if self.split is Split.GATHERED_OUTPUTS else len(self.outputs)

    @property
    def has_bias(self) -> bool:
        """Whether this rank adds the bias: of several whose results are summed one does."""
        return self.split is None or self.split.is_by_outputs or self.group.rank == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertShare:
    """What a rank has of the experts of a module; what it gives is summed over the ranks."""

    experts: range
    """Numbers of those that it has, whole or in part."""
    inner: range
    """Of I, of each of them."""
    inner_size: int
    """I"""
    group: TensorParallelGroup

    @classmethod
    def of(
        cls, name: str, num_experts: int, inner_size: int, group: TensorParallelGroup, expert_parallel_size: int
    ) -> ExpertShare:
        """`expert_parallel_size`: sets of ranks that divide the experts, see WeightLoader. Raises NotSplit."""
        num_sets, num_parts = expert_parallel_size, group.size // expert_parallel_size
        divisor = "tensor_parallel_size" if num_sets == 1 else "tensor_parallel_size / moe_expert_parallel_size ="
        experts = _part(num_experts, group.rank % num_sets, num_sets, "moe_expert_parallel_size", f"experts of {name}")
        what = f"features between the products of {name}"
        inner = _part(inner_size, group.rank // num_sets, num_parts, divisor, what)
        return cls(experts=experts, inner=inner, inner_size=inner_size, group=group)

    @property
    def has_whole(self) -> bool:
        """Whether the rank has all of I."""
        return len(self.inner) == self.inner_size

    @property
    def part(self) -> str:
        """Which part of I this is, for names of codes; empty for all."""
        size = len(self.inner)
        return "" if self.has_whole else f".{self.inner.start // size}/{self.inner_size // size}"


def part_of(number: int, group: TensorParallelGroup, what: str) -> range:
    """This rank's part of so many equal things. Raises NotSplit."""
    return _part(number, group.rank, group.size, "tensor_parallel_size", what)


def _part(number: int, place: int, num_parts: int, key: str, what: str) -> range:
    if number % num_parts:
        raise NotSplit(f"{key} {num_parts} does not divide the {number} {what}")
    size = number // num_parts
    return range(place * size, (place + 1) * size)


def padded_part_of(vocab_size: int, group: TensorParallelGroup) -> range:
    """This rank's tokens: the last rank's end behind the vocabulary where ranks do not divide it."""
    size = -(-vocab_size // group.size)
    return range(group.rank * size, (group.rank + 1) * size)


def expert_counts(hf_config: Any) -> set[int]:
    """How many experts a layer has, under each of the names that configurations have for it."""
    return {count for key in EXPERT_COUNTS if isinstance(count := getattr(hf_config, key, None), int)}


def check_plan(architecture: str, hf_config: Any, num_ranks: int) -> None:
    """Raises NotSplit for what the configuration alone shows. Reads no weights and makes no network."""
    if architecture in NOT_SPLIT:
        raise NotSplit(NOT_SPLIT[architecture])
    text_config = hf_config.get_text_config(decoder=True)
    plan: Mapping[str, str] = getattr(text_config, "base_model_tp_plan", None) or {}
    if not plan:
        raise NotSplit(NO_PLAN)
    unknown = sorted({style for style in plan.values() if style not in KNOWN_STYLES})
    if unknown:
        raise NotSplit(f"its tp_plan has styles that this engine does not know: {', '.join(unknown)}")
    if not any(style == "colwise" and ("attn" in name or "attention" in name) for name, style in plan.items()):
        return  # every rank has all heads
    has_copies = any(style == "colwise" and name.endswith(KEY_LAYERS) for name, style in plan.items())
    for key in (*HEAD_COUNTS, *KEY_HEAD_COUNTS):
        counts = getattr(text_config, key, None)
        for count in counts if isinstance(counts, list | tuple) else [counts]:
            if not isinstance(count, int) or count % num_ranks == 0:
                continue
            if not (has_copies and key in KEY_HEAD_COUNTS and count > 0 and num_ranks % count == 0):
                raise NotSplit(f"{num_ranks} ranks do not divide its {key} ({count})")
