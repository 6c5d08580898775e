"""What notes the operations of a network: the functions of inflight_kernels, as methods that check their arguments and
note an operation instead of computing one (record.py calls a network with it).

Each call notes plain operations, whatever stands before it. Which of them C++ computes together is decided afterwards,
over the whole list (fusions.py). `deterministic` asks for nothing that a program does not do anyway, and is not noted.

Legend: T tokens, N decoding rows, P prefilling rows, K key/value heads, E head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from inflight_kernels.activation.kinds import Activation
from inflight_kernels.cpu.attention_recorder import AttentionRecorder
from inflight_kernels.cpu.collectives import RankPlace
from inflight_kernels.cpu.expert_recorder import ExpertRecorder
from inflight_kernels.cpu.operations import (
    MAX_SLICES,
    Activate,
    ActivateAndMul,
    Add,
    AddDelta,
    Embedding,
    Gather,
    HeadLinear,
    Ids,
    LayerNorm,
    Linear,
    Lora,
    Mul,
    Operation,
    Permute,
    RmsNorm,
    RmsNormOfPart,
    RowSquares,
    Scale,
    SigmoidMul,
    SoftCap,
    Sum,
)
from inflight_kernels.cpu.recorded_values import HALF_STEP, STEP, Unsupported
from inflight_kernels.cpu.recording import (
    NOWHERE,
    Columns,
    Field,
    Recording,
    Weight,
)
from inflight_kernels.cpu.state_recorder import StateRecorder
from inflight_kernels.matmul.coded_weight import CodedWeight, Inputs
from inflight_kernels.norm.part_squares import PartSquares

FP8_OPERATIONS = (
    "embedding_rms_norm_quantized",
    "rms_norm_quantized",
    "activate_and_mul_quantized",
    "quantize_per_token",
    "scaled_linear",
    "block_scaled_linear",
)
PURPOSES = dict.fromkeys(FP8_OPERATIONS, "for products of fp8")
"""Operation that C++ does not have -> what it is for, where its name does not say it."""


class Recorder(AttentionRecorder, ExpertRecorder, StateRecorder):
    """The functions of inflight_kernels, as methods of the same names and arguments."""

    def finish(self, result: Tensor) -> Recording:
        return Recording(
            dtype=self._dtype,
            operations=tuple(self._operations),
            widths=tuple(self._values.widths),
            input=self._input,
            output=self._values.read(result, "the result"),
            output_size=result.shape[1],
            ranks=self._ranks,
        )

    def __getattr__(self, name: str) -> Any:
        raise Unsupported(f"C++ has no operation {PURPOSES.get(name, name)}")

    def embedding(
        self,
        token_ids: Tensor,
        table: Tensor | CodedWeight,
        first: int | None = None,
        factor: float = 1.0,
        gives_way: bool = True,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        of_token = Ids.TOKEN if gives_way else Ids.TOKEN_ALONE
        known = ((self._x, of_token), (self._batch.positions_T, Ids.POSITION), (self._batch.token_types_T, Ids.TYPE))
        ids = next((kind for tensor, kind in known if tensor is token_ids), None)
        if ids is None:
            raise Unsupported("C++ embeds the step's token ids, positions and types only")
        num_rows, size = table.shape
        out, written = self._result(size)
        self._note(
            Embedding,
            ("out",),
            out=written,
            **self._table(table),
            first=first or 0,
            num_rows=num_rows,
            size=size,
            ids=ids,
            factor=factor,
        )
        return out

    def _table(self, table: Tensor | CodedWeight) -> dict[str, Field]:
        what = "the embedding"
        if isinstance(table, Tensor):
            return {"table": self._values.constant(table, what, table.shape)}
        if table.inputs is not Inputs.KEPT:
            raise Unsupported(f"{what} is laid out for products of whole numbers")
        return {"codes": self._values.weight(table, what, table.shape)}

    def embedding_rms_norm(self, token_ids: Tensor, table: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        embedded = self.embedding(token_ids, table)
        normed = self.rms_norm(embedded, weight, eps)
        assert isinstance(normed, Tensor)
        return normed, embedded

    def all_reduce(self, x: Tensor, place: RankPlace) -> Tensor:
        """In place."""
        self._join(place)
        self._note(Sum, ("x",), x=self._whole(x, "what ranks sum"), size=x.shape[1])
        return x

    def all_gather(self, x: Tensor, place: RankPlace) -> Tensor:
        self._join(place)
        source, size = self._whole(x, "what ranks gather"), x.shape[1]
        out, written = self._result(size * place.size, dtype=x.dtype)
        self._note(Gather, ("out",), x=source, out=written, size=self._values.num_columns(size, x.dtype))
        return out

    def _join(self, place: RankPlace) -> None:
        if self._ranks not in (None, place):
            raise Unsupported("the network sums over several groups of ranks")
        self._ranks = place

    def _whole(self, x: Tensor, what: str) -> Columns:
        """Where `x` lies, all columns of a buffer."""
        read = self._values.read(x, what, dtype=x.dtype if x.dtype == torch.float32 else None)
        if x.dim() != 2 or self._values.num_columns(x.shape[1], x.dtype) != self._values.widths[read.buffer]:
            raise Unsupported(f"{what} is not the whole result of an operation")
        return read

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, deterministic: bool = False) -> Tensor:
        return self._linear(x, weight.shape[0], self._values.weight(weight, "a weight", weight.shape), bias)

    def coded_linear(
        self, x: Tensor, weight: CodedWeight, bias: Tensor | None = None, deterministic: bool = False
    ) -> Tensor:
        if weight.permutation is not None:
            x, weight = self._permuted(x, weight.permutation), weight._replace(permutation=None)
        return self._linear(x, weight.shape[0], self._values.weight(weight, "a weight", weight.shape), bias)

    def _permuted(self, x: Tensor, columns: Tensor) -> Tensor:
        """Columns of x in the order of a weight's."""
        size = x.shape[1]
        source = self._values.read(x, "what has another order of columns")
        out, written = self._result(size, -(-size // STEP) * STEP)
        order = self._values.constant(columns, "an order of columns", (size,), torch.int32)
        self._note(Permute, ("out",), x=source, out=written, columns=order, size=size)
        return out

    def _linear(self, x: Tensor, num_outputs: int, weight: Weight, bias: Tensor | None) -> Tensor:
        source = self._values.read(x, "the input of a linear layer")
        out, written = self._result(num_outputs)
        self._note(
            Linear,
            ("out",),
            x=source,
            out=written,
            delta=NOWHERE,
            weight=weight,
            bias=self._bias(bias, "a bias", (num_outputs,)),
            num_outputs=num_outputs,
        )
        return out

    def head_linear(self, x: Tensor, weight: Tensor, out: Tensor | None = None, deterministic: bool = False) -> Tensor:
        num_heads, num_outputs, num_inputs = weight.shape
        if num_inputs % STEP:
            raise Unsupported(f"a head has {num_inputs} inputs, which is not a multiple of {STEP}")
        if out is None:
            out = self._values.empty(self._num_tokens, num_heads, num_outputs)
        source, x_stride = self._values.read_heads(x, "the input of a linear layer of heads")
        written, out_stride = self._values.write_heads(out, "the result of a linear layer of heads")
        self._note(
            HeadLinear,
            ("out",),
            x=source,
            out=written,
            weight=self._values.weight(weight, "a weight of heads", weight.shape),
            num_heads=num_heads,
            num_outputs=num_outputs,
            x_stride=x_stride,
            out_stride=out_stride,
        )
        return out

    def lora_add(
        self,
        y: Tensor,
        x: Tensor,
        a: Tensor,
        b: Tensor,
        adapters: Tensor,
        scales: Tensor,
        slices: Sequence[int] | None = None,
        deterministic: bool = False,
        ranks: Tensor | None = None,
    ) -> Tensor:
        """In place."""
        num_slots, num_inputs, max_rank = b.shape[0], x.shape[1], b.shape[2]
        widths = [b.shape[1]] if slices is None else list(slices)
        if adapters is not self._batch.adapters_T or ranks is None or len(widths) > MAX_SLICES:
            raise Unsupported("C++ adds the step's own adapters of known ranks only")
        if sum(widths) != y.shape[1]:
            raise Unsupported("adapters have other outputs than what they change has columns")
        changed, source = self._values.read(y, "what adapters change"), self._values.read(x, "the input of adapters")
        _, narrow = self._result(len(widths) * max_rank)
        _, delta = self._result(sum(widths))
        self._note(
            Lora,
            ("narrow", "delta"),
            x=source,
            narrow=narrow,
            delta=delta,
            a=self._values.constant(a, "A of adapters", (num_slots, len(widths) * max_rank, num_inputs)),
            b=self._values.constant(b.transpose(1, 2), "B of adapters", (num_slots, max_rank, sum(widths))),
            scales=self._values.constant(scales, "the scales of adapters", (num_slots,), torch.float32),
            ranks=self._values.constant(ranks, "the ranks of adapters", (num_slots,), torch.int32),
            num_inputs=num_inputs,
            max_rank=max_rank,
            num_slices=len(widths),
            widths=tuple(widths),
        )
        self._note(AddDelta, ("x",), x=changed, delta=delta, size=sum(widths))
        return y

    def gated_linear(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        deterministic: bool = False,
        activation: Activation = Activation.SILU,
    ) -> Tensor:
        return self.activate_and_mul(self.linear(x, weight, bias, deterministic), activation)

    def scale(self, x: Tensor, factor: float) -> Tensor:
        """x * factor, which the networks' parts ask torch for."""
        size = x.shape[1]
        source = self._values.read(x, "what is scaled")
        out, written = self._result(size)
        self._note(Scale, ("out",), x=source, out=written, size=size, factor=factor)
        return out

    def soft_cap(self, x: Tensor, cap: float) -> Tensor:
        source = self._values.read(x, "what has a cap")
        out, written = self._result(x.shape[1])
        self._note(SoftCap, ("out",), x=source, out=written, size=x.shape[1], cap=cap)
        return out

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        """x + y, likewise; both (T, columns)."""
        return self._combine(Add, x, y, "what is added")

    def mul(self, x: Tensor, y: Tensor) -> Tensor:
        """x * y, likewise."""
        return self._combine(Mul, x, y, "what is multiplied")

    def _combine(self, kind: type[Operation], x: Tensor, y: Tensor, what: str) -> Tensor:
        sources = [self._values.read(each, what) for each in (x, y)]
        out, written = self._result(x.shape[1])
        self._note(kind, ("out",), x=sources[0], y=sources[1], out=written, size=x.shape[1])
        return out

    def sigmoid_mul(self, x: Tensor, gate: Tensor) -> Tensor:
        size, gate_size = x.shape[1], gate.shape[1]
        if gate_size not in (1, size):
            raise Unsupported(f"a gate has {gate_size} columns, and what it multiplies {size}")
        sources = [self._values.read(each, what) for each, what in ((x, "what is gated"), (gate, "a gate"))]
        out, written = self._result(size)
        self._note(SigmoidMul, ("out",), x=sources[0], gate=sources[1], out=written, size=size, gate_size=gate_size)
        return out

    def activate_and_mul(self, gate_up: Tensor, activation: Activation = Activation.SILU) -> Tensor:
        return self._activate(ActivateAndMul, gate_up, gate_up.shape[1] // 2, activation)

    def activate(self, x: Tensor, activation: Activation) -> Tensor:
        return self._activate(Activate, x, x.shape[1], activation)

    def _activate(self, kind: type[Operation], x: Tensor, size: int, activation: Activation) -> Tensor:
        source = self._values.read(x, "the input of an activation")
        out, written = self._result(size, -(-size // STEP) * STEP)
        self._note(kind, ("out",), x=source, out=written, size=size, activation=activation)
        return out

    def rms_norm(
        self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        fields: dict[str, Field] = {"weight": self._values.norm_weight(weight, weight.shape[0]), "eps": eps}
        return self._norm(RmsNorm, x, weight.shape[0], residual, fields)

    def row_squares(self, sections: Sequence[Tensor], gate: Tensor | None = None) -> Tensor:
        out, written = self._result(len(sections), dtype=torch.float32)
        for number, x in enumerate(sections):
            column = written.start + self._values.num_columns(number, torch.float32)
            self._note(
                RowSquares,
                ("out",),
                x=self._part(x, x.shape[1]),
                gate=NOWHERE if gate is None else self._part(gate, x.shape[1]),
                out=Columns(written.buffer, column),
                size=x.shape[1],
            )
        return out

    def rms_norm_of_part(
        self,
        x: Tensor,
        weight: Tensor,
        eps: float,
        squares: PartSquares,
        gate: Tensor | None = None,
        gate_first: bool = False,
    ) -> Tensor:
        size = weight.shape[0]
        sources = {
            "x": self._part(x, size),
            "gate": NOWHERE if gate is None else self._part(gate, size),
            "squares": self._values.read(squares.sums_TP, "the squares of a norm", dtype=torch.float32),
        }
        out, written = self._result(size)
        self._note(
            RmsNormOfPart,
            ("out",),
            **sources,
            out=written,
            weight=self._values.norm_weight(weight, size),
            size=size,
            first_part=squares.parts.start,
            part_step=squares.parts.step,
            num_parts=len(squares.parts),
            num_columns=squares.num_columns,
            gate_first=int(gate_first),
            eps=eps,
        )
        return out

    def _part(self, x: Tensor, size: int) -> Columns:
        """Where the columns of a norm, or its gate, lie."""
        if size % HALF_STEP or x.shape[1:] != (size,):
            raise Unsupported(f"a rank has {size} columns of a norm, which is not a multiple of {HALF_STEP}")
        return self._values.read(x, "the input of a norm")

    def layer_norm(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, residual: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        size = weight.shape[0]
        fields: dict[str, Field] = {
            "weight": self._values.constant(weight, "a norm's weight", (size,)),
            "bias": self._values.optional(bias, "a norm's bias", (size,)),
            "eps": eps,
        }
        return self._norm(LayerNorm, x, size, residual, fields)

    def _norm(
        self, kind: type[Operation], x: Tensor, size: int, residual: Tensor | None, fields: dict[str, Field]
    ) -> Tensor | tuple[Tensor, Tensor]:
        if size % STEP:
            raise Unsupported(f"a norm has {size} columns, which is not a multiple of {STEP}")
        if x.shape[-1] != size or (x.dim() > 2 and (kind is not RmsNorm or residual is not None)):
            raise Unsupported("a norm is not over the last dimension of its input alone")
        source = self._values.read(x, "the input of a norm")
        other = NOWHERE if residual is None else self._values.read(residual, "the residual of a norm")
        if kind is RmsNorm:
            fields["num_groups"] = x[0].numel() // size
        out = self._values.empty(*x.shape)
        written = self._values.write(out)
        total, added = (x, NOWHERE) if residual is None else self._result(size)
        self._note(kind, ("out", "sum"), x=source, residual=other, out=written, sum=added, size=size, **fields)
        return out if residual is None else (out, total)
