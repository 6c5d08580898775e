"""The values of a recording: which column of which buffer each meta tensor stands for, and the constants among them.

A tensor is what its storage is: views of it are columns of the same buffer. What C++ cannot address is Unsupported.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from inflight_kernels.cpu.matrix import MAX_INTEGERS
from inflight_kernels.cpu.recording import CacheTensors, Columns, Constant, Grouping, NormWeight, Weight
from inflight_kernels.matmul.coded_weight import CodedWeight, Inputs

STEP = 32
"""Products read inputs in multiples of it."""
HALF_STEP = STEP // 2
"""The least inputs of a group of codes."""
HEAD_DIMS = range(STEP, 576 + 1, STEP)


class Unsupported(Exception):
    """C++ cannot compute a network; the message is the reason, as half a sentence."""


class RecordedValues:
    def __init__(self, num_tokens: int, dtype: torch.dtype) -> None:
        """`dtype`: of all of them, and of the constants that are not said to have another one."""
        self._num_tokens = num_tokens
        self._dtype = dtype
        self._held: list[Tensor] = []
        """Storages are identified by their addresses, which must not be used twice."""
        self._columns: dict[int, Columns] = {}
        """Storage of a meta tensor -> where its first column lies, once something has written it."""
        self._overwritten: dict[int, list[range]] = {}
        """Storage -> columns that hold something else by now."""
        self.widths: list[int] = []
        """Columns of each buffer."""

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """A meta tensor that stands for no value yet."""
        return torch.empty(shape, dtype=dtype or self._dtype, device="meta")

    def hold(self, tensor: Tensor, columns: Columns) -> None:
        """From now on the storage of `tensor` begins at `columns`."""
        self._held.append(tensor)
        self._columns[storage_of(tensor)] = columns

    def forget(self, tensor: Tensor) -> None:
        """It must not be read any more: its columns hold something else."""
        self._overwritten.setdefault(storage_of(tensor), []).append(self._columns_in_storage(tensor))

    def write(self, tensor: Tensor, width: int = 0) -> Columns:
        """A new buffer for `tensor`, which an operation writes."""
        self.widths.append(width or tensor.untyped_storage().nbytes() // self._dtype.itemsize // self._num_tokens)
        columns = Columns(len(self.widths) - 1, 0)
        self.hold(tensor, columns)
        return columns

    def find(self, tensor: Tensor) -> Columns | None:
        """Where the storage of `tensor` begins; None if nothing has written it."""
        return self._columns.get(storage_of(tensor))

    def read(
        self, tensor: Tensor, what: str, rows: tuple[int, int] | None = None, dtype: torch.dtype | None = None
    ) -> Columns:
        """Where `tensor` lies, all tokens of it or the given rows: (tokens, …), its other dimensions contiguous.
        `dtype`: its own, if that is not the one of all others; a column of it lies in the place of several then."""
        if tensor.dtype != (expected := dtype or self._dtype):
            raise Unsupported(f"{what} is {tensor.dtype} and not {expected}")
        whole = self.find(tensor) if tensor.is_meta else None
        if whole is None:
            raise Unsupported(f"{what} is not the result of an operation of the step")
        column = self.check_rows(tensor, what, rows or (0, self._num_tokens))
        own = self._columns_in_storage(tensor)
        if any(max(own.start, gone.start) < min(own.stop, gone.stop) for gone in self._overwritten_of(tensor)):
            raise Unsupported(f"{what} was overwritten")
        return Columns(whole.buffer, whole.start + self.num_columns(column, tensor.dtype))

    def num_columns(self, count: int, dtype: torch.dtype) -> int:
        """Of a buffer, in the place of `count` elements of `dtype`."""
        return count * dtype.itemsize // self._dtype.itemsize

    def _overwritten_of(self, tensor: Tensor) -> list[range]:
        return self._overwritten.get(storage_of(tensor), [])

    def _columns_in_storage(self, tensor: Tensor) -> range:
        """Which columns of its storage a tensor of tokens is."""
        width = tensor.untyped_storage().nbytes() // tensor.element_size() // self._num_tokens
        first = tensor.storage_offset() % width
        return range(first, first + tensor.select(0, 0).numel())

    def read_heads(self, tensor: Tensor, what: str) -> tuple[Columns, int]:
        """Where the first head of `tensor` (T, heads, size) lies, and columns from one head to the next one, of which
        it may be parts."""
        self._check_heads(tensor, what)
        return self.read(tensor[:, 0], what), tensor.stride(1)

    def write_heads(self, tensor: Tensor, what: str) -> tuple[Columns, int]:
        """The same of a tensor that an operation writes, maybe beside what others have written of its storage."""
        self._check_heads(tensor, what)
        whole = self.find(tensor) or self.write(tensor)
        column = self.check_rows(tensor[:, 0], what, (0, self._num_tokens))
        return Columns(whole.buffer, whole.start + column), tensor.stride(1)

    @staticmethod
    def _check_heads(tensor: Tensor, what: str) -> None:
        if tensor.dim() != 3 or (tensor.shape[1] > 1 and not tensor.shape[2] <= tensor.stride(1) <= tensor.stride(0)):
            raise Unsupported(f"{what} is not laid out by tokens and heads")

    def check_rows(self, tensor: Tensor, what: str, rows: tuple[int, int]) -> int:
        """The first column of `tensor` in its storage. Raises Unsupported unless it consists of whole rows."""
        width = tensor.untyped_storage().nbytes() // tensor.element_size() // self._num_tokens
        first_row, column = divmod(tensor.storage_offset(), width)
        is_by_row = tensor.stride(0) == width and tensor.select(0, 0).is_contiguous()
        if not is_by_row or (first_row, first_row + tensor.shape[0]) != rows:
            raise Unsupported(f"{what} is not laid out by tokens")
        return column

    def constant(self, tensor: Tensor, what: str, shape: Sequence[int], dtype: torch.dtype | None = None) -> Constant:
        """A tensor with memory. `what`: how an error calls it."""
        if tensor.is_meta or tensor.shape != tuple(shape):
            raise Unsupported(f"{what} is not a constant of shape {tuple(shape)}")
        if tensor.dtype != (expected := dtype or self._dtype):
            raise Unsupported(f"{what} is {tensor.dtype} and not {expected}")
        if not tensor.is_contiguous():
            raise Unsupported(f"{what} is not contiguous")
        self._held.append(tensor)
        return Constant.of(tensor)

    def weight(self, weight: Tensor | CodedWeight, what: str, shape: Sequence[int], *, gated: bool = False) -> Weight:
        """The matrix of a product, or those of experts. `shape`: (…, outputs, inputs), as it must be."""
        if isinstance(weight, Tensor):
            return Weight(self.constant(weight, what, shape), shape[-1], gated=gated)
        if weight.permutation is not None:
            raise Unsupported(f"{what} has its columns in another order than its inputs")
        is_grouped = weight.group_size % STEP == 0 or (weight.group_size == HALF_STEP and weight.code.is_whole)
        if weight.shape != tuple(shape) or not is_grouped:
            groups = f"groups of a multiple of {STEP}, or of {HALF_STEP} whole numbers"
            raise Unsupported(f"{what} has no codes of shape {tuple(shape)} in {groups}")
        if weight.inputs is Inputs.INT8 and min(weight.group_size, shape[-1]) > MAX_INTEGERS:
            raise Unsupported(f"{what} has groups of more than {MAX_INTEGERS} inputs, for sums of whole numbers")

        def constant(tensor: Tensor, of_what: str) -> Constant:
            return self.constant(tensor, f"{of_what} of {what}", tensor.shape, tensor.dtype)

        grouping = Grouping(
            code=weight.code,
            scales=constant(weight.scales, "the scales"),
            zeros=None if weight.zeros is None else constant(weight.zeros, "the zeros"),
            group_size=weight.group_size,
            inputs=weight.inputs,
        )
        return Weight(constant(weight.codes, "the codes"), shape[-1], grouping, gated)

    def optional(
        self, tensor: Tensor | None, what: str, shape: Sequence[int], dtype: torch.dtype | None = None
    ) -> Constant | None:
        return None if tensor is None else self.constant(tensor, what, shape, dtype)

    def norm_weight(self, weight: Tensor, size: int) -> NormWeight:
        is_wide = weight.dtype == torch.float32 != self._dtype
        dtype = torch.float32 if is_wide else None
        return NormWeight(self.constant(weight, "a norm's weight", (size,), dtype), is_wide)

    def cache(
        self, keys: Tensor, values: Tensor, head_dim: int, k_scale: float | Tensor, v_scale: float | Tensor
    ) -> CacheTensors:
        if head_dim not in HEAD_DIMS:
            most = HEAD_DIMS[-1]
            raise Unsupported(f"a head has {head_dim} elements, which is not a multiple of {STEP} up to {most}")
        dtype = keys.dtype if keys.dtype in (torch.float8_e4m3fn, torch.int8) else self._dtype
        shape = (*keys.shape[:3], head_dim)
        value_dim, of_keys = values.shape[3], keys[..., : values.shape[3]]
        if value_dim != head_dim and value_dim % STEP:
            raise Unsupported(f"a value has {value_dim} elements, which is not a multiple of {STEP}")
        if value_dim != head_dim and (values.data_ptr(), values.stride()) != (of_keys.data_ptr(), of_keys.stride()):
            raise Unsupported("values have fewer elements than keys, and are not the first ones of those")
        cached_keys = self.constant(keys, "the cache of keys", shape, dtype)
        cached_values = cached_keys
        if value_dim == head_dim:
            cached_values = self.constant(values, "the cache of values", shape, dtype)
        cache = CacheTensors(cached_keys, cached_values, value_dim)
        if isinstance(k_scale, Tensor) and isinstance(v_scale, Tensor) and dtype == torch.int8:
            of_keys, of_values = (
                self.constant(scales, "the scales of a cache", shape[:3], torch.float32)
                for scales in (k_scale, v_scale)
            )
            return replace(cache, slot_scales=(of_keys, of_values))
        if isinstance(k_scale, Tensor) or isinstance(v_scale, Tensor) or dtype == torch.int8:
            raise Unsupported("a KV cache of int8 has scales for keys and values of each slot, and no other has them")
        if dtype == self._dtype and (k_scale, v_scale) != (1.0, 1.0):
            raise Unsupported("a KV cache has scales, and is neither fp8 nor int8")
        return replace(cache, scales=(k_scale, v_scale))


def storage_of(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
