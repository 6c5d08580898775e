"""Marlin, vLLM's 4-bit product for Ampere and newer, on the words of one of our own weights.

Takes vLLM with its compiled extension. Knows no case.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from ci.bench.kernels.case import Inputs


def marlin(inputs: Inputs) -> partial[Tensor]:
    """The call, with weights and scales laid out as Marlin reads them; zero points become 8, which it has built in."""
    from vllm import _custom_ops
    from vllm.model_executor.layers.quantization.utils import marlin_utils
    from vllm.scalar_type import scalar_types

    x, weight = inputs
    out_features, in_features = weight.qweight.shape[1], weight.in_features
    # A GPTQ checkpoint's words: eight neighbouring columns of a row in each, the lowest first.
    eights = weight.whole_numbers().T.reshape(in_features // 8, 8, out_features)
    words = torch.zeros_like(eights[:, 0])
    for i in range(8):
        words |= eights[:, i] << 4 * i
    nothing = marlin_utils.marlin_make_empty_g_idx(x.device)
    return partial(
        marlin_utils.apply_gptq_marlin_linear,
        input=x,
        weight=_custom_ops.gptq_marlin_repack(words.contiguous(), nothing, in_features, out_features, 4),
        weight_scale=marlin_utils.marlin_permute_scales(
            weight.scales_and_zeros()[0], in_features, out_features, weight.group_size
        ),
        weight_zp=nothing,
        g_idx=nothing,
        g_idx_sort_indices=nothing,
        workspace=marlin_utils.marlin_make_workspace_new(x.device),
        wtype=scalar_types.uint4b8,
        output_size_per_partition=out_features,
        input_size_per_partition=in_features,
        is_k_full=True,
    )
