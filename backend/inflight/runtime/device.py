"""The device of a rank, its free memory and its number of threads. Knows no network."""

from __future__ import annotations

import ctypes
import functools
import logging
import os
from dataclasses import replace
from pathlib import Path

import torch

from inflight.available_memory import available_memory
from inflight.config import EngineConfig
from inflight.distributed.rank_group import RankGroup
from inflight.errors import ConfigurationError
from inflight_kernels import cpu
from inflight_kernels.quantization import FP8_CAPABILITY

logger = logging.getLogger(__name__)

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8
"""From malloc.h. glibc accepts an M_MMAP_THRESHOLD of at most 32 MiB."""

LEAST_CAPABILITY = (8, 0)
"""Of a GPU: older ones do not multiply bfloat16, nor copy to shared memory while they compute."""


def choose_device(config: EngineConfig, rank: int) -> torch.device:
    """This rank's device. Raises ConfigurationError if the machine lacks the one that the configuration asks for."""
    available = torch.cuda.is_available()
    if config.device == "cpu" or (config.device == "auto" and not available):
        return torch.device("cpu")
    if not available:
        raise ConfigurationError("device is cuda, but torch finds no GPU; set device to cpu or auto")
    index = _gpu_index(config.gpu_device_ids, rank)
    if not 0 <= index < torch.cuda.device_count():
        raise ConfigurationError(
            f"rank {rank} is to run on GPU {index}, but this machine has {torch.cuda.device_count()}; "
            "see gpu_device_ids, tensor_parallel_size and data_parallel_size"
        )
    if torch.version.hip:
        raise ConfigurationError(
            "this torch is for AMD GPUs, which are not served: install one for CUDA, or set device to cpu"
        )
    capability = torch.cuda.get_device_capability(index)
    if capability < LEAST_CAPABILITY:
        raise ConfigurationError(
            f"GPU {index} has compute capability {capability[0]}.{capability[1]}, but the kernels need "
            f"{LEAST_CAPABILITY[0]}.{LEAST_CAPABILITY[1]} (Ampere) or more: name another GPU in gpu_device_ids, or set "
            "device to cpu"
        )
    if config.kv_cache_dtype == "fp8" and capability < FP8_CAPABILITY:
        raise ConfigurationError(
            f"kv_cache_dtype is fp8, but GPU {index} has compute capability {capability[0]}.{capability[1]}, and the "
            f"kernels convert to fp8 from {FP8_CAPABILITY[0]}.{FP8_CAPABILITY[1]} (Ada) on: set "
            "kv_cache_dtype to auto, or name another GPU in gpu_device_ids"
        )
    return torch.device("cuda", index)


def _gpu_index(gpu_device_ids: str, rank: int) -> int:
    if not gpu_device_ids:
        # Ranks are numbered across machines, while each machine numbers its own GPUs from 0.
        return rank % max(torch.cuda.device_count(), 1)
    try:
        return [int(text) for text in gpu_device_ids.split(",")][rank]
    except (ValueError, IndexError):
        raise ConfigurationError(
            f"gpu_device_ids must be one number for each rank, separated by commas; got {gpu_device_ids!r}"
        ) from None


