"""RMSNorm, alone and with the residual."""

from __future__ import annotations

from inflight_kernels import ops

from ._meta import bf16


def _norm(hidden_size: int, with_residual: bool) -> None:
    x = bf16(64, hidden_size)
    ops.rms_norm(x, bf16(hidden_size), 1e-5, x if with_residual else None)


CASES = {
    "norm h4096": lambda: _norm(4096, False),
    "add+norm h4096": lambda: _norm(4096, True),
    "add+norm h576": lambda: _norm(576, True),
}
