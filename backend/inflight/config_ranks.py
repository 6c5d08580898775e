"""Which keys about ranks fit together: how they are started, how many there are, and where."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from inflight.config_keys import one_of
from inflight.errors import ConfigurationError

if TYPE_CHECKING:
    from inflight.config import EngineConfig

LAUNCHERS = ("auto", "uniproc", "mpi", "mpi_leader", "multiproc", "ray", "external")
STARTED_OUTSIDE = frozenset({"external", "mpi_leader"})
"""Values of `executor` that start no ranks, or the first one of an MPI job alone."""
PLACEMENTS = ("pack", "spread")
RAY_DEFAULTS = {"ray_address": "auto", "ray_placement": "pack", "ray_runtime_env": ""}


def check_ranks(config: EngineConfig) -> None:
    """Raises ConfigurationError."""
    one_of("executor", config.executor, LAUNCHERS)
    if config.tensor_parallel_size % config.moe_expert_parallel_size:
        raise ConfigurationError(
            f"moe_expert_parallel_size ({config.moe_expert_parallel_size}) must divide tensor_parallel_size "
            f"({config.tensor_parallel_size}), whose ranks share the experts"
        )
    _check_gpus_of_replicas(config)
    _check_spares(config)
    _check_ray(config)
    _check_contexts(config)
    if config.executor == "uniproc" and config.num_replica_ranks > 1:
        raise ConfigurationError("executor uniproc runs one rank; set executor to mpi or multiproc for more")
    if config.mpi_hostfile and config.data_parallel_size > 1:
        raise ConfigurationError(
            "data_parallel_size above 1 is for one machine, because each replica would begin at the first host of "
            "the file: unset mpi_hostfile, or start a server on each machine"
        )
    for key in ("mpi_hostfile", "mpi_interface"):
        if getattr(config, key) and config.launcher != "mpi":
            raise ConfigurationError(
                f"{key} is for ranks that mpiexec starts, and executor {config.launcher} does without it: unset {key}, "
                "or set executor to mpi"
            )
    if config.mpi_interface and not config.mpi_hostfile:
        raise ConfigurationError(
            "mpi_interface is for ranks on several machines: set mpi_hostfile, or unset mpi_interface"
        )
    if config.pipeline_parallel_size > 1 and config.speculative_model_dir:
        raise ConfigurationError(
            "speculative_model_dir: a draft model does not run on several pipeline stages; set "
            "pipeline_parallel_size to 1, or leave speculative_model_dir unset"
        )
    if config.executor in STARTED_OUTSIDE and (config.spare_ranks or config.data_parallel_size > 1):
        key, value = ("spare_ranks", 0) if config.spare_ranks else ("data_parallel_size", 1)
        raise ConfigurationError(
            f"executor {config.executor} takes the ranks that somebody else starts, one set of them: set {key} to "
            f"{value}, or executor to mpi or multiproc"
        )


def _check_gpus_of_replicas(config: EngineConfig) -> None:
    """Replicas are on one machine, and their ranks do not know those of the others. (The ranks of one replica see for
    themselves whether they share a GPU: they may be on several machines.)"""
    devices = [device.strip() for device in config.gpu_device_ids.split(",")]
    twice = next((device for device in devices if devices.count(device) > 1), None)
    if config.data_parallel_size > 1 and twice is not None:
        raise ConfigurationError(
            f"gpu_device_ids names GPU {twice} for two ranks, got {config.gpu_device_ids!r}: name another one for each "
            "rank, or lower data_parallel_size"
        )


def _check_spares(config: EngineConfig) -> None:
    sizes_vary = config.kv_cache_free_gpu_mem_fraction or config.lora_cache_gpu_memory_fraction
    if config.spare_ranks and (sizes_vary or not config.max_tokens_in_paged_kv_cache):
        raise ConfigurationError(
            "spare_ranks needs sizes that do not depend on the free memory: set max_tokens_in_paged_kv_cache, and "
            "leave kv_cache_free_gpu_mem_fraction and lora_cache_gpu_memory_fraction at 0"
        )


def _check_contexts(config: EngineConfig) -> None:
    """Those that are computed by some ranks and continued by others."""
    if config.context_replicas and config.context_replicas >= config.data_parallel_size:
        raise ConfigurationError(
            f"context_replicas ({config.context_replicas}) must be below data_parallel_size "
            f"({config.data_parallel_size}): other replicas go on from the prompts that they compute"
        )
    if config.context_replicas and not config.max_tokens_in_buffer:
        raise ConfigurationError(
            "context_replicas needs room for the KV blocks that they hand over: set max_tokens_in_buffer to the tokens "
            "of the prompts that wait at the same time"
        )
    if config.max_tokens_in_buffer and not config.max_context_tokens:
        raise ConfigurationError(
            f"max_tokens_in_buffer ({config.max_tokens_in_buffer}) must be at least a block of tokens_per_block, or 0"
        )
    if config.max_tokens_in_buffer and config.mpi_hostfile:
        raise ConfigurationError(
            "max_tokens_in_buffer is for ranks on one machine: unset mpi_hostfile; engines on other machines can fetch "
            "from these by kv_transfer_interface"
        )
    for key in ("kv_transfer_interface", "kv_transfer_key_file"):
        if getattr(config, key) and not config.max_tokens_in_buffer:
            raise ConfigurationError(
                f"{key} is for contexts that are handed over: set max_tokens_in_buffer, or unset it"
            )
    if config.kv_transfer_interface and not config.kv_transfer_key_file:
        raise ConfigurationError(
            "kv_transfer_interface needs a secret that the engines of both machines know: set kv_transfer_key_file"
        )


def _check_ray(config: EngineConfig) -> None:
    if config.executor != "ray":
        for key, default in RAY_DEFAULTS.items():
            if getattr(config, key) != default:
                raise ConfigurationError(f"{key} is for executor ray: set executor to ray, or leave {key} unset")
        return
    one_of("ray_placement", config.ray_placement, PLACEMENTS)
    if config.ray_address.startswith("ray://"):
        raise ConfigurationError(
            "ray_address names a cluster that this machine belongs to, as HOST:PORT, and not a Ray client's ray://: "
            "run `ray start --address=…` here"
        )
    if config.gpu_device_ids:
        raise ConfigurationError("with executor ray each rank gets its GPU from Ray: leave gpu_device_ids unset")
    if not _is_runtime_environment(config.ray_runtime_env):
        raise ConfigurationError(
            'ray_runtime_env must be a JSON object, with "env_vars" of strings if it has any, '
            f"got {config.ray_runtime_env!r}"
        )


def _is_runtime_environment(text: str) -> bool:
    try:
        value = json.loads(text or "{}")
    except ValueError:
        return False
    if not isinstance(value, dict):
        return False
    variables = value.get("env_vars", {})
    return isinstance(variables, dict) and all(isinstance(each, str) for each in variables.values())
