"""A recorded network that runs in C++: one call a step, over packed weights and buffers that operations share."""

from __future__ import annotations

import ctypes
import math
from ctypes import c_int64, c_void_p

import torch
from torch import Tensor

from inflight_kernels.activation.kinds import Activation
from inflight_kernels.cpu.batch import Batch
from inflight_kernels.cpu.buffers import share_buffers
from inflight_kernels.cpu.library import NativeLibrary
from inflight_kernels.cpu.matrix import Matrix
from inflight_kernels.cpu.operations import (
    KINDS,
    WITH_SEQUENCES,
    Cache,
    CacheFormat,
    Experts,
    NativeNormWeight,
    Operation,
    Value,
)
from inflight_kernels.cpu.recording import (
    NOWHERE,
    Bias,
    ByTap,
    CacheTensors,
    Columns,
    Constant,
    Field,
    NormWeight,
    Recorded,
    Recording,
    Weight,
)
from inflight_kernels.cpu.structures import NativeBatch, NativeBlocks, NativeProgram, NativeSequences, Place, Ranks
from inflight_kernels.cpu.weight_packer import WeightPacker
from inflight_kernels.kv_cache.step_blocks import StepBlocks
from inflight_kernels.recurrent.gate import Gate
from inflight_kernels.recurrent.step_sequences import StepSequences

PACKED_AT_ONCE = 32 * 2**20
"""Elements, 64 MiB of 16 bits: enough to keep threads busy. Without a limit, chunks behind one long prefix that they
share would each have a copy of it."""


CACHE_FORMATS = {torch.float8_e4m3fn: CacheFormat.FP8, torch.int8: CacheFormat.INT8}
PANEL_ROWS = 32
"""Rows behind a step's tokens that products may read."""


def most_tokens(library: NativeLibrary, recording: Recording) -> float:
    """Tokens of a step for which the memory that the ranks share has room; infinite without other ranks."""
    buffers = share_buffers(recording)
    width = max(map(buffers.width_at, (Place.OWN_AREA, Place.COMMON_AREA)))
    num_rows = library.functions.inflight_area_bytes() // (width * recording.dtype.itemsize) if width else math.inf
    return num_rows - PANEL_ROWS


