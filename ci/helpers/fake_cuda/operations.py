"""Operations of torch with tensors of a fake device, and the functions that lead to them.

A build of torch for CPUs has no guard of CUDA devices, which indexing and `copy_`, for example, ask in C++; they are
therefore done here in terms of other operations.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    in_kernel_invocation_manager,
    unset_fake_temporarily,
)
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from fake_cuda.device import CUDA, FakeDevice
from fake_cuda.trace import OPERATION, is_one_view, is_view

aten = torch.ops.aten


class Operations(TorchDispatchMode):
    """Operations on host tensors compute; those on device tensors make fake tensors and are noted."""

    def __init__(self, device: FakeDevice, fakes: FakeTensorMode) -> None:
        super().__init__()
        self._device = device
        self._fakes = fakes

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if _is_composite(func):
            with self:
                return func.decompose(*args, **kwargs)
        told = kwargs.get("device")
        is_for_device = told is not None and torch.device(told).type == "cuda"
        has_fakes = any(isinstance(each, FakeTensor) for each in _tensors((args, kwargs)))
        if not has_fakes and not is_for_device:
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        if func is aten._to_copy.default and has_fakes and told is not None and not is_for_device:
            return self._to_host(args[0], kwargs)
        if func is aten._to_copy.default and not has_fakes:
            return self._to_device(args[0], kwargs)
        if is_one_view(func):
            return self._view(func, args, kwargs)
        name = func._schema.name.removeprefix("aten::")
        try:
            with self._fakes:
                made = func(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException):
            self._device.forbid_waiting(f"{name}, whose result depends on values,")
            raise
        for each in _tensors(made):
            if isinstance(each, FakeTensor):
                self._device.storages.number(each)
        if not _launches_nothing(func, name, made):
            arguments = {str(place): each for place, each in enumerate(args)} | kwargs
            self._device.note(OPERATION, name, **arguments, made=made)
        return made

    def _view(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """Of shape and strides alone, in C++: by the mode of the fakes, in Python, warm-ups take twice as long."""
        with in_kernel_invocation_manager(self._fakes):
            made = func(*args, **kwargs)
        view = FakeTensor(self._fakes, made, args[0].device)
        self._device.storages.number(view)
        return view

    def _to_device(self, source: Tensor, kwargs: dict[str, Any]) -> Tensor:
        # Not by torch, which would follow the value of a small tensor, and compute with it on the device.
        with self._fakes:
            made = aten.empty_strided.default(source.size(), source.stride(), dtype=source.dtype, device=CUDA)
        self._device.storages.number(made)
        self._device.copy_to_device(source, made, non_blocking=bool(kwargs.get("non_blocking")))
        dtype = kwargs.get("dtype") or source.dtype
        return made if dtype == source.dtype else made.to(dtype)

    def _to_host(self, source: Tensor, kwargs: dict[str, Any]) -> Tensor:
        with unset_fake_temporarily():
            made = torch.empty(source.shape, dtype=kwargs.get("dtype") or source.dtype)
        non_blocking = bool(kwargs.get("non_blocking"))
        if non_blocking:  # torch takes pinned memory by itself
            self._device.pinned(made)
        self._device.copy_to_host(source, made, non_blocking=non_blocking)
        return made


def _launches_nothing(func: Any, name: str, made: Any) -> bool:
    if is_view(func) or name.startswith(("empty", "new_empty", "_unsafe_view")):
        return True
    return all(each.numel() == 0 for each in _tensors(made))


@cache
def _is_composite(func: Any) -> bool:
    """Whether torch has it only in terms of other operations; in inference mode it is seen whole."""
    return bool(func.namespace == "aten" and func._can_decompose())


def _tensors(value: Any) -> Iterator[Tensor]:
    """Those of an operation's arguments or results: torch's own walk over trees takes longer than the operation."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)
    elif isinstance(value, dict):
        for each in value.values():
            yield from _tensors(each)


