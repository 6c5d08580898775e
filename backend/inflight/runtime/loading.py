"""From an EngineConfig to a network and its KV cache on this rank's device. Collective; done once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import msgspec
import torch

from inflight import __version__
from inflight.config import EngineConfig
from inflight.distributed.mapping import Mapping
from inflight.distributed.parallel_groups import ParallelGroups
from inflight.distributed.rank_group import RankGroup
from inflight.engine_description import EngineDescription
from inflight.errors import ConfigurationError, InsufficientMemory
from inflight.hub.model_name import shown_name
from inflight.models.adapter_places import AdapterPlaces
from inflight.models.checkpoint import Checkpoint
from inflight.models.compiled import CompiledNetwork, compile_network, may_compile
from inflight.models.config import ModelConfig
from inflight.models.implementation import load_network, read_config
from inflight.models.network import LayeredNetwork, Network
from inflight.models.pipeline_stage import PipelineStage, layers_of_stage
from inflight.models.shared_weights import SharedWeights
from inflight.models.transformers_config import TransformersConfig
from inflight.output_config import SCORES, Pooling
from inflight.request_limits import RequestLimits
from inflight.runtime.adapters.device_slots import allocate_adapters
from inflight.runtime.device import (
    choose_device,
    choose_dtype,
    count_threads,
    device_name,
    free_memory,
    gib,
    give_back_memory,
    with_settled_dtype,
)
from inflight.runtime.host_units import NOTHING_ON_HOST, HostCounts, HostUnits, count_host_units
from inflight.runtime.kernel_cache import use_kernel_cache
from inflight.runtime.prompt_blocks import PromptBlocks
from inflight.runtime.state_store import (
    BlockLayer,
    StateShape,
    StateStore,
    Units,
    count_units,
    find_windows,
    num_slots,
)
from inflight.scheduler_output import HIDDEN_STATES, layer_output
from inflight.weight_identity import weight_identity


@dataclass(frozen=True, slots=True, kw_only=True)
class RankResources:
    """What a rank has of its machine when it loads an engine. None = it finds or makes its own, as ranks that serve do;
    `ci/compile_kernels.py` gives those of a GPU that is not there."""

    device: torch.device | None = None
    thread: Executor | None = None
    """On which the runner loads networks and computes their steps on a CPU. It ends it."""
    groups: ParallelGroups | None = None
    checkpoint: Checkpoint | None = None
    """Whose tensors all networks get."""


ITS_OWN = RankResources()


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedEngine:
    """What `load_engine` returns: this rank's part of the network, its KV cache, and the limits of requests."""

    decoder: Network
    draft_network: Network | None
    """The draft model, whose states stand behind those of `decoder` in `store`; None = there is none."""
    adapters: AdapterPlaces
    """Without slots if none is served."""
    store: StateStore
    num_snapshots: int | None
    """See Units."""
    host_blocks: HostUnits
    host_states: HostUnits
    prompt_blocks: PromptBlocks | None
    """None = contexts are not handed over."""
    limits: RequestLimits
    groups: ParallelGroups
    device: torch.device
    description: EngineDescription
    scores_of: Pooling | None = None
    """Which of a prompt's hidden states the network makes scores of; None = it makes none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineParts:
    """What of a LoadedEngine does not depend on the size of the KV cache: this rank's networks on its device."""

    config: EngineConfig
    model: ModelConfig | TransformersConfig
    dtype: torch.dtype
    device: torch.device
    groups: ParallelGroups
    networks: list[Network]
    """The one that is served and, if there is one, the draft model."""
    adapters: AdapterPlaces
    weights: SharedWeights | None
    """Memory that outlives this rank, in which they are or will be; None = they are its own."""
    max_seq_len: int
    state_shape: StateShape
    """Of all networks, one behind the other."""


