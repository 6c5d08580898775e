"""A rank's groups of torch.distributed: NCCL between GPUs, gloo between CPUs."""

from __future__ import annotations

import os
import shutil

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from inflight.distributed.mapping import Mapping
from inflight.distributed.rank_group import RankGroup
from inflight.distributed.rendezvous import RENDEZVOUS_TIMEOUT, file_store, tcp_store
from inflight.errors import ConfigurationError


class TorchGroups:
    """torch's default group, of all ranks, and a part of it for those that split layers with this one. Joined by the
    first who asks for them, left by their owner."""

    def __init__(self, rank_group: RankGroup, mapping: Mapping, device: torch.device) -> None:
        """`device`: this rank's own."""
        self._rank_group = rank_group
        self._mapping = mapping
        self._device = device
        self._is_joined = False
        self._tensor_group: dist.ProcessGroup | None = None

    def join(self) -> dist.ProcessGroup | None:
        """The group of the ranks that split layers with this one; None if these are all ranks or this one alone. The
        first call is collective over all ranks, and raises ConfigurationError, in all of them, if two are to run on one
        GPU. Ranks of one host find each other by a file in a private folder and communicate over loopback."""
        if not self._is_joined:
            self._tensor_group = _join(self._rank_group, self._mapping, self._device)
            self._is_joined = True
        return self._tensor_group

    def close(self) -> None:
        """Leave the groups, if this rank has joined them."""
        if self._is_joined:
            dist.destroy_process_group()
            self._is_joined = False


def _join(rank_group: RankGroup, mapping: Mapping, device: torch.device) -> dist.ProcessGroup | None:
    folder = ""
    if rank_group.several_hosts:
        store = tcp_store(rank_group)
    else:
        # gloo would listen on the address of the host's name, which may be a public one.
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        folder, store = file_store(rank_group)
    if device.type == "cuda":
        # Otherwise a thread of torch asks the store every second whether to write a debug report, and logs errors when
        # the store's process has ended.
        os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "0")
        _check_own_gpus(rank_group, store, str(torch.cuda.get_device_properties(device).uuid))
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=store,
        rank=rank_group.rank,
        world_size=rank_group.size,
        timeout=RENDEZVOUS_TIMEOUT,
        device_id=device if device.type == "cuda" else None,
    )
    tensor_group: dist.ProcessGroup | None = None
    if 1 < mapping.tp < mapping.size:
        # Each group is made by all ranks, members or not.
        groups = [dist.new_group(range(first, first + mapping.tp)) for first in range(0, mapping.size, mapping.tp)]
        tensor_group = groups[rank_group.rank // mapping.tp]
        _connect(device, tensor_group)
    # After this, all connections of all ranks are established and the folder is no longer needed.
    _connect(device)
    if rank_group.rank == 0 and folder:
        shutil.rmtree(folder, ignore_errors=True)
    return tensor_group


def _connect(device: torch.device, group: dist.ProcessGroup | None = None) -> None:
    """Wait until all ranks of a group are connected."""
    zero = torch.zeros(1, device=device)
    dist.all_reduce(zero, group=group)
    zero.item()


def _check_own_gpus(rank_group: RankGroup, store: Store, gpu: str) -> None:
    """Raise ConfigurationError if the GPU of two ranks is the same. Collective. `gpu`: the UUID of this rank's, because
    each process may number the GPUs in its own way (CUDA_VISIBLE_DEVICES)."""
    store.set(f"gpu {rank_group.rank}", gpu)
    ranks_of: dict[str, list[int]] = {}
    for rank in range(rank_group.size):
        ranks_of.setdefault(store.get(f"gpu {rank}").decode(), []).append(rank)
    for gpu, ranks in ranks_of.items():
        if len(ranks) > 1:
            raise ConfigurationError(
                f"ranks {' and '.join(map(str, ranks))} are to run on one GPU ({gpu}): name another one for each rank "
                "in gpu_device_ids, or lower tensor_parallel_size or pipeline_parallel_size"
            )