class Functions(TorchFunctionMode):
    """Functions of torch that ask CUDA before they dispatch: pinned memory, indexing, `copy_` and a few more."""

    def __init__(self, device: FakeDevice) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.pop("pin_memory", False):
            return self._device.pinned(func(*args, **kwargs))
        if func is Tensor.pin_memory:
            return self._device.pinned(args[0].clone())
        if func is Tensor.data_ptr and isinstance(args[0], FakeTensor):
            return self._device.storages.address(args[0])
        if func is Tensor.is_pinned:
            return self._device.is_pinned(args[0])
        if func is Tensor.copy_:
            return self._copy(*args, **kwargs)
        if func in (Tensor.nonzero, torch.nonzero) and isinstance(args[0], FakeTensor):
            self._device.forbid_waiting("nonzero, whose result depends on values,")
        if func is Tensor.__invert__ and isinstance(args[0], FakeTensor):
            return aten.bitwise_not.default(*args)
        if func is Tensor.contiguous and isinstance(args[0], FakeTensor) and not kwargs:
            return args[0] if args[0].is_contiguous() else args[0].clone(memory_format=torch.contiguous_format)
        if func is Tensor.__getitem__ and isinstance(args[0], FakeTensor):
            part, indices = _select(*args)
            self._refuse_masks(indices)
            return part if indices is None else aten.index.Tensor(part, indices)
        if func is Tensor.__setitem__ and isinstance(args[0], FakeTensor):
            return self._set(*args)
        return func(*args, **kwargs)

    def _set(self, tensor: Tensor, index: Any, value: Any) -> None:
        part, indices = _select(tensor, index)
        if not isinstance(value, Tensor):
            value = torch.scalar_tensor(value, dtype=tensor.dtype)
        if indices is not None:
            self._refuse_masks(indices)
            aten.index_put_.default(part, indices, value)
        elif value.dim() == 0 and not isinstance(value, FakeTensor):
            part.fill_(value.item())  # the number is an argument of the kernel
        else:
            self._copy(part, value)

    def _refuse_masks(self, indices: list[Tensor | None] | None) -> None:
        if indices is not None and any(each is not None and each.dtype == torch.bool for each in indices):
            self._device.forbid_waiting("indexing with a mask, whose result depends on values,")

    def _copy(self, target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        is_to, is_from = isinstance(target, FakeTensor), isinstance(source, FakeTensor)
        if not is_to and not is_from:
            return aten.copy_.default(target, source, non_blocking)
        torch.broadcast_shapes(target.shape, source.shape)
        if is_to and is_from:
            self._device.note(OPERATION, "copy_", target=target, source=source)
        elif is_to:
            self._device.copy_to_device(source, target, non_blocking=non_blocking)
        else:
            self._device.copy_to_host(source, target, non_blocking=non_blocking)
        return target


def _select(tensor: Tensor, index: Any) -> tuple[Tensor, list[Tensor | None] | None]:
    """The part of `tensor` that numbers and slices of an index select, and the tensors of the index by dimension."""
    parts = list(index) if isinstance(index, tuple) else [index]
    for place, each in enumerate(parts):
        if each is Ellipsis:
            missing = tensor.dim() - sum(other is not None for other in parts) + 1
            parts[place : place + 1] = [slice(None)] * missing
            break
    indices: list[Tensor | None] = []
    for each in parts:
        dim = len(indices)
        if each is None:
            tensor = tensor.unsqueeze(dim)
            indices.append(None)
        elif isinstance(each, slice):
            if each != slice(None):
                tensor = aten.slice.Tensor(tensor, dim, each.start, each.stop, each.step or 1)
            indices.append(None)
        elif isinstance(each, Tensor):
            indices.append(each)
        else:
            tensor = tensor.select(dim, int(each))
    return tensor, indices if any(each is not None for each in indices) else None