def load_engine(
    config: EngineConfig,
    rank_group: RankGroup,
    measure: Callable[[EngineParts], int] | None = None,
    *,
    weights_place: str | None = None,
    defers_cache: bool = False,
    resources: RankResources = ITS_OWN,
) -> LoadedEngine:
    """`measure`: bytes that steps of these networks take on a GPU; called there before the size of the KV cache is
    chosen. None = steps take nothing. `weights_place`: of memory for the weights that outlives this rank, which another
    one may have filled (see SharedWeights.open); None = of no rank. `defers_cache`: the memory of the KV cache is taken
    later. `resources`: in place of the rank's own. Raises ConfigurationError for a checkpoint or a configuration that
    does not fit.
    """
    parts = load_parts(config, rank_group, weights_place, resources)
    config, shape, groups, device = parts.config, parts.state_shape, parts.groups, parts.device
    reserved_bytes = measure(parts) if measure is not None and device.type == "cuda" else 0
    units = count_units(config, shape, groups, device, reserved_bytes, parts.max_seq_len)
    host_counts = count_host_units(config, shape, units, groups, device)
    engine = with_cache(parts, units, host_counts, defers_cache=defers_cache)
    if weights_place is not None:
        _finish_weights(parts.weights, config, rank_group)
    return engine


def load_parts(
    config: EngineConfig,
    rank_group: RankGroup,
    weights_place: str | None = None,
    resources: RankResources = ITS_OWN,
) -> EngineParts:
    """Read this rank's part of the checkpoint. Collective. Raises ConfigurationError as `load_engine` does."""
    device = resources.device or choose_device(config, rank_group.rank)
    config = config.for_device(device.type)
    if config.spare_ranks and device.type == "cuda":
        raise ConfigurationError(
            "spare_ranks is for ranks on CPUs: on a GPU a second set of weights has no room beside the KV cache of the "
            "first; set it to 0"
        )
    if config.max_tokens_in_buffer and (device.type == "cuda" or rank_group.several_hosts):
        raise ConfigurationError(
            "max_tokens_in_buffer is for ranks on the CPUs of one machine: between others contexts are not handed "
            "over; set it to 0"
        )
    torch.set_num_threads(count_threads(config, config.num_ranks))
    if device.type == "cuda":
        torch.cuda.set_device(device)
        use_kernel_cache(config.kernel_cache_dir)
    model = read_config(config)
    if isinstance(model, ModelConfig) and model.pooled:
        _check_pooling(config, model)
    compiles = isinstance(model, ModelConfig) and may_compile(config, model)
    config = with_settled_dtype(config, model.dtype, device, rank_group, compiles=compiles)
    max_seq_len = _max_seq_len(config, model)
    if isinstance(model, ModelConfig):
        _check_positions(max_seq_len, model, config.num_ranks)
    dtype = choose_dtype(config, model.dtype)
    groups = resources.groups or ParallelGroups.create(
        rank_group, Mapping.of(config), device, sums_in_order=config.deterministic
    )
    adapters = AdapterPlaces()
    wants_adapters = bool(config.max_loras or config.lora_cache_gpu_memory_fraction)
    weights = None
    if weights_place is not None and device.type == "cpu" and isinstance(model, ModelConfig):
        weights = _open_weights(weights_place, config, rank_group)
    own_adapters = adapters if wants_adapters else None
    network = load_network(
        config, model, groups, dtype, device, max_seq_len, own_adapters, weights, resources.checkpoint
    )
    if wants_adapters:
        allocate_adapters(config, adapters, groups, dtype, device)
    networks = [network]
    if config.speculative_model_dir:
        networks.append(
            _load_draft_network(config, model.vocab_size, groups, device, max_seq_len, weights, resources.checkpoint)
        )
    shape = _find_shape(config, networks, groups, max_seq_len)
    return EngineParts(
        config=config,
        model=model,
        dtype=dtype,
        device=device,
        groups=groups,
        networks=networks,
        adapters=adapters,
        weights=weights,
        max_seq_len=max_seq_len,
        state_shape=shape,
    )


