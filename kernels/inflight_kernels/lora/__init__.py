"""Low-rank adapters (LoRA): each row of a batch with its own adapter, or none."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from inflight_kernels.dispatch import implementation


def lora_add(
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
    """y[t] += scales[n] * b[n] (a[n] x[t]) with n = adapters[t], in place; a row with n = -1 is not changed.

    y (T, out) and x (T, in) float, `a` (N, r, in) and `b` (N, out, r) of their dtype, r at most 128 (smaller adapters
    are padded with zeros), `adapters` (T,) int32 of -1 to N - 1, `scales` (N,) float32 (usually alpha / r). `slices`
    are the widths of up to three layers that have the same input x and adjacent outputs in y, such as (q, k, v): `a` is
    then (N, len(slices) * r, in), where slice s has the rows from s * r, and `b` is stacked along out. y may be a view
    of some columns of a wider tensor. `ranks` (N,) int32: the rank of each adapter, in every slice of it; what A and B
    hold beyond may be left out, so it must be zeros. Equal inputs always give equal bits; with `deterministic` a row's
    bits are also the same in every batch. Returns y.
    """
    result: Tensor = implementation(y, __name__).lora_add(y, x, a, b, adapters, scales, slices, deterministic, ranks)
    return result