def device_name(device: torch.device) -> str:
    """The product name of this rank's GPU, or of the machine's CPU."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "CPU")


def with_settled_dtype(
    config: EngineConfig,
    checkpoint_dtype: torch.dtype,
    device: torch.device,
    rank_group: RankGroup,
    *,
    compiles: bool = False,
) -> EngineConfig:
    """With the dtype float32 in place of auto where torch would compute in 16 bits on a processor without instructions
    for them. `compiles`: C++ can compute the network, on one machine that can compile it. Collective: the leader's
    machine decides, for ranks on other machines too, and for all replicas, whose leaders are on one machine. Relaunched
    ranks find the same.

    A thread's milliseconds for 24 products of 1024 by 2048 in float32, bfloat16 and float16 (torch 2.13 on Zen 4,
    restricted to AVX2, 2026-11-24): of 1 row 16, 9 and 5, of 16 rows 44, 93 and 90, of 256 rows 364, 1270 and 1274.
    """
    if config.dtype != "auto" or device.type != "cpu":
        return config
    in_cpp = compiles and not rank_group.several_hosts and not cpu.unsupported_reason()
    keeps = in_cpp or cpu.multiplies_bfloat16()
    answer = rank_group.broadcast(bytes([keeps]) if rank_group.rank == 0 else None)
    if any(answer):
        return config
    if checkpoint_dtype != torch.float32:
        name = str(checkpoint_dtype).removeprefix("torch.")
        logger.info(
            "the checkpoint is in %s and is computed in float32 (dtype is auto): %s, and without it prompts take "
            "several times as long in 16 bits; dtype=%s keeps that type, and halves the memory of weights and KV cache",
            name,
            cpu.NO_BFLOAT16,
            name,
        )
    return replace(config, dtype="float32")


def choose_dtype(config: EngineConfig, checkpoint_dtype: torch.dtype) -> torch.dtype:
    """Type of weights and activations, and of the KV cache if kv_cache_dtype is auto."""
    names = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    return names.get(config.dtype, checkpoint_dtype)


def count_threads(config: EngineConfig, num_ranks: int) -> int:
    """Threads of one rank on CPU: as configured, or as OMP_NUM_THREADS says, or an even share of the cores that this
    process may use."""
    told = os.environ.get("OMP_NUM_THREADS", "")
    usual = int(told) if told.isdigit() and int(told) else len(os.sched_getaffinity(0)) // num_ranks
    return config.num_threads or max(usual, 1)


def keep_freed_memory() -> None:
    """Make malloc keep the memory that a step frees for the next step, instead of returning it to the system.

    Each step allocates and frees its large tensors, and every page that comes from the system costs a page fault:
    30,000 of them, an eighth of the time, in a prefill of 1,024 tokens (135 M parameters, bfloat16). Call it before
    the thread that computes is started. Has no effect if the C library is not glibc.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for parameter, value in ((M_ARENA_MAX, 1), (M_MMAP_THRESHOLD, 32 * 2**20), (M_TRIM_THRESHOLD, 2**31 - 1)):
            mallopt(parameter, value)


def give_back_memory() -> None:
    """Return the free memory that malloc keeps to the system, once, for example after weights were repacked."""
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if malloc_trim is not None:
        malloc_trim(0)


def free_memory(device: torch.device, num_ranks: int) -> int:
    """Free bytes of the GPU, or this rank's share of the host's available memory."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return available_memory() // num_ranks


def unused_of_share(device: torch.device, share: float) -> int:
    """Bytes of this part of a GPU's memory that this process has not taken; negative if it has more."""
    total = torch.cuda.get_device_properties(device).total_memory
    return int(share * total) - torch.cuda.memory_reserved(device)


HOST_ALLOCATOR = "DefaultCPUAllocator"
"""torch's name of what allocates host memory, in the RuntimeError by which alone it says that there was none."""


def is_usable_after(error: Exception, device: torch.device) -> bool:
    """Whether a process can go on computing on its `device` after an exception of a step. Waits for the device.

    Most errors that CUDA reports (an illegal address, an assertion in a kernel, ECC) stay: each later call returns them
    again. Libraries report them as RuntimeErrors of their own, so the device itself is asked. Nor does a rank go on
    without memory: torch has given back what it kept before it raises OutOfMemoryError, and the step has changed the
    state of some of its rows already, so it cannot be repeated. A new process measures what is free.
    """
    if isinstance(error, (torch.AcceleratorError, torch.OutOfMemoryError, MemoryError)):
        return False
    if isinstance(error, RuntimeError) and HOST_ALLOCATOR in str(error):
        return False
    if device.type == "cuda":
        try:
            torch.cuda.synchronize(device)
        except RuntimeError:
            return False
    return True


def gib(num_bytes: int) -> str:
    """An amount of memory as text for messages."""
    return f"{num_bytes / 2**30:,.2f} GiB"


def resident_memory() -> int:
    """Resident set size of this process in bytes. The file stays open, because this is called in every iteration."""
    pages = int(os.pread(_open_statm(os.getpid()), 128, 0).split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@functools.cache
def _open_statm(pid: int) -> int:
    return os.open(f"/proc/{pid}/statm", os.O_RDONLY | os.O_CLOEXEC)


def pinned_memory(device: torch.device) -> int:
    """Bytes of host memory that are pinned for copies to a GPU."""
    if device.type != "cuda":
        return 0
    return int(torch.cuda.host_memory_stats().get("allocated_bytes.current", 0))
