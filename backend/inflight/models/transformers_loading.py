"""Loads a checkpoint into a TransformersDecoder: transformers' own loading code, given only our safetensors slices.

Does not know how a network is run.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers.utils.logging import disable_progress_bar

from inflight.distributed.tensor_parallel import TensorParallelGroup
from inflight.errors import ConfigurationError
from inflight.log_progress import ByteProgress
from inflight.models.adapter_places import AdapterPlaces
from inflight.models.checkpoint import Checkpoint
from inflight.models.formats.coded import CodedFormat
from inflight.models.formats.format import Target
from inflight.models.formats.on_load import OnLoadFormat
from inflight.models.inspection import NUM_TOKENS, Unfit, inspect_network
from inflight.models.replaced_experts import ReplacedExperts
from inflight.models.replaced_linear import ReplacedLinear
from inflight.models.token_check import check_tokens, find_embedding_size
from inflight.models.transformers_codes import CodedLayers
from inflight.models.transformers_config import TransformersConfig
from inflight.models.transformers_decoder import TransformersDecoder
from inflight.models.transformers_experts import replace_experts, settle_experts
from inflight.models.transformers_linears import place_adapters, replace_linears, settle
from inflight.models.transformers_norms import compile_norms
from inflight.models.transformers_plan import NotSplit
from inflight.models.transformers_sequential import SequentialDecoder, make_sequential
from inflight.models.transformers_split import NetworkSplit
from inflight.models.upload import Upload
from inflight.models.usable_values import why_unusable
from inflight_kernels import Inputs, cpu

logger = logging.getLogger(__name__)

Kind = TypeVar("Kind", TransformersDecoder, SequentialDecoder)
OWN_ATTENTION = (
    "its layers do not attend through transformers' attention interface, through which this engine provides its paged "
    "attention"
)
NOT_WEIGHTS = ("rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias", ".attention.bias", ".attention.masked_bias")
"""Endings of the names of tensors in old checkpoints that are not weights, but computed from config.json."""


def load_transformers_decoder(
    config: TransformersConfig,
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device,
    max_seq_len: int,
    *,
    kv_dtype: torch.dtype | None = None,
    inputs: Inputs | None = None,
    order: cpu.Order | None = None,
    adapters: AdapterPlaces | None = None,
    group: TensorParallelGroup | None = None,
    expert_parallel_size: int = 1,
) -> TransformersDecoder | SequentialDecoder:
    """`kv_dtype`: of keys and values in the cache, with the scale 1 if it is fp8; None = that of the activations.
    `inputs`: what C++ multiplies codes with, see Target. `order`: of the sums of linear layers in C++; None = torch
    computes them. `adapters`: where to note which layers take low-rank adapters; None = none does. `group`: of the
    ranks over which the network is split, by its class's `tp_plan`; None = one. Collective over them.
    `expert_parallel_size`: see ExpertShare.

    Raises ConfigurationError for an incomplete checkpoint, and for a class that cannot be served.
    """
    group = group or TensorParallelGroup()
    coded, weight_format, split = None, config.weight_format, NetworkSplit()
    if isinstance(weight_format, CodedFormat) or group.size > 1:
        outline = _outline(config, checkpoint)
        try:
            split = NetworkSplit.of(outline, group, expert_parallel_size)
        except NotSplit as error:
            raise ConfigurationError(f"{checkpoint.folder}: {config.architecture} cannot be split: {error}") from None
        if isinstance(weight_format, CodedFormat):
            keeps_codes = order is not None
            coded = CodedLayers(outline, checkpoint, weight_format, split, keeps_codes=keeps_codes)
    network = _read(config, checkpoint, dtype, coded, device)
    split.cut(network)
    for name, parameter in network.named_parameters():
        if reason := why_unusable(parameter.data, parameter.dtype):
            raise ConfigurationError(f"{checkpoint.folder}: tensor {name} {reason}")
        if device.type == "cpu":
            # It may still be mapped from the files. Copying one at a time keeps little of them in memory twice.
            parameter.data = parameter.data.clone()
    if device.type != "cpu":
        _upload_parameters(network, device)
    network.requires_grad_(False).to(device)
    target = _target(dtype, device, inputs, keeps_codes=order is not None)
    if coded is not None:
        coded.put_into(network, target)
    layers = replace_linears(network, dtype, device, split.linears)
    on_load = weight_format if isinstance(weight_format, OnLoadFormat) and target.keeps_codes else None
    experts = replace_experts(network, dtype, on_load, target, split.experts)
    if isinstance(weight_format, OnLoadFormat) and weight_format.cache is not None:
        # Before the codes are packed, and given up.
        weight_format.cache.finish()
    try:
        decoder = _assemble(config, network, layers, experts, dtype, device, max_seq_len, order, adapters)
    except Unfit as reason:
        raise ConfigurationError(f"{checkpoint.folder}: {config.architecture} cannot be served: {reason}") from None
    if isinstance(decoder, TransformersDecoder):
        decoder.embedding_size = find_embedding_size(network, decoder, max_seq_len, device)
        if kv_dtype:
            # Not before: the tests have to tell another kind of attention from what the cache rounds.
            decoder.specs = tuple(replace(spec, dtype=kv_dtype) for spec in decoder.specs)
    elif kv_dtype:
        raise ConfigurationError(
            f"{checkpoint.folder}: kv_cache_dtype is {str(kv_dtype).removeprefix('torch.')}, but {config.architecture} "
            "computes attention itself, with keys and values as they are; set kv_cache_dtype to auto"
        )
    return decoder


def _assemble(
    config: TransformersConfig,
    network: Any,
    layers: Mapping[str, ReplacedLinear],
    experts: Sequence[ReplacedExperts],
    dtype: torch.dtype,
    device: torch.device,
    max_seq_len: int,
    order: cpu.Order | None,
    adapters: AdapterPlaces | None,
) -> TransformersDecoder | SequentialDecoder:
    """With paged attention; on a CPU by the class's own, one sequence at a time, where that is not possible. Raises
    Unfit, with the reason against paged attention, if neither gives the tokens of the class."""
    is_settled = False

    def settle_once() -> None:
        nonlocal is_settled
        if not is_settled:
            is_settled = True
            if adapters is not None:
                place_adapters(network, layers, NUM_TOKENS, adapters)
            settle(list(layers.values()), dtype, order, {each.data_ptr() for each in network.parameters()})
            settle_experts(experts, dtype, order)
            compile_norms(network, dtype, order)

    def paged() -> TransformersDecoder:
        if not network._can_set_attn_implementation():
            raise Unfit(OWN_ATTENTION)
        findings = inspect_network(network, max_seq_len, device)
        settle_once()
        return TransformersDecoder.assemble(network, findings.backbone, findings.specs, max_seq_len, device)

    def sequential() -> SequentialDecoder:
        if network._can_set_attn_implementation():
            network.set_attn_implementation("eager")
        decoder = make_sequential(network, max_seq_len)
        settle_once()
        return decoder

    try:
        return _checked(network, paged, max_seq_len, device)
    except Unfit as reason:
        if device.type != "cpu":
            raise
        try:
            decoder = _checked(network, sequential, max_seq_len, device)
        except Unfit as other:
            logger.info("nor does it run by its own attention: %s", other)
            raise reason from None
        logger.warning(
            "%s computes attention by its own code, one sequence after the other, which is slow: %s",
            config.architecture,
            reason,
        )
        return decoder


def _checked(network: Any, make: Callable[[], Kind], max_seq_len: int, device: torch.device) -> Kind:
    """What `make` returns, if it gives the right tokens. Raises Unfit."""
    try:
        decoder = make()
        check_tokens(network, decoder, max_seq_len, device)
    except Unfit:
        raise
    except Exception as error:  # whatever the class raises
        raise Unfit(f"it does not run: {type(error).__name__}: {' '.join(str(error).split())}") from error
    return decoder


def _upload_parameters(network: torch.nn.Module, device: torch.device) -> None:
    """Put them on a GPU, one after the other, so that the host never holds copies of them all."""
    upload, num_bytes = Upload(device), 0
    total = sum(parameter.nbytes for parameter in network.parameters())
    progress = ByteProgress(logger, "of parameters are copied to the GPU", total)
    for parameter in network.parameters():
        on_device = torch.empty_like(parameter, device=device, requires_grad=False)
        upload.copy(parameter.detach(), on_device)
        parameter.data = on_device
        num_bytes += on_device.nbytes
        progress.note(num_bytes)
    upload.finish()
    progress.end(num_bytes)


def _outline(config: TransformersConfig, checkpoint: Checkpoint) -> Any:
    """The network, without memory for its weights."""
    try:
        with torch.device("meta"):
            return config.network_class(copy.deepcopy(config.hf_config))
    except Exception as error:
        raise _unreadable(config, checkpoint, error) from error


def _target(own: torch.dtype, device: torch.device, inputs: Inputs | None, *, keeps_codes: bool) -> Target:
    def empty(*shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(shape, dtype=dtype or own, device=device)

    return Target(dtype=own, device=device, empty=empty, keeps_codes=keeps_codes, inputs=inputs)


def _read(
    config: TransformersConfig,
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    coded: CodedLayers | None,
    device: torch.device,
) -> Any:
    network_class, slices = config.network_class, None
    if coded is not None:
        network_class, slices = coded.class_without(network_class, dtype, device), coded.slices(NOT_WEIGHTS)
    disable_progress_bar()
    try:
        # Given the tensors, transformers does not search for files, adapters or code. Mismatches are reported below.
        network, report = network_class.from_pretrained(
            None,
            config=config.hf_config,
            state_dict=checkpoint.slices(NOT_WEIGHTS) if slices is None else slices,
            dtype=dtype,
            attn_implementation="eager",
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    except Exception as error:
        # Building the class from config.json can raise any exception; in every case the checkpoint has to be changed.
        raise _unreadable(config, checkpoint, error) from error
    mismatched = {
        f"{name} (shape {list(found)} where config.json asks for {list(asked)})"
        for name, found, asked in report["mismatched_keys"]
    }
    _refuse(checkpoint, "holds", mismatched)
    _refuse(checkpoint, "has no tensor", report["missing_keys"])
    _refuse(checkpoint, "holds tensors that its config.json does not account for:", report["unexpected_keys"])
    return network.eval()


def _unreadable(config: TransformersConfig, checkpoint: Checkpoint, error: Exception) -> ConfigurationError:
    reason = " ".join(str(error).split())
    return ConfigurationError(f"{checkpoint.folder}: transformers cannot read it as {config.architecture}: {reason}")


def _refuse(checkpoint: Checkpoint, what: str, names: set[str]) -> None:
    if names:
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        shown = ", ".join(sorted(names)[:3])
        raise ConfigurationError(f"{checkpoint.folder}: the checkpoint {what} {shown}{more}")