def _check_pooling(config: EngineConfig, model: ModelConfig) -> None:
    """Raise ConfigurationError for what means nothing to a network that generates no tokens."""
    refused = {
        "pipeline_parallel_size": (config.pipeline_parallel_size > 1, "1"),
        "speculative_model_dir": (bool(config.speculative_model_dir), "nothing"),
        "max_loras": (bool(config.max_loras or config.lora_cache_gpu_memory_fraction), "0"),
        "max_tokens_in_buffer": (bool(config.max_tokens_in_buffer), "0"),
        "kv_cache_dtype": (config.kv_cache_dtype != "auto" and not model.is_causal, "auto"),
        "kv_cache_host_memory_bytes": (bool(config.kv_cache_host_memory_bytes) and not model.is_causal, "0"),
    }
    for key, (is_set, remedy) in refused.items():
        if is_set:
            raise ConfigurationError(
                f"{key} is set, and {model.architecture} gives {model.pooled} of texts and no tokens: it has nothing "
                f"that this concerns; set {key} to {remedy}"
            )


def _find_shape(
    config: EngineConfig, networks: Sequence[Network], groups: ParallelGroups, max_seq_len: int
) -> StateShape:
    """Collective: all stages have the same groups of layers, whichever of the layers they have. Windows longer than any
    sequence count for nothing."""
    network, *draft_networks = networks
    specs = [*network.state_specs]
    # A draft model computes the token before the last one once more, when it may have seen another one in its place.
    specs += [
        replace(spec, window=spec.window + 1) if spec.window else spec
        for each in draft_networks
        for spec in each.state_specs
    ]
    shape = StateShape(
        specs=tuple(replace(spec, window=0) if spec.window >= max_seq_len else spec for spec in specs),
        block_size=config.tokens_per_block,
    )
    if config.enable_partial_reuse:
        return shape  # parts of blocks are copied from one table
    found = groups.pipeline.all_gather(msgspec.msgpack.encode(shape.layers))
    stages = [msgspec.msgpack.decode(layers, type=list[BlockLayer]) for layers in found]
    return replace(shape, windows=find_windows(stages, shape.block_size, max_seq_len))


