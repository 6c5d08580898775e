"""Matrix products with weights laid out once for oneDNN, so that a product does not lay them out again each time.

Seen at (3072, 576) bf16, 2 cores with AMX: 1.6 times F.linear at 1 to 16 tokens, 1.4 times at 32 to 64, equal at 1,024.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

_LAYOUT_TOKENS = 16
"""Tokens that the layout is chosen for: a decode batch. Other counts work and stay near their best."""


def can_pack(weight_OI: Tensor) -> bool:
    """True for bfloat16 weights where oneDNN has fast bf16 products."""
    return weight_OI.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def pack_weight(weight_OI: Tensor) -> Tensor:
    """An opaque tensor for `packed_linear`; the plain weight itself where packing does not help."""
    if not can_pack(weight_OI):
        return weight_OI
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight_OI.contiguous(), _LAYOUT_TOKENS)
    return packed


def packed_linear(x_TI: Tensor, packed: Tensor, bias_O: Tensor | None) -> Tensor:
    """x @ weight.T + bias of a weight from `pack_weight`."""
    if packed.layout == torch.strided:
        return F.linear(x_TI, packed, bias_O)
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x_TI, packed, bias_O, "none", [], "")
    return product
