"""Notes rotation, writes to the KV cache, and attention; see recorder.py."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from inflight_kernels.cpu.notes import Notes
from inflight_kernels.cpu.operations import (
    BidirectionalAttention,
    DecodeAttention,
    Operation,
    PrefillAttention,
    Rope,
    RopeAndKvWrite,
    RopeAndLatentWrite,
)
from inflight_kernels.cpu.recorded_values import HEAD_DIMS, STEP, Unsupported
from inflight_kernels.cpu.recording import CacheTensors, Columns


class AttentionRecorder(Notes):
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
        k_scale: float | Tensor = 1.0,
        v_scale: float | Tensor = 1.0,
        adjacent_pairs: bool = False,
    ) -> Tensor:
        head_dim = q.shape[2]
        group = self._check_places(positions, slot_mapping)
        if (q_norm_weight is None) != (k_norm_weight is None):
            raise Unsupported("C++ normalises either both queries and keys or neither of them")
        cache = replace(self._values.cache(k_cache, v_cache, head_dim, k_scale, v_scale), group=group)
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
            adjacent_pairs=int(adjacent_pairs),
            query_norm=None if q_norm_weight is None else self._values.norm_weight(q_norm_weight, head_dim),
            key_norm=None if k_norm_weight is None else self._values.norm_weight(k_norm_weight, head_dim),
            norm_eps=norm_eps,
        )
        for tensor in (k, v):
            self._values.forget(tensor)
        return self._in_place_of(q, queries)

    def rope(
        self,
        q: Tensor,
        cos_sin: Tensor,
        positions: Tensor,
        norm_weight: Tensor | None = None,
        norm_eps: float = 1e-6,
        adjacent_pairs: bool = False,
    ) -> Tensor:
        if positions is not self._batch.positions_T:
            raise Unsupported("C++ rotates by the step's own positions only")
        queries, (_, num_heads, head_dim) = self._values.read(q, "the queries"), q.shape
        self._note(
            Rope,
            ("queries",),
            queries=queries,
            num_heads=num_heads,
            head_dim=head_dim,
            cos_sin=self._values.constant(cos_sin, "cos_sin", (*cos_sin.shape,), torch.float32),
            rotary_dim=cos_sin.shape[1],
            adjacent_pairs=int(adjacent_pairs),
            query_norm=None if norm_weight is None else self._values.norm_weight(norm_weight, head_dim),
            norm_eps=norm_eps,
        )
        return self._in_place_of(q, queries)

    def _in_place_of(self, q: Tensor, queries: Columns) -> Tensor:
        """The result that is where `q` was, which cannot be read any more."""
        self._values.forget(q)
        rotated = self._values.empty(*q.shape)
        self._values.hold(rotated, queries)
        return rotated

    def rope_and_latent_write(
        self,
        q: Tensor,
        latent: Tensor,
        norm_weight: Tensor,
        norm_eps: float,
        cos_sin: Tensor,
        positions: Tensor,
        cache: Tensor,
        slot_mapping: Tensor,
        out: Tensor | None = None,
        scale: float | Tensor = 1.0,
        adjacent_pairs: bool = False,
    ) -> Tensor:
        group = self._check_places(positions, slot_mapping)
        size, rotary_dim = norm_weight.shape[0], q.shape[2]
        if latent.shape[1:] != (size + rotary_dim,) or cos_sin.shape[1] != rotary_dim or cache.shape[2] != 1:
            raise Unsupported("a latent is not for one key head, of which what is rotated is as much as of queries")
        if out is None:
            out = self._values.empty(*q.shape)
        queries, query_stride = self._values.read_heads(q, "what is rotated of the queries")
        source = self._values.read(latent, "the latents")
        written, out_stride = self._values.write_heads(out, "the rotated queries")
        self._note(
            RopeAndLatentWrite,
            ("out",),
            queries=queries,
            latent=source,
            out=written,
            num_heads=q.shape[1],
            query_stride=query_stride,
            out_stride=out_stride,
            cache=replace(self._values.cache(cache, cache[..., :size], size + rotary_dim, scale, scale), group=group),
            cos_sin=self._values.constant(cos_sin, "cos_sin", (*cos_sin.shape,), torch.float32),
            adjacent_pairs=int(adjacent_pairs),
            norm=self._values.norm_weight(norm_weight, size),
            norm_eps=norm_eps,
        )
        # Latents change in place, and so does what else their buffer holds.
        self._values.forget(latent)
        return out

    def _check_places(self, positions: Tensor, slot_mapping: Tensor) -> int:
        """The group of layers that has these slots."""
        groups = [group for group, blocks in enumerate(self._batch.blocks) if blocks.slots_T is slot_mapping]
        if positions is not self._batch.positions_T or not groups:
            raise Unsupported("C++ rotates by the step's own positions and writes to its own cache slots only")
        return groups[0]

    def _groups(self, block_table: Tensor) -> list[int]:
        """The group of layers that has this block table; none if it is another one."""
        return [group for group, blocks in enumerate(self._batch.blocks) if blocks.block_table is block_table]

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
        k_scale: float | Tensor = 1.0,
        v_scale: float | Tensor = 1.0,
        deterministic: bool = False,
        soft_cap: float = 0.0,
        sinks: Tensor | None = None,
    ) -> Tensor:
        batch = self._batch
        groups = self._groups(block_table)
        if not groups or table_rows is not batch.decode_rows_N or seq_lens is not batch.decode_lens_N:
            raise Unsupported("C++ has decode attention to the step's own sequences only")
        cache = replace(self._values.cache(k_cache, v_cache, q.shape[2], k_scale, v_scale), group=groups[0])
        return self._attention(
            DecodeAttention, 0, self._num_decodes, q, cache, scale, sliding_window, out, soft_cap, sinks
        )

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
        k_scale: float | Tensor = 1.0,
        v_scale: float | Tensor = 1.0,
        deterministic: bool = False,
        soft_cap: float = 0.0,
        sinks: Tensor | None = None,
    ) -> Tensor:
        batch = self._batch
        groups, own = self._groups(block_table), table_rows is batch.prefill_rows_P
        if not groups or not (own and query_start_loc is batch.prefill_starts and seq_lens is batch.prefill_lens_P):
            raise Unsupported("C++ has prefill attention to the step's own sequences only")
        cache = replace(self._values.cache(k_cache, v_cache, q.shape[2], k_scale, v_scale), group=groups[0])
        return self._attention(
            PrefillAttention, self._num_decodes, self._num_tokens, q, cache, scale, sliding_window, out, soft_cap, sinks
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
        soft_cap: float,
        sinks: Tensor | None,
    ) -> Tensor:
        if out is None or out.shape != (*q.shape[:2], cache.value_dim):
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
            soft_cap=soft_cap,
            sinks=self._values.optional(sinks, "the sinks of attention", (num_heads,), torch.float32),
        )
        return out

    def bidirectional_attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        starts: Tensor,
        max_len: int,
        scale: float,
        window: int = 0,
        bias: Tensor | None = None,
    ) -> Tensor:
        sequences = self._batch.sequences
        if sequences is None or starts is not sequences.starts:
            raise Unsupported("C++ has attention in both directions to the step's own sequences only")
        _, num_heads, head_dim = q.shape
        if head_dim not in HEAD_DIMS or num_heads % k.shape[1] or k.shape != v.shape:
            most = HEAD_DIMS[-1]
            raise Unsupported(f"a head has {head_dim} elements, which is not a multiple of {STEP} up to {most}")
        out = self._values.empty(*q.shape)
        sources = {
            "queries": self._values.read(q, "the queries"),
            "keys": self._values.read(k, "the keys"),
            "values": self._values.read(v, "the values"),
        }
        shape = () if bias is None else (num_heads, bias.shape[1])
        self._note(
            BidirectionalAttention,
            ("out",),
            **sources,
            out=self._values.write(out),
            num_heads=num_heads,
            num_kv_heads=k.shape[1],
            head_dim=head_dim,
            window=window,
            scale=scale,
            bias=self._values.optional(bias, "a bias of scores", shape, torch.float32),
            bias_size=0 if bias is None else bias.shape[1],
        )
        return out
