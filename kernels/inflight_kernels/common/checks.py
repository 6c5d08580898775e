"""Argument checks of the launchers, with clear error messages.

Knows devices, dtypes and strides; knows no operation.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

FLOAT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)

# Assumed for tensors that are not on a GPU (interpreter, ahead-of-time compile): an H100 or H200.
DEFAULT_MULTIPROCESSORS = 132
DEFAULT_CAPABILITY = 90
# Shared memory of a multiprocessor in KB, by compute capability (CUDA C++ Programming Guide, technical specifications).
SHARED_KB = {80: 164, 86: 100, 87: 164, 89: 100, 90: 228, 100: 228, 103: 228, 110: 228, 120: 100, 121: 100}
LEAST_SHARED_KB = 100


def next_power_of_2(n: int) -> int:
    """Smallest power of two that is at least `n` (and at least 1)."""
    return 1 << max(n - 1, 0).bit_length()


def cdiv(a: int, b: int) -> int:
    """`a / b` rounded up, for positive `b`."""
    return -(-a // b)


def multiprocessor_count(device: torch.device) -> int:
    """Streaming multiprocessors of a CUDA device; `DEFAULT_MULTIPROCESSORS` for any other."""
    if device.type != "cuda":
        return DEFAULT_MULTIPROCESSORS
    return _cuda_multiprocessor_count(torch.cuda.current_device() if device.index is None else device.index)


@functools.cache
def _cuda_multiprocessor_count(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


def compute_capability(device: torch.device) -> int:
    """80 for sm_80 and so on; `DEFAULT_CAPABILITY` for any device but CUDA."""
    if device.type != "cuda":
        return DEFAULT_CAPABILITY
    return _cuda_compute_capability(torch.cuda.current_device() if device.index is None else device.index)


@functools.cache
def _cuda_compute_capability(index: int) -> int:
    major, minor = torch.cuda.get_device_capability(index)
    return 10 * major + minor


def shared_memory_per_sm(device: torch.device) -> int:
    """Bytes of shared memory of one multiprocessor, at least; see `compute_capability` for devices other than CUDA."""
    return 1024 * SHARED_KB.get(compute_capability(device), LEAST_SHARED_KB)


def check_float(name: str, tensor: Tensor) -> None:
    """Raise ValueError unless `tensor` is float32, float16 or bfloat16."""
    if tensor.dtype not in FLOAT_DTYPES:
        raise ValueError(f"{name} must be float32, float16 or bfloat16, got {tensor.dtype}")


def check_dtype(name: str, tensor: Tensor, dtype: torch.dtype) -> None:
    """Raise ValueError unless `tensor` has `dtype`."""
    if tensor.dtype != dtype:
        raise ValueError(f"{name} must be {dtype}, got {tensor.dtype}")


def check_shape(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    """Raise ValueError unless `tensor` has `shape`."""
    if tensor.shape != shape:
        raise ValueError(f"{name} must have shape {shape}, got {tuple(tensor.shape)}")


def check_unit_stride(name: str, tensor: Tensor) -> None:
    """Raise ValueError unless the last dimension of `tensor` is contiguous."""
    if tensor.stride(-1) != 1:
        raise ValueError(f"the last dimension of {name} must be contiguous, its stride is {tensor.stride(-1)}")


def check_vector(name: str, tensor: Tensor, length: int, dtype: torch.dtype) -> None:
    """Raise ValueError unless `tensor` is contiguous of shape (length,) and `dtype`."""
    check_dtype(name, tensor, dtype)
    check_shape(name, tensor, (length,))
    if length > 1:
        check_unit_stride(name, tensor)


def check_kv_cache(
    k_cache: Tensor, v_cache: Tensor, num_kv_heads: int | None, head_dim: int, dtype: torch.dtype
) -> None:
    """Raise ValueError unless both caches are (num_blocks, block_size, num_kv_heads, head_dim) of `dtype` with equal
    strides. With `num_kv_heads` None any number of heads is accepted."""
    if k_cache.dim() != 4 or k_cache.shape != v_cache.shape or k_cache.stride() != v_cache.stride():
        raise ValueError(
            "k_cache and v_cache must both be (num_blocks, block_size, num_kv_heads, head_dim) with equal strides, got "
            f"{tuple(k_cache.shape)} and {tuple(v_cache.shape)}"
        )
    if k_cache.shape[3] != head_dim or (num_kv_heads is not None and k_cache.shape[2] != num_kv_heads):
        raise ValueError(
            f"the KV cache holds {k_cache.shape[2]} heads of {k_cache.shape[3]}, which does not fit head_dim {head_dim}"
            + ("" if num_kv_heads is None else f" and {num_kv_heads} KV heads")
        )
    check_dtype("k_cache", k_cache, dtype)
    check_dtype("v_cache", v_cache, dtype)
    check_unit_stride("k_cache", k_cache)


def check_slot_scales(k_cache: Tensor, scales: Sequence[float | Tensor]) -> None:
    """Raise ValueError unless the scales of a cache of int8 are contiguous float32 (num_blocks, block_size,
    num_kv_heads), as the cache is, and those of others are numbers."""
    is_int8 = k_cache.dtype == torch.int8
    for name, scale in zip(("k_scale", "v_scale"), scales, strict=True):
        if isinstance(scale, Tensor) != is_int8:
            raise ValueError(f"{name} of a cache of {k_cache.dtype} must be a {'tensor' if is_int8 else 'number'}")
        if isinstance(scale, Tensor):
            check_dtype(name, scale, torch.float32)
            check_shape(name, scale, tuple(k_cache.shape[:3]))
            if not (scale.is_contiguous() and k_cache.is_contiguous()):
                raise ValueError(f"{name} and a cache of int8 must be contiguous")
