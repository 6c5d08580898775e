"""Joins torch.distributed's default group, of all ranks: NCCL between GPUs, gloo between CPUs."""

from __future__ import annotations

import os
import shutil

import torch
import torch.distributed as dist

from inflight.distributed.rank_group import RankGroup
from inflight.distributed.rendezvous import RENDEZVOUS_TIMEOUT, file_store, tcp_store


def join_torch(rank_group: RankGroup, device: torch.device) -> None:
    """Join it with all ranks, unless this was done before; `device` is this rank's own. Collective.

    Ranks of one host find each other by a file in a private folder and communicate over loopback.
    """
    if dist.is_initialized():
        return
    folder = ""
    if rank_group.several_hosts:
        store = tcp_store(rank_group)
    else:
        # gloo would listen on the address of the host's name, which may be a public one.
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        folder, store = file_store(rank_group)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=store,
        rank=rank_group.rank,
        world_size=rank_group.size,
        timeout=RENDEZVOUS_TIMEOUT,
        device_id=device if device.type == "cuda" else None,
    )
    # After this, all connections are established and the folder is no longer needed.
    dist.all_reduce(torch.zeros(1, device=device))
    if rank_group.rank == 0 and folder:
        shutil.rmtree(folder, ignore_errors=True)
