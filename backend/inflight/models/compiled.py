"""A network that runs in C++ compiled for this CPU, or one rank's part of it, sums over the ranks included.

The network is not described a second time: its own forward pass is recorded (inflight_kernels.cpu.record). What C++
has no operation for is the reason why torch runs the network instead.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from inflight.config import EngineConfig
from inflight.distributed.parallel_groups import ParallelGroups
from inflight.distributed.tensor_parallel import TensorParallelGroup
from inflight.errors import ConfigurationError
from inflight.layers.attention import AttentionMetadata
from inflight.layers.disentangled_attention import DisentangledAttention
from inflight.layers.given_embeddings import GivenEmbeddings
from inflight.layers.state import LayerState, StateSpec
from inflight.models.config import ModelConfig
from inflight.models.decoder import Decoder
from inflight.models.network import Network
from inflight_kernels import cpu
from inflight_kernels.cpu import (
    Batch,
    NativeLibrary,
    Program,
    Recording,
    Unsupported,
    WeightMemory,
    WeightPacker,
    Workspace,
)

logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class CompiledNetwork:
    """See LayeredNetwork."""

    state_specs: tuple[StateSpec, ...]
    sum_order: str
    """See EngineDescription."""
    hidden_states: Program
    """Token ids, or the residual stream of an earlier pipeline stage, to hidden states."""
    head: Program | None
    """Hidden states to logits; None = a later stage has it."""
    by_layer: tuple[Program, ...]
    """The same as `hidden_states`, with the same bits, in parts: each layer, then the norm that a head needs; none of a
    network whose layers read more than the residual stream."""
    first_layer: int = 0
    """Number of its first layer in the whole network."""
    is_last: bool = True
    """Whether it ends with the norm that a head needs."""
    activations: str = ""
    """See EngineDescription."""

    def forward(self, x_T: Tensor, states: Sequence[LayerState], metadata: AttentionMetadata) -> Tensor:
        """See Network; `states` are those that it was compiled for."""
        return self.hidden_states(x_T, self._batch(x_T, metadata))

    @property
    def num_layers(self) -> int:
        return max(len(self.by_layer) - self.is_last, 0)

    def forward_layers(
        self, x_T: Tensor, states: Sequence[LayerState], metadata: AttentionMetadata, wanted: frozenset[int]
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """See LayeredNetwork."""
        batch, outputs = self._batch(x_T, metadata), {}
        for number, part in enumerate(self.by_layer, self.first_layer):
            x_T = part(x_T, batch)
            if number in wanted:
                outputs[number] = x_T
        return x_T, outputs

    def _batch(self, x_T: Tensor, metadata: AttentionMetadata) -> Batch:
        given_T, given_rows = None, None
        if metadata.given is not None:
            given_T, given_rows = _given(metadata.given, len(x_T), self.hidden_states.dtype)
        return Batch(
            positions_T=metadata.positions_T,
            blocks=metadata.blocks,
            decode_rows_N=metadata.decode_rows_N,
            decode_lens_N=metadata.decode_seq_lens_N,
            prefill_rows_P=metadata.prefill_rows_P,
            prefill_lens_P=metadata.prefill_seq_lens_P,
            prefill_starts=metadata.prefill_start_loc,
            given_T=given_T,
            given_rows=given_rows,
            adapters_T=metadata.adapters_T,
            sequences=metadata.sequences,
            token_types_T=metadata.token_types_T,
        )

    def logits(self, hidden_BD: Tensor) -> Tensor:
        """See Network."""
        assert self.head is not None, "logits of a stage that is not the last"
        return self.head(hidden_BD)


def may_compile(config: EngineConfig, model: ModelConfig) -> bool:
    """Whether C++ computes networks of such a configuration, on machines that can compile them."""
    sizes = [model.hidden_size]
    if (latents := model.family.attention.latents) is not None:
        sizes += [latents.sizes.plain, latents.sizes.latent, latents.sizes.value]
        sizes += [] if latents.narrow_queries is None else [latents.narrow_queries.size]
    if (layer_inputs := model.family.layer_inputs) is not None:
        sizes.append(layer_inputs.size)
    if (encoder := model.family.encoder) is not None and encoder.places is not None:
        return False
    fits = all(heads.head_dim in cpu.HEAD_DIMS for heads in model.heads)
    return config.cpu_compile != "false" and fits and all(size % cpu.STEP == 0 for size in sizes)


def keeps_codes(config: EngineConfig, model: ModelConfig, device: torch.device, group: TensorParallelGroup) -> bool:
    """Whether weights that are codes may stay so, since C++ is going to multiply them."""
    return (
        device.type == "cpu" and may_compile(config, model) and group.can_be_recorded and not cpu.unsupported_reason()
    )


def order_of_products(config: EngineConfig, dtype: torch.dtype, device: torch.device) -> cpu.Order | None:
    """Of the sums of single products in C++; None = they do not run there."""
    if device.type != "cpu" or config.cpu_compile == "false" or cpu.unsupported_reason():
        return None
    order = cpu.Order(config.cpu_order)
    try:
        cpu.load_library(dtype, order=order)
    except cpu.LibraryUnavailable as unavailable:
        logger.warning("linear layers run in torch, several times slower: %s", unavailable)
        return None
    return order


def compile_network(
    config: EngineConfig,
    network: Network,
    states: Sequence[LayerState],
    device: torch.device,
    groups: ParallelGroups,
    weights: WeightMemory | None = None,
) -> Network:
    """`network` as C++, its weights moved out of it, or as it is, whichever `cpu_compile` and the machine determine.

    Collective: the ranks of all pipeline stages compute in C++ all or none. Takes a few seconds the first time on a
    machine. `weights`: the memory that the network's were taken from, and packed ones are; None = its own. Raises
    ConfigurationError if `cpu_compile` asks for what is impossible.
    """
    if config.cpu_compile == "false":
        return network
    started = time.monotonic()
    prepared, level, reason = None, logging.INFO, "another rank cannot compute in C++"
    try:
        prepared = _prepare(config, network, states, device, groups.tensor)
    except Unsupported as unsupported:
        reason = str(unsupported)
    except cpu.LibraryUnavailable as unavailable:
        level, reason = logging.WARNING, str(unavailable)
    if not groups.all_reduce_min(int(prepared is not None)) or prepared is None:
        if config.cpu_compile == "true":
            raise ConfigurationError(f"cpu_compile is true, but {reason}; set cpu_compile to auto or false")
        if device.type == "cpu":
            logger.log(level, "the layers run in torch, several times slower: %s", reason)
            if config.cpu_activations == "int8":
                logger.warning("cpu_activations is int8, which is for layers in C++: activations are kept")
        return network
    library, recordings = prepared
    packer, workspace = WeightPacker(library, recordings.all, weights), Workspace()

    def program(recording: Recording) -> Program:
        return Program(library, recording, packer, workspace)

    hidden_states = program(recordings.hidden_states)
    head = None if recordings.head is None else program(recordings.head)
    by_layer = tuple(map(program, recordings.by_layer))
    activations = "int8" if any(recording.quantizes_inputs for recording in recordings.all) else ""
    if config.cpu_activations == "int8" and not activations:
        logger.warning("cpu_activations is int8, and no layer has weights of int8 or int4: activations are kept")
    seconds = time.monotonic() - started
    logger.info(
        "the layers are compiled for %s and packed after %.1f s; products of %s%s",
        library.variant,
        seconds,
        library.instructions,
        f", of activations that are quantised to {activations}" if activations else "",
    )
    return CompiledNetwork(
        state_specs=network.state_specs,
        sum_order=library.sum_order,
        hidden_states=hidden_states,
        head=head,
        by_layer=by_layer,
        first_layer=recordings.first_layer,
        is_last=recordings.is_last,
        activations=activations,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Recordings:
    """See CompiledNetwork."""

    hidden_states: Recording
    head: Recording | None
    by_layer: tuple[Recording, ...]
    first_layer: int
    is_last: bool

    @property
    def all(self) -> list[Recording]:
        """What every step computes, then the parts of it."""
        return [self.hidden_states, *([] if self.head is None else [self.head]), *self.by_layer]


def _prepare(
    config: EngineConfig,
    network: Network,
    states: Sequence[LayerState],
    device: torch.device,
    group: TensorParallelGroup,
) -> tuple[NativeLibrary, Recordings]:
    """Raises Unsupported or LibraryUnavailable."""
    recordings = record_network(network, states, device, group)
    library = cpu.load_library(recordings.hidden_states.dtype, order=cpu.Order(config.cpu_order))
    # Rows of one token may be padded to a full batch beside a step's other tokens.
    num_tokens = config.max_num_tokens + config.max_batch_size
    most_tokens = min(cpu.most_tokens(library, recording) for recording in recordings.all)
    if num_tokens > most_tokens:
        raise Unsupported(
            f"a step may have {num_tokens} tokens (keys max_num_tokens and max_batch_size), and the memory that the "
            f"ranks share has room for {most_tokens}"
        )
    return library, recordings


def record_network(
    network: Network, states: Sequence[LayerState], device: torch.device, group: TensorParallelGroup
) -> Recordings:
    """Raises Unsupported."""
    if not isinstance(network, Decoder):
        raise Unsupported("layers in C++ are the engine's own, and transformers computes these (key model_impl)")
    if any(isinstance(branch.part, DisentangledAttention) for layer in network.layers for branch in layer.branches):
        raise Unsupported("C++ has no attention to where tokens are, as DeBERTa's")
    if device.type != "cpu":
        raise Unsupported(f"layers in C++ are for CPUs, and device is {device.type}")
    if not group.can_be_recorded:
        raise Unsupported("layers in C++ are for ranks that share memory, and these sum through sockets")
    if reason := cpu.unsupported_reason():
        raise Unsupported(reason)
    dtype, num_groups = network.dtype, 1 + max((state.group for state in states), default=0)

    def record(part: Decoder, own: Sequence[LayerState]) -> Recording:
        return cpu.record(
            lambda x_T, batch: part.forward(x_T, own, _metadata(batch)), part.input_size, dtype, num_groups
        )

    hidden_states, head = record(network, states), None
    if network.head is not None:
        head = cpu.record(lambda hidden_BD, _: network.logits(hidden_BD), hidden_states.output_size, dtype)
    parts = network.by_layer()
    borders = pairwise(accumulate((len(part.state_specs) for part in parts), initial=0))
    return Recordings(
        hidden_states=hidden_states,
        head=head,
        by_layer=tuple(record(part, states[first:end]) for part, (first, end) in zip(parts, borders, strict=True)),
        first_layer=network.first_layer,
        is_last=network.is_last,
    )


def _metadata(batch: Batch) -> AttentionMetadata:
    return AttentionMetadata(
        positions_T=batch.positions_T,
        blocks=batch.blocks,
        num_decodes=batch.decode_rows_N.shape[0],
        decode_rows_N=batch.decode_rows_N,
        decode_seq_lens_N=batch.decode_lens_N,
        num_prefills=batch.prefill_rows_P.shape[0],
        prefill_rows_P=batch.prefill_rows_P,
        prefill_seq_lens_P=batch.prefill_lens_P,
        prefill_start_loc=batch.prefill_starts,
        max_prefill_len=batch.positions_T.shape[0],
        adapters_T=batch.adapters_T,
        sequences=batch.sequences,
        token_types_T=batch.token_types_T,
    )


def _given(given: GivenEmbeddings, num_tokens: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """For each token the number of its row, or -1; and the rows."""
    given_T = torch.full((num_tokens,), -1)
    given_T[given.places_G] = torch.arange(len(given.places_G))
    return given_T, given.rows_GD.to(dtype)
