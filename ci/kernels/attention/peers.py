"""Attention of other libraries on the inputs of our cases, each with its best options.

torch's own (SDPA, FlexAttention) get keys and values gathered into dense tensors beforehand, outside the measured time;
FlashInfer, FA3 and vLLM's triton kernel read the pages. FA3 and vLLM's kernel are imported from vLLM's modules, either
of the package or of single files in `build/peers/vllm`. Knows no case.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from ci.bench.kernels.case import Inputs, Peer

Call = Callable[[], Tensor]

FA3_MODULE = "vllm.vllm_flash_attn._vllm_fa3_C"
VLLM_TRITON_MODULE = "vllm.v1.attention.ops.triton_unified_attention"
# What vLLM sets for its split path: parts of the keys, and by default only batches this small.
VLLM_PARTS = 16
VLLM_SPLIT_PROGRAMS = 128


def _dense(inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """q (B, Hq, M, D), and keys and values (B, Hkv, N, D), padded to the longest with the content of block 0."""
    q, k_cache, v_cache, table, _, lengths, query_len, _, _ = inputs
    longest = int(lengths.max())
    keys, values = (
        cache[table.long()].flatten(1, 2)[:, :longest].transpose(1, 2).contiguous() for cache in (k_cache, v_cache)
    )
    return q.unflatten(0, (-1, query_len)).transpose(1, 2).contiguous(), keys, values


def _packed(out: Tensor) -> Tensor:
    """(B, Hq, M, D) as our (T, Hq, D)."""
    return out.transpose(1, 2).flatten(0, 1)


def _sdpa(inputs: Inputs) -> Call:
    lengths, query_len = inputs[5], inputs[6]
    q, keys, values = _dense(inputs)
    longest = keys.shape[2]
    mask: Any = None
    if bool((lengths != longest).any()):
        mask = (torch.arange(longest, device=q.device) < lengths[:, None])[:, None, None, :]
    elif 1 < query_len < longest:
        mask = causal_lower_right(query_len, longest)
    is_causal = 1 < query_len == longest

    def call() -> Tensor:
        return _packed(
            F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, is_causal=is_causal, enable_gqa=True)
        )

    return call


@functools.cache
def _compiled_flex_attention() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


def _flex(inputs: Inputs) -> Call:
    from torch.nn.attention.flex_attention import create_block_mask

    lengths, query_len = inputs[5], inputs[6]
    q, keys, values = _dense(inputs)
    past = lengths - query_len

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return key <= query + past[batch]

    mask = create_block_mask(visible, len(lengths), None, query_len, keys.shape[2], device=str(q.device))
    attend = _compiled_flex_attention()
    return lambda: _packed(attend(q, keys, values, block_mask=mask, enable_gqa=True))


def _flashinfer_pages(inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """FlashInfer's page table: where each sequence's pages begin, the pages, how full each last page is."""
    k_cache, table, lengths = inputs[1], inputs[3], inputs[5]
    block_size = k_cache.shape[1]
    counts = (lengths + block_size - 1) // block_size
    starts = F.pad(counts.cumsum(0), (1, 0)).int()
    pages = torch.cat([row[:count] for row, count in zip(table, counts.tolist(), strict=True)])
    return starts, pages, (lengths - (counts - 1) * block_size).int()


def _flashinfer_decode(inputs: Inputs) -> Call:
    import flashinfer

    q, k_cache, v_cache, *_, k_scale, v_scale = inputs
    workspace = torch.empty(256 << 20, dtype=torch.uint8, device=q.device)
    # Tensor cores pack the heads that share a KV head; without them FlashInfer is slower for groups of 4.
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
    wrapper.plan(
        *_flashinfer_pages(inputs),
        q.shape[1],
        k_cache.shape[2],
        q.shape[2],
        k_cache.shape[1],
        q_data_type=q.dtype,
        kv_data_type=k_cache.dtype,
    )
    scales = {"k_scale": k_scale, "v_scale": v_scale} if k_cache.dtype != q.dtype else {}
    return lambda: wrapper.run(q, (k_cache, v_cache), **scales)


def _flashinfer_prefill(inputs: Inputs) -> Call:
    import flashinfer

    q, k_cache, v_cache, _, starts, *_ = inputs
    workspace = torch.empty(256 << 20, dtype=torch.uint8, device=q.device)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
    wrapper.plan(
        starts,
        *_flashinfer_pages(inputs),
        q.shape[1],
        k_cache.shape[2],
        q.shape[2],
        k_cache.shape[1],
        causal=True,
        q_data_type=q.dtype,
        kv_data_type=k_cache.dtype,
    )
    return lambda: wrapper.run(q, (k_cache, v_cache))


def _fa3(inputs: Inputs) -> Call:
    """FA3's operator, called by the names in its schema, which has grown from version to version."""
    __import__(FA3_MODULE)
    q, k_cache, v_cache, table, starts, lengths, query_len, k_scale, v_scale = inputs
    operator = torch.ops._vllm_fa3_C.fwd.default
    known: dict[str, Any] = {
        "k": k_cache,
        "v": v_cache,
        "out": torch.empty_like(q),
        "cu_seqlens_q": starts,
        "seqused_k": lengths,
        "max_seqlen_q": query_len,
        "max_seqlen_k": int(lengths.max()),
        "page_table": table,
        "softmax_scale": q.shape[-1] ** -0.5,
        "is_causal": True,
        "window_size_left": -1,
        "window_size_right": -1,
        "softcap": 0.0,
        "is_rotary_interleaved": True,
        # 0: its own heuristic chooses.
        "num_splits": 0,
        "sm_margin": 0,
    }
    if k_cache.dtype != q.dtype:
        # FA3 multiplies fp8 by fp8 only.
        descale = (len(lengths), k_cache.shape[2])
        known["q_descale"] = torch.ones(descale, device=q.device)
        known["k_descale"] = torch.full(descale, k_scale, device=q.device)
        known["v_descale"] = torch.full(descale, v_scale, device=q.device)
        q = q.to(k_cache.dtype)
    known["q"] = q
    arguments = {
        argument.name: known.get(argument.name)
        for argument in operator._schema.arguments
        if argument.name in known or not argument.has_default_value()
    }
    return lambda: operator(**arguments)[0]