def with_cache(
    parts: EngineParts, units: Units, host_counts: HostCounts = NOTHING_ON_HOST, *, defers_cache: bool = False
) -> LoadedEngine:
    """The engine with a cache of so many units. Collective. On a CPU only once: layers are compiled for it."""
    config, model, dtype, device = parts.config, parts.model, parts.dtype, parts.device
    groups, networks, adapters, max_seq_len = parts.groups, parts.networks, parts.adapters, parts.max_seq_len
    network, shape = networks[0], parts.state_shape
    num_blocks = units.num_blocks
    store = StateStore(shape, num_blocks, device, num_slots(config, units.num_snapshots), is_deferred=defers_cache)
    host_blocks = HostUnits(store.block_tensors, host_counts.num_blocks, device)
    host_states = HostUnits(store.slot_tensors, host_counts.num_snapshots, device)
    prompt_blocks = None
    if config.max_tokens_in_buffer:
        prompt_blocks = PromptBlocks(store, shape, config.max_tokens_in_buffer)
    borders = accumulate((len(each.state_specs) for each in networks), initial=0)
    states = [store.states[first:end] for first, end in pairwise(borders)]
    compiled = [
        compile_network(config, *each, device, groups, parts.weights) for each in zip(networks, states, strict=True)
    ]
    if any(new is not former for new, former in zip(compiled, networks, strict=True)):
        give_back_memory()
    description = _describe(config, model, dtype, compiled[0], device)
    num_layers = compiled[0].num_layers if isinstance(compiled[0], LayeredNetwork) else 0
    if isinstance(model, ModelConfig) and groups.pipeline.size > 1:
        num_layers = model.num_layers if groups.all_reduce_min(num_layers) else 0
        compiled[0] = PipelineStage(
            network=compiled[0],
            group=groups.pipeline,
            layers=layers_of_stage(model.num_layers, groups.pipeline),
            num_layers=model.num_layers,
            hidden_size=model.hidden_size,
            dtype=dtype,
        )
    # Not every network of transformers says it, and what has no known size cannot be limited.
    hidden_size = model.hidden_size
    pooled = model.pooled if isinstance(model, ModelConfig) else ""
    scores = model.family.scores if isinstance(model, ModelConfig) else None
    is_causal = isinstance(model, ModelConfig) and model.is_causal
    kv_cache_tokens = shape.groups.most_tokens(
        num_blocks, config.max_num_tokens, max(num_blocks * config.tokens_per_block, max_seq_len)
    )
    longest = max_seq_len - 1
    if pooled:
        longest = min(longest, kv_cache_tokens) if is_causal else min(max_seq_len, config.max_num_tokens)
    limits = RequestLimits(
        pooled=pooled,
        num_labels=scores.num_labels if scores is not None else 0,
        is_causal=bool(pooled) and is_causal,
        has_token_types=isinstance(model, ModelConfig) and model.has_token_types,
        guided_decoding_backend=config.guided_decoding_backend,
        vocab_size=model.vocab_size,
        max_seq_len=max_seq_len,
        max_input_len=min(config.max_input_len or longest, longest),
        kv_cache_tokens=kv_cache_tokens,
        max_batch_size=config.max_batch_size,
        max_beam_width=config.max_beam_width,
        hidden_size=hidden_size,
        embedding_size=_embedding_size(model, network),
        max_prompt_embedding_bytes=config.max_prompt_embedding_bytes,
        model_outputs=[*([SCORES] if scores else []), *(_model_outputs(num_layers) if hidden_size else [])],
        max_tensor_bytes=config.max_tensor_bytes_per_request,
        num_adapter_slots=adapters.num_slots,
        max_context_tokens=config.max_context_tokens,
        has_draft_model=len(compiled) > 1,
    )
    return LoadedEngine(
        decoder=compiled[0],
        draft_network=compiled[1] if len(compiled) > 1 else None,
        adapters=adapters,
        store=store,
        num_snapshots=units.num_snapshots,
        host_blocks=host_blocks,
        host_states=host_states,
        prompt_blocks=prompt_blocks,
        limits=limits,
        groups=groups,
        device=device,
        description=description,
        scores_of=None if scores is None else scores.pooling,
    )


def _open_weights(place: str, config: EngineConfig, rank_group: RankGroup) -> SharedWeights | None:
    """Collective. While rank 0 fills its memory it is this replica's turn: ranks of several replicas would wait for one
    another otherwise."""
    if rank_group.rank == 0:
        weights = SharedWeights.open(place, weight_identity(config))
        rank_group.broadcast(b"shared" if weights is not None else b"")
        return weights
    return SharedWeights.open(place, weight_identity(config)) if rank_group.broadcast(None) else None


def _finish_weights(weights: SharedWeights | None, config: EngineConfig, rank_group: RankGroup) -> None:
    """Collective; rank 0 is the last."""
    if weights is not None and rank_group.rank:
        weights.finish(weight_identity(config))
    rank_group.barrier()
    if weights is not None and rank_group.rank == 0:
        weights.finish(weight_identity(config))


def _describe(
    config: EngineConfig,
    model: ModelConfig | TransformersConfig,
    dtype: torch.dtype,
    network: Network,
    device: torch.device,
) -> EngineDescription:
    native = "compiled" if isinstance(network, CompiledNetwork) else "native"
    quantized = model.weight_format.quantized
    dtype_name = str(dtype).removeprefix("torch.")
    return EngineDescription(
        device=device.type,
        device_name=device_name(device),
        checkpoint=shown_name(config.gpt_model_path),
        architecture=model.architecture,
        layers=native if isinstance(model, ModelConfig) else "transformers",
        sum_order=network.sum_order if isinstance(network, CompiledNetwork) else "",
        dtype=dtype_name,
        weight_dtype=quantized or dtype_name,
        activations=network.activations if isinstance(network, CompiledNetwork) else "",
        kv_cache_dtype=dtype_name if config.kv_cache_dtype == "auto" else config.kv_cache_dtype,
        deterministic=config.deterministic,
        num_ranks=config.num_ranks,
        tensor_parallel_size=config.tensor_parallel_size,
        moe_expert_parallel_size=config.moe_expert_parallel_size,
        pipeline_parallel_size=config.pipeline_parallel_size,
        data_parallel_size=config.data_parallel_size,
        inflight_version=__version__,
        torch_version=str(torch.__version__),
    )


