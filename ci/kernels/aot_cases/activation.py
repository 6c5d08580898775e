"""The gated activation."""

from __future__ import annotations

from inflight_kernels import ops

from ._meta import bf16

CASES = {"silu_and_mul i14336": lambda: ops.silu_and_mul(bf16(64, 2 * 14336))}