class Workspace:
    """Memory of a step, for programs that run one after the other. It grows and is kept."""

    def __init__(self) -> None:
        self.memory = torch.empty(0, dtype=torch.uint8)

    def address(self, num_bytes: int) -> int:
        """Of so many bytes."""
        if num_bytes > self.memory.numel():
            self.memory = self.memory.new_empty(0)  # before the next one is taken
            # Contexts grow chunk by chunk: not a new one for each of them.
            self.memory = torch.empty(num_bytes + num_bytes // 2, dtype=torch.uint8)
        return self.memory.data_ptr()


class Program:
    """Called by one thread at a time, and by all ranks that it sums over, in the same order and with as many tokens."""

    def __init__(
        self,
        library: NativeLibrary,
        recording: Recording,
        packer: WeightPacker,
        workspace: Workspace | None = None,
    ) -> None:
        """`workspace`: None = its own."""
        buffers = share_buffers(recording)
        lowering = _Lowering(buffers.of, packer)
        operations = [lowering.operation(operation) for operation in recording.operations]
        addresses = (c_void_p * len(operations))(*map(ctypes.addressof, operations))
        widths = (c_int64 * len(buffers.widths))(*buffers.widths)
        places = (c_int64 * len(buffers.places))(*buffers.places)
        # The structures only point at what they need.
        self._held = (recording, packer, operations, addresses, widths, places)
        self._functions, self.dtype = library.functions, library.dtype
        self._has_sequences = any(operation.kind in WITH_SEQUENCES for operation in recording.operations)
        self._num_given = {
            operation.number("num_chosen")
            for operation in recording.operations
            if operation.kind is Experts and operation.fields["logits"] == NOWHERE
        }
        output, ranks = buffers.of[recording.output.buffer], recording.ranks
        self._native = NativeProgram(
            num_operations=len(operations),
            num_buffers=len(buffers.widths),
            operations=ctypes.addressof(addresses),
            widths=ctypes.addressof(widths),
            places=ctypes.addressof(places),
            input=-1 if recording.input is None else buffers.of[recording.input],
            output=output,
            instructions=library.instructions.to_native(),
            packed_at_once=PACKED_AT_ONCE,
            ranks=Ranks() if ranks is None else Ranks(ranks.address, ranks.rank, ranks.size),
        )
        self._program = ctypes.addressof(self._native)
        self._width = buffers.widths[output]
        self._columns = slice(recording.output.start, recording.output.start + recording.output_size)
        self._workspace = workspace or Workspace()

    def __call__(self, x: Tensor, batch: Batch | None = None) -> Tensor:
        """The result (T, columns), in the library's type, of `x`: token ids (T,), int64, or (T, columns) in that type.

        Writes the batch's keys and values to the caches. A program without attention needs no `batch`. Raises
        ValueError where layers keep a state for each sequence, and the batch does not say whose its tokens are, and
        where it does not say which experts have been chosen.
        """
        if self._has_sequences and (batch is None or batch.sequences is None):
            raise ValueError("the network must know whose its tokens are, and the batch has no sequences")
        for num_chosen in self._num_given:
            choices = None if batch is None else batch.choices
            if choices is None or not (len(x), num_chosen) == choices.experts_TK.shape == choices.weights_TK.shape:
                raise ValueError(f"the batch does not say which {num_chosen} experts compute each token")
        threads = torch.get_num_threads()
        native_blocks = _native_blocks(() if batch is None else batch.blocks)  # alive while the program runs
        native_batch = _native_batch(x, batch, ctypes.addressof(native_blocks))
        program, step = self._program, ctypes.addressof(native_batch)
        workspace = self._workspace.address(self._functions.inflight_workspace_bytes(program, step))
        out = torch.empty((x.shape[0], self._width), dtype=self.dtype)
        self._functions.inflight_run(program, step, threads, _address(x), out.data_ptr(), workspace)
        return out[:, self._columns]


class _Lowering:
    """Makes the structures of recorded operations."""

    def __init__(self, buffers: dict[int, int], packer: WeightPacker) -> None:
        self._buffers = buffers
        self._packer = packer

    def operation(self, recorded: Recorded) -> Operation:
        native = recorded.kind(kind=KINDS.index(recorded.kind))
        for name, value in recorded.fields.items():
            if value is not None:  # what is None is null already, also in structures
                setattr(native, name, self._field(value))
        return native

    def _field(self, value: Field) -> Value | Cache | Matrix | NativeNormWeight | tuple[int, ...] | float | None:
        match value:
            case Columns():
                return Value(-1 if value == NOWHERE else self._buffers[value.buffer], value.start)
            case Constant():
                return value.address
            case Weight():
                return self._packer.pack(value)
            case Bias() | ByTap():
                return self._packer.copy(value)
            case NormWeight():
                address = value.constant.address
                return NativeNormWeight(floats=address) if value.is_wide else NativeNormWeight(elements=address)
            case Activation() | Gate():
                return list(type(value)).index(value)
            case CacheTensors():
                _, block_size, num_kv_heads, head_dim = value.keys.tensor.shape
                keys, values = value.keys.address, value.values.address
                cache_format = CACHE_FORMATS.get(value.keys.tensor.dtype, CacheFormat.ELEMENT)
                addresses = (scales.address for scales in value.slot_scales or ())
                sizes = (block_size, num_kv_heads, head_dim, value.value_dim)
                cache = Cache(keys, values, cache_format, *sizes, *value.scales, *addresses)
                cache.group = value.group
                return cache
            case _:
                return value


def _native_batch(x: Tensor, batch: Batch | None, blocks: int) -> NativeBatch:
    """`blocks`: the address of those of `batch`."""
    if batch is None:
        return NativeBatch(num_tokens=x.shape[0], token_ids=_address(x))
    return NativeBatch(
        num_tokens=x.shape[0],
        num_decodes=batch.decode_rows_N.shape[0],
        num_prefills=batch.prefill_rows_P.shape[0],
        token_ids=_address(x),
        positions=_address(batch.positions_T),
        blocks=blocks,
        decode_rows=_address(batch.decode_rows_N),
        decode_lens=_address(batch.decode_lens_N),
        prefill_rows=_address(batch.prefill_rows_P),
        prefill_lens=_address(batch.prefill_lens_P),
        prefill_starts=_address(batch.prefill_starts),
        given=None if batch.given_T is None else _address(batch.given_T),
        given_rows=None if batch.given_rows is None else _address(batch.given_rows),
        adapters=None if batch.adapters_T is None else _address(batch.adapters_T),
        token_types=None if batch.token_types_T is None else _address(batch.token_types_T),
        sequences=NativeSequences() if batch.sequences is None else _native_sequences(batch.sequences),
        experts=None if batch.choices is None else _address(batch.choices.experts_TK),
        expert_weights=None if batch.choices is None else _address(batch.choices.weights_TK),
    )


def _native_blocks(blocks: tuple[StepBlocks, ...]) -> ctypes.Array[NativeBlocks]:
    native = (NativeBlocks * len(blocks))()
    for each, of_group in zip(native, blocks, strict=True):
        table = of_group.block_table
        if table.stride(1) != 1:
            raise ValueError("the ids of a row's blocks are not side by side")
        each.slots, each.table, each.width = _address(of_group.slots_T), table.data_ptr(), table.stride(0)
    return native


def _native_sequences(sequences: StepSequences) -> NativeSequences:
    return NativeSequences(
        count=sequences.slots_B.shape[0],
        slots=_address(sequences.slots_B),
        starts=_address(sequences.starts),
        positions=_address(sequences.positions_T),
        kept=None if sequences.kept_T is None else _address(sequences.kept_T),
    )


def _address(tensor: Tensor) -> int:
    if not tensor.is_contiguous():
        raise ValueError(f"a tensor of shape {tuple(tensor.shape)} is not contiguous")
    return tensor.data_ptr()