def _embedding_size(model: ModelConfig | TransformersConfig, network: Network) -> int:
    """See RequestLimits."""
    if not isinstance(model, ModelConfig):
        return int(getattr(network, "embedding_size", 0))
    return 0 if model.pooled else model.hidden_size


def _model_outputs(num_layers: int) -> list[str]:
    """Names of the tensors inside the network that a request may ask for; `num_layers`: those that can tell theirs."""
    return [HIDDEN_STATES, *map(layer_output, range(num_layers))]


def _max_seq_len(config: EngineConfig, model: ModelConfig | TransformersConfig) -> int:
    max_seq_len = config.max_seq_len or model.max_position_embeddings
    if max_seq_len > model.max_positions:
        raise ConfigurationError(
            f"max_seq_len {max_seq_len} is more than the {model.max_positions} positions that the checkpoint has"
        )
    if max_seq_len < 2:
        raise ConfigurationError(f"max_seq_len must be at least 2 (one prompt token and one new), got {max_seq_len}")
    return max_seq_len


def _check_positions(max_seq_len: int, model: ModelConfig, num_ranks: int) -> None:
    """Raise InsufficientMemory if the table of cosines and sines does not fit into the host's memory. While it is made,
    two more tables of its size exist."""
    head_dim = max(heads.head_dim for heads in model.heads)
    num_bytes = 3 * 4 * (max_seq_len + 1) * head_dim
    free_bytes = free_memory(torch.device("cpu"), num_ranks)
    if num_bytes > free_bytes:
        raise InsufficientMemory(
            f"max_seq_len {max_seq_len} takes {gib(num_bytes)} of memory to make the table of its positions "
            f"for heads of {head_dim}, but {gib(free_bytes)} are free; set max_seq_len to less"
        )


def _load_draft_network(
    config: EngineConfig,
    vocab_size: int,
    groups: ParallelGroups,
    device: torch.device,
    max_seq_len: int,
    weights: SharedWeights | None,
    checkpoint: Checkpoint | None,
) -> Network:
    """This rank's part of the draft model, loaded as the network is.

    Raises ConfigurationError, which names speculative_model_dir, for a checkpoint that cannot be loaded, or whose
    vocabulary or positions do not match.
    """
    # Of whatever experts it may have each rank has a part.
    own = replace(config, gpt_model_path=config.speculative_model_dir, moe_expert_parallel_size=1)
    try:
        model = read_config(own)
        if model.vocab_size != vocab_size:
            raise ConfigurationError(
                f"its vocabulary has {model.vocab_size} tokens, that of gpt_model_path has {vocab_size}; drafts are "
                "token ids, so choose a draft model with the same tokenizer"
            )
        if max_seq_len > model.max_positions:
            raise ConfigurationError(
                f"it has {model.max_positions} positions, but max_seq_len is {max_seq_len}; set max_seq_len to at most "
                f"{model.max_positions} or choose another draft model"
            )
        if isinstance(model, ModelConfig):
            _check_positions(max_seq_len, model, config.num_ranks)
        dtype = choose_dtype(config, model.dtype)
        return load_network(own, model, groups, dtype, device, max_seq_len, weights=weights, checkpoint=checkpoint)
    except ConfigurationError as error:
        raise type(error)(f"speculative_model_dir: {error}") from None
