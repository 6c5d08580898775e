"""All layers of a decoder in one call, from embedded tokens to what the head takes. Knows no checkpoint, no request.

The structures below are those of native/network.h, field by field.
Legend: T tokens, D hidden size, N decoding rows, P prefilling rows, H query heads, K key/value heads, E head size.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_float, c_int64, c_void_p
from dataclasses import dataclass

import torch
from torch import Tensor

from inflight_kernels.cpu.instructions import NativeInstructions
from inflight_kernels.cpu.library import NativeLibrary
from inflight_kernels.cpu.packed_weight import STEP, PackedWeight

MAX_HEAD_DIM = 256
PACKED_AT_ONCE = 32 * 2**20
"""Elements, 64 MiB: enough to keep threads busy. Without a limit, chunks behind one long prefix that they share would
each have a copy of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StackShape:
    """What all layers share."""

    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate: int
    """A multiple of 32: features beyond the checkpoint's are 0."""
    scale: float
    norm_eps: float
    head_norm_eps: float

    def unsupported_reason(self) -> str:
        """Why layers of this shape cannot be run, as half a sentence; empty if they can."""
        if self.hidden % STEP or self.head_dim % STEP:
            return f"hidden and head size are not both multiples of {STEP}"
        return f"a head is larger than {MAX_HEAD_DIM}" if self.head_dim > MAX_HEAD_DIM else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTensors:
    """One layer's weights and cache, all bfloat16; None for what it does not have."""

    input_norm_D: Tensor
    qkv: PackedWeight
    qkv_bias: Tensor | None
    q_norm_E: Tensor | None
    k_norm_E: Tensor | None
    output: PackedWeight
    output_bias: Tensor | None
    post_norm_D: Tensor
    gate_up: PackedWeight
    """Packed as gated."""
    gate_up_bias: Tensor | None
    down: PackedWeight
    down_bias: Tensor | None
    keys: Tensor
    """(blocks, block_size, K, E)"""
    values: Tensor
    sliding_window: int
    """Last keys that a token sees, itself included; 0 = all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """A step's tokens: one of each decoding row, then the chunks of prefilling rows."""

    positions_T: Tensor
    """int64, place of each token in its sequence."""
    slots_T: Tensor
    """int64, block_id * block_size + offset of its key and value; negative = nowhere."""
    decode_table: Tensor
    """int32 (N, blocks of the longest)."""
    decode_lens_N: Tensor
    """int32, tokens in the cache after this step; at least 1."""
    prefill_table: Tensor
    """int32 (P, blocks of the longest)."""
    prefill_lens_P: Tensor
    """int32"""
    prefill_starts: Tensor
    """int32 (P + 1), where each prefill's tokens start, counted from the first prefill token."""


class _Network(ctypes.Structure):
    _fields_ = (
        *((name, c_int64) for name in ("num_layers", "hidden", "num_heads", "num_kv_heads", "head_dim")),
        *((name, c_int64) for name in ("intermediate", "rotary_dim", "block_size")),
        ("instructions", NativeInstructions),
        ("packed_at_once", c_int64),
        *((name, c_float) for name in ("scale", "norm_eps", "head_norm_eps")),
        *((name, c_void_p) for name in ("norm", "cos_sin")),
    )


_WEIGHTS = ("input_norm_D", "qkv", "qkv_bias", "q_norm_E", "k_norm_E", "output", "output_bias", "post_norm_D",
            "gate_up", "gate_up_bias", "down", "down_bias", "keys", "values")  # fmt: skip


class _Layer(ctypes.Structure):
    _fields_ = (*((name, c_void_p) for name in _WEIGHTS), ("sliding_window", c_int64))


class _Batch(ctypes.Structure):
    _fields_ = (
        *((name, c_int64) for name in ("num_tokens", "num_decodes", "num_prefills")),
        *((name, c_void_p) for name in ("positions", "slots", "decode_table", "decode_lens")),
        ("decode_width", c_int64),
        *((name, c_void_p) for name in ("prefill_table", "prefill_lens", "prefill_starts")),
        ("prefill_width", c_int64),
    )


class DecoderStack:
    """Called by one thread at a time."""

    def __init__(
        self,
        library: NativeLibrary,
        shape: StackShape,
        layers: Sequence[LayerTensors],
        *,
        norm_D: Tensor,
        cos_sin: Tensor,
    ) -> None:
        """`norm_D`: bfloat16 weight of the last norm; `cos_sin`: float32 (positions, rotated elements of a head).

        Raises ValueError for a shape that `unsupported_reason` speaks against.
        """
        reason = shape.unsupported_reason()
        if reason:
            raise ValueError(reason)
        self._functions = library.functions
        self._held = (tuple(layers), norm_D, cos_sin)  # the structures only point at them
        self._network = _Network(
            num_layers=len(layers),
            hidden=shape.hidden,
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            intermediate=shape.intermediate,
            rotary_dim=cos_sin.shape[1],
            block_size=layers[0].keys.shape[1],
            instructions=library.instructions.to_native(),
            packed_at_once=PACKED_AT_ONCE,
            scale=shape.scale,
            norm_eps=shape.norm_eps,
            head_norm_eps=shape.head_norm_eps,
            norm=_address(norm_D),
            cos_sin=_address(cos_sin),
        )
        self._layers = (_Layer * len(layers))(*map(_layer, layers))
        self._workspace = torch.empty(0, dtype=torch.uint8)

    def __call__(self, hidden_TD: Tensor, batch: Batch) -> Tensor:
        """Hidden states (T, D) after the last norm; writes this batch's keys and values to the caches.

        Written over `hidden_TD`, bfloat16, the embedded tokens.
        """
        threads = torch.get_num_threads()
        native = _Batch(
            num_tokens=hidden_TD.shape[0],
            num_decodes=batch.decode_table.shape[0],
            num_prefills=batch.prefill_table.shape[0],
            positions=_address(batch.positions_T),
            slots=_address(batch.slots_T),
            decode_table=_address(batch.decode_table),
            decode_lens=_address(batch.decode_lens_N),
            decode_width=batch.decode_table.shape[1],
            prefill_table=_address(batch.prefill_table),
            prefill_lens=_address(batch.prefill_lens_P),
            prefill_starts=_address(batch.prefill_starts),
            prefill_width=batch.prefill_table.shape[1],
        )
        network, layers, step = map(ctypes.addressof, (self._network, self._layers, native))
        num_bytes = self._functions.inflight_workspace_bytes(network, step, threads)
        if num_bytes > self._workspace.numel():
            self._workspace = self._workspace.new_empty(0)  # before the next one is taken
            # Contexts grow chunk by chunk: not a new workspace for each of them.
            self._workspace = torch.empty(num_bytes + num_bytes // 2, dtype=torch.uint8)
        residual_TD = torch.zeros_like(hidden_TD)
        self._functions.inflight_decode(
            network,
            layers,
            step,
            threads,
            _address(hidden_TD),
            residual_TD.data_ptr(),
            self._workspace.data_ptr(),
        )
        return hidden_TD


def _layer(layer: LayerTensors) -> _Layer:
    held = {name: getattr(layer, name) for name in _WEIGHTS}
    tensors = {name: value.packed if isinstance(value, PackedWeight) else value for name, value in held.items()}
    pointers = {name: None if tensor is None else _address(tensor) for name, tensor in tensors.items()}
    return _Layer(**pointers, sliding_window=layer.sliding_window)


def _address(tensor: Tensor) -> int:
    if not tensor.is_contiguous():
        raise ValueError(f"a tensor of shape {tuple(tensor.shape)} is not contiguous")
    return tensor.data_ptr()
