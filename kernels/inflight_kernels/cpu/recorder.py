"""What notes the operations of a network: the functions of inflight_kernels, as methods that check their arguments and
note an operation instead of computing one (record.py calls a network with it).

Each call notes plain operations, whatever stands before it. Which of them C++ computes together is decided afterwards,
over the whole list (fusions.py). `deterministic` asks for nothing that a program does not do anyway, and is not noted.

Legend: T tokens, N decoding rows, P prefilling rows, K key/value heads, E head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from inflight_kernels.cpu.batch import Batch
from inflight_kernels.cpu.collectives import RankPlace
from inflight_kernels.cpu.operations import (
    MAX_SLICES,
    AddDelta,
    DecodeAttention,
    Embedding,
    Experts,
    Gather,
    Linear,
    Lora,
    Operation,
    PrefillAttention,
    RmsNorm,
    RopeAndKvWrite,
    Scale,
    SiluAndMul,
    Sum,
)
from inflight_kernels.cpu.recorded_values import STEP, RecordedValues, Unsupported, storage_of
from inflight_kernels.cpu.recording import (
    NOWHERE,
    Bias,
    CacheTensors,
    Columns,
    Field,
    Recorded,
    Recording,
    Weight,
)
from inflight_kernels.matmul.coded_weight import CodedWeight

FP8_OPERATIONS = (
    "embedding_rms_norm_quantized",
    "rms_norm_quantized",
    "silu_and_mul_quantized",
    "quantize_per_token",
    "scaled_linear",
)
PURPOSES = dict.fromkeys(FP8_OPERATIONS, "for products of fp8")
"""Operation that C++ does not have -> what it is for, where its name does not say it."""


class Recorder:
    """The functions of inflight_kernels, as methods of the same names and arguments."""

    def __init__(self, x: Tensor, batch: Batch, dtype: torch.dtype) -> None:
        self._batch = batch
        self._dtype = dtype
        self._x = x
        self._num_tokens = batch.positions_T.shape[0]
        self._num_decodes = batch.decode_rows_N.shape[0]
        self._operations: list[Recorded] = []
        self._values = RecordedValues(self._num_tokens, dtype)
        self._ranks: RankPlace | None = None
        self._routed: dict[int, tuple[Tensor, Tensor, Columns, bool]] = {}
        """Storage of chosen experts -> their weights, they, the router's logits, whether they are renormalised."""
        self._input = self._values.write(x).buffer if x.dim() == 2 else None

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

    def embedding(self, token_ids: Tensor, table: Tensor, first: int | None = None) -> Tensor:
        if token_ids is not self._x:
            raise Unsupported("C++ embeds the step's token ids only")
        num_rows, size = table.shape
        out, written = self._result(size)
        self._note(
            Embedding,
            ("out",),
            out=written,
            table=self._values.constant(table, "the embedding", table.shape),
            first=first or 0,
            num_rows=num_rows,
            size=size,
        )
        return out

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
        out, written = self._result(size * place.size)
        self._note(Gather, ("out",), x=source, out=written, size=size)
        return out

    def _join(self, place: RankPlace) -> None:
        if self._ranks not in (None, place):
            raise Unsupported("the network sums over several groups of ranks")
        self._ranks = place

    def _whole(self, x: Tensor, what: str) -> Columns:
        """Where `x` lies, all columns of a buffer."""
        read = self._values.read(x, what)
        if x.dim() != 2 or x.shape[1] != self._values.widths[read.buffer]:
            raise Unsupported(f"{what} is not the whole result of an operation")
        return read

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, deterministic: bool = False) -> Tensor:
        return self._linear(x, weight.shape[0], self._values.weight(weight, "a weight", weight.shape), bias)

    def coded_linear(
        self, x: Tensor, weight: CodedWeight, bias: Tensor | None = None, deterministic: bool = False
    ) -> Tensor:
        return self._linear(x, weight.shape[0], self._values.weight(weight, "a weight", weight.shape), bias)

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
            bias=None if bias is None else Bias(self._values.constant(bias, "a bias", (num_outputs,))),
            num_outputs=num_outputs,
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
        self, x: Tensor, weight: Tensor, bias: Tensor | None = None, deterministic: bool = False
    ) -> Tensor:
        return self.silu_and_mul(self.linear(x, weight, bias, deterministic))

    def route_experts(self, router_logits: Tensor, top_k: int, renormalize: bool = True) -> tuple[Tensor, Tensor]:
        """Noted with the experts."""
        logits = self._values.read(router_logits, "the logits of a router")
        weights, experts = (torch.empty((self._num_tokens, top_k), device="meta") for _ in range(2))
        self._routed[storage_of(experts)] = (weights, experts, logits, renormalize)
        return weights, experts

    def fused_moe(
        self,
        x: Tensor,
        weights: Tensor,
        experts: Tensor,
        w_gate_up: Tensor | CodedWeight,
        w_down: Tensor | CodedWeight,
        out: Tensor | None = None,
        deterministic: bool = False,
    ) -> Tensor:
        routed = self._routed.get(storage_of(experts))
        if routed is None or routed[0] is not weights or out is not None:
            raise Unsupported("C++ computes experts that a router of the step has chosen only")
        (num_experts, size, inner_size), (_, _, logits, renormalizes) = w_down.shape, routed
        if size % STEP:
            raise Unsupported(f"experts have {size} features, which is not a multiple of {STEP}")
        source = self._values.read(x, "the input of experts")
        out, written = self._result(size)
        shape, inner_width = (num_experts, 2 * inner_size, size), -(-inner_size // STEP) * STEP
        self._note(
            Experts,
            ("out",),
            x=source,
            logits=logits,
            out=written,
            gate_up=self._values.weight(w_gate_up, "gate and up of experts", shape, gated=True),
            down=replace(self._values.weight(w_down, "down of experts", w_down.shape), num_inputs=inner_width),
            num_experts=num_experts,
            num_chosen=experts.shape[1],
            renormalizes=int(renormalizes),
            size=size,
            inner_size=inner_width,
        )
        return out

    def scale(self, x: Tensor, factor: float) -> Tensor:
        """x * factor, which the networks' parts ask torch for."""
        size = x.shape[1]
        source = self._values.read(x, "what is scaled")
        out, written = self._result(size)
        self._note(Scale, ("out",), x=source, out=written, size=size, factor=factor)
        return out

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        size = gate_up.shape[1] // 2
        source = self._values.read(gate_up, "the input of silu_and_mul")
        out, written = self._result(size, -(-size // STEP) * STEP)
        self._note(SiluAndMul, ("out",), x=source, out=written, size=size)
        return out

    def rms_norm(
        self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        size = weight.shape[0]
        if size % STEP:
            raise Unsupported(f"a norm has {size} columns, which is not a multiple of {STEP}")
        if x.shape[1:] != weight.shape:
            raise Unsupported("a norm is not over the last dimension of its input alone")
        source = self._values.read(x, "the input of a norm")
        other = NOWHERE if residual is None else self._values.read(residual, "the residual of a norm")
        out, written = self._result(size)
        total, added = (x, NOWHERE) if residual is None else self._result(size)
        self._note(
            RmsNorm,
            ("out", "sum"),
            x=source,
            residual=other,
            out=written,
            sum=added,
            weight=self._values.constant(weight, "a norm's weight", (size,)),
            size=size,
            eps=eps,
        )
        return out if residual is None else (out, total)

    def rope_and_kv_write(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cos_sin: Tensor,
        positions: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        slot_mapping: Tensor,
        q_norm_weight: Tensor | None = None,
        k_norm_weight: Tensor | None = None,
        norm_eps: float = 1e-6,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
    ) -> Tensor:
        head_dim = q.shape[2]
        if positions is not self._batch.positions_T or slot_mapping is not self._batch.slots_T:
            raise Unsupported("C++ rotates by the step's own positions and writes to its own cache slots only")
        if (q_norm_weight is None) != (k_norm_weight is None):
            raise Unsupported("C++ normalises either both queries and keys or neither of them")
        cache = self._values.cache(k_cache, v_cache, head_dim, (k_scale, v_scale))
        if k.shape[1:] != k_cache.shape[2:] or v.shape[1:] != v_cache.shape[2:]:
            raise Unsupported("the cache has other heads than the keys and values")
        queries = self._values.read(q, "the queries")
        self._note(
            RopeAndKvWrite,
            ("queries",),
            queries=queries,
            keys=self._values.read(k, "the keys"),
            values=self._values.read(v, "the values"),
            cache=cache,
            num_heads=q.shape[1],
            cos_sin=self._values.constant(cos_sin, "cos_sin", (*cos_sin.shape,), torch.float32),
            rotary_dim=cos_sin.shape[1],
            query_norm=self._values.optional(q_norm_weight, "a norm's weight", (head_dim,)),
            key_norm=self._values.optional(k_norm_weight, "a norm's weight", (head_dim,)),
            norm_eps=norm_eps,
        )
        # In place: the result is where the queries were, which cannot be read any more.
        for tensor in (q, k, v):
            self._values.forget(tensor)
        rotated = self._values.empty(*q.shape)
        self._values.hold(rotated, queries)
        return rotated

    def decode_attention(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        block_table: Tensor,
        seq_lens: Tensor,
        scale: float,
        sliding_window: int = 0,
        out: Tensor | None = None,
        scratch: Tensor | None = None,
        *,
        table_rows: Tensor | None = None,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
        deterministic: bool = False,
    ) -> Tensor:
        batch = self._batch
        own = (block_table is batch.block_table, table_rows is batch.decode_rows_N, seq_lens is batch.decode_lens_N)
        if not all(own):
            raise Unsupported("C++ has decode attention to the step's own sequences only")
        cache = self._values.cache(k_cache, v_cache, q.shape[2], (k_scale, v_scale))
        return self._attention(DecodeAttention, 0, self._num_decodes, q, cache, scale, sliding_window, out)

    def prefill_attention(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        block_table: Tensor,
        query_start_loc: Tensor,
        seq_lens: Tensor,
        max_query_len: int,
        scale: float,
        sliding_window: int = 0,
        out: Tensor | None = None,
        *,
        table_rows: Tensor | None = None,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
        deterministic: bool = False,
    ) -> Tensor:
        batch = self._batch
        own = (block_table is batch.block_table, table_rows is batch.prefill_rows_P)
        own += (query_start_loc is batch.prefill_starts, seq_lens is batch.prefill_lens_P)
        if not all(own):
            raise Unsupported("C++ has prefill attention to the step's own sequences only")
        cache = self._values.cache(k_cache, v_cache, q.shape[2], (k_scale, v_scale))
        return self._attention(
            PrefillAttention, self._num_decodes, self._num_tokens, q, cache, scale, sliding_window, out
        )

    def _attention(
        self,
        kind: type[Operation],
        first: int,
        end: int,
        q: Tensor,
        cache: CacheTensors,
        scale: float,
        sliding_window: int,
        out: Tensor | None,
    ) -> Tensor:
        if out is None or out.shape != q.shape:
            raise Unsupported("C++ writes the results of decode and prefill attention into one tensor")
        rows = (first, end)
        queries, num_heads = self._values.read(q, "the queries", rows), q.shape[1]
        self._values.check_rows(out, "the result of attention", rows)
        written = self._values.find(out) or self._values.write(out)
        self._note(
            kind,
            ("out",),
            queries=queries,
            out=written,
            cache=cache,
            num_heads=num_heads,
            sliding_window=sliding_window,
            scale=scale,
        )
        return out

    def _result(self, size: int, width: int = 0) -> tuple[Tensor, Columns]:
        """A new tensor that an operation writes, and where: in a buffer of its columns, or of `width`."""
        out = self._values.empty(self._num_tokens, size)
        return out, self._values.write(out, width)

    def _note(self, kind: type[Operation], writes: tuple[str, ...], **fields: Field) -> None:
        self._operations.append(Recorded(kind, fields, writes))