def _vllm_triton(inputs: Inputs, split: bool = False) -> Call:
    """vLLM's one kernel for both phases; `split` hands it the scratch of its split path for every decode batch."""
    from vllm.v1.attention.ops.triton_unified_attention import unified_attention

    q, k_cache, v_cache, table, starts, lengths, query_len, _, _ = inputs
    rows = len(lengths) if split else max(VLLM_SPLIT_PROGRAMS // k_cache.shape[2], 1)
    shape = (max(rows, len(lengths)), q.shape[1], VLLM_PARTS)
    out = torch.empty_like(q)
    arguments = {
        "q": q,
        "k": k_cache,
        "v": v_cache,
        "out": out,
        "cu_seqlens_q": starts,
        "max_seqlen_q": query_len,
        "seqused_k": lengths,
        "max_seqlen_k": int(lengths.max()),
        "softmax_scale": q.shape[-1] ** -0.5,
        "causal": True,
        "window_size": (-1, -1),
        "block_table": table,
        "softcap": 0.0,
        "q_descale": None,
        "k_descale": None,
        "v_descale": None,
        "seq_threshold_3D": rows,
        "num_par_softmax_segments": VLLM_PARTS,
        "softmax_segm_output": torch.empty(*shape, q.shape[2], device=q.device),
        "softmax_segm_max": torch.empty(shape, device=q.device),
        "softmax_segm_expsum": torch.empty(shape, device=q.device),
    }

    def call() -> Tensor:
        unified_attention(**arguments)
        return out

    return call


_TORCH = {"torch SDPA": Peer(_sdpa, on_cpu=True), "FlexAttention": Peer(_flex)}
DECODE = _TORCH | {
    "FlashInfer": Peer(_flashinfer_decode, needs="flashinfer"),
    "FA3": Peer(_fa3, needs=FA3_MODULE),
    "vLLM Triton": Peer(_vllm_triton, needs=VLLM_TRITON_MODULE),
    "vLLM Triton, split": Peer(functools.partial(_vllm_triton, split=True), needs=VLLM_TRITON_MODULE),
}
PREFILL = _TORCH | {
    "FlashInfer": Peer(_flashinfer_prefill, needs="flashinfer"),
    "FA3": Peer(_fa3, needs=FA3_MODULE),
    "vLLM Triton": Peer(_vllm_triton, needs=VLLM_TRITON_MODULE),
}
FP8_DECODE = {
    "FlashInfer": Peer(_flashinfer_decode, needs="flashinfer"),
    # Not compared: it rounds the queries to fp8, which ours does not.
    "FA3, fp8 queries": Peer(_fa3, needs=FA3_MODULE, comparable=False),
}
