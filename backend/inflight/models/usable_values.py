"""Whether what a checkpoint holds are numbers that a weight can have: neither NaN nor infinite, now or in the engine's
data type. Knows no tensor's name.
"""

from __future__ import annotations

import torch
from torch import Tensor

DAMAGE = "the file is damaged, or was saved from a training that diverged; take another one"


def why_unusable(values: Tensor, dtype: torch.dtype) -> str:
    """What is wrong with `values`, of a CPU, as weights of `dtype`; "" if nothing is. One pass over their bytes, which
    are read from the files in it: what copies them afterwards finds them in memory."""
    if not values.numel():
        return ""
    if values.dtype == torch.float8_e4m3fn:
        # Its only value that is no number, with either sign.
        has_nan = values.view(torch.int8).amax() == 0x7F or values.view(torch.uint8).amax() == 0xFF
        return _damaged("nan") if has_nan else ""
    if not values.is_floating_point():
        return ""
    # The smallest and the largest: either is NaN if any is.
    low, high = (bound.item() for bound in torch.aminmax(values))
    largest = torch.finfo(values.dtype).max
    for bound in (high, low):
        if not -largest <= bound <= largest:
            return _damaged(f"{bound:g}")
    if dtype == torch.float16:
        most = torch.finfo(dtype).max
        for bound in (high, low):
            if abs(bound) > most:
                return f"holds {bound:g}, and float16 has no numbers beyond {most:g}: set dtype to bfloat16 or float32"
    return ""


def _damaged(value: str) -> str:
    return f"holds {value}, which is no weight: {DAMAGE}"
