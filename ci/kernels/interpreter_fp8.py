"""Makes triton's interpreter round to float8_e4m3fn as a GPU does.

The interpreter of triton 3.6 to 3.8 rounds ties away from zero and loses the carry out of the mantissa (127.99 becomes
64); a GPU rounds to nearest, ties to even, and saturates, as torch does to a value clamped before. Reading float8 is
right as it is.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

_convert = interpreter._convert_float


def _convert_float(values: Any, source: Any, target: Any, rounding_mode: Any) -> Any:
    if source != tl.float32 or target != tl.float8e4nv:
        return _convert(values, source, target, rounding_mode)
    # A view and not a copy of bits that the handle may give as an integer.
    wide = torch.from_numpy(np.ascontiguousarray(values).view(np.float32)).clamp(-448.0, 448.0)
    return wide.to(torch.float8_e4m3fn).view(torch.uint8).numpy().reshape(values.shape)


def repair() -> None:
    """Put it in place of the interpreter's own conversion, for this process."""
    interpreter._convert_float = _convert_float
