"""Which operations of torch itself may run while a network is recorded: those that compute nothing from its tensors,
a product with a number, and a sum or a product of two of them, which C++ has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from inflight_kernels.cpu.recorded_values import Unsupported, storage_of

FACTORIES = frozenset(
    {torch.ops.aten.empty.memory_format, torch.ops.aten.empty_like.default, torch.ops.aten.new_empty.default}
)


class TorchOperations(TorchDispatchMode):
    """Sees every operation of torch. Raises Unsupported for one that computes with a meta tensor, but for views and
    what the recorder notes."""

    def __init__(
        self,
        scale: Callable[[Tensor, float], Tensor],
        add: Callable[[Tensor, Tensor], Tensor],
        mul: Callable[[Tensor, Tensor], Tensor],
    ) -> None:
        """They note the product of a meta tensor with a number, and the sum or the product of two (T, columns), and
        give its result."""
        super().__init__()
        self._scale = scale
        self._of_two = {torch.ops.aten.add.Tensor: add, torch.ops.aten.mul.Tensor: mul}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nobody compiles this. True, the default, imports torch._dynamo: 2 s of each start."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        # What is computed from constants is a constant. An empty tensor cannot be read before an operation writes it.
        inputs = _meta_tensors((args, kwargs))
        is_harmless = not inputs or func in FACTORIES
        if is_harmless or func.is_view:
            result = func(*args, **kwargs)
            # Some, such as `contiguous`, are a view of their input or a copy of it.
            if is_harmless or set(map(storage_of, inputs)).issuperset(map(storage_of, _meta_tensors(result))):
                return result
        if func is torch.ops.aten.mul.Tensor and isinstance(args[1], float | int) and args[0].is_meta:
            return self._scale(args[0], float(args[1]))
        if func in self._of_two and not kwargs and [each.dim() for each in inputs] == [2, 2]:
            x, y = inputs
            if x.shape == y.shape:
                return self._of_two[func](x, y)
        raise Unsupported(f"C++ has no operation {func.overloadpacket}")


def _meta_tensors(values: object) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor) and leaf.is_meta]
