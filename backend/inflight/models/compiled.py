"""A decoder whose layers and head run through programs compiled for this CPU. For one rank: it sums over none."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from inflight.config import EngineConfig
from inflight.errors import ConfigurationError
from inflight.layers.attention import LayerCache
from inflight.layers.compiled_layer import compile_layer, layer_shape, load_kernels
from inflight.layers.decoder_layer import DecoderLayer
from inflight.layers.vocabulary import VocabularyParallelHead
from inflight.models.decoder import Decoder
from inflight_kernels.cpu import DecoderKernels, can_pack, find_compiler, pack_weight, packed_linear

logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class PackedHead:
    """Logits (B, V)."""

    packed_VD: Tensor

    def __call__(self, hidden_BD: Tensor) -> Tensor:
        return packed_linear(hidden_BD, self.packed_VD, None)


def should_compile(config: EngineConfig, decoder: Decoder, device: torch.device) -> bool:
    """True where `cpu_compile` asks for it, or leaves it open and it pays: bfloat16 on a CPU that multiplies it.

    Raises ConfigurationError if it is asked for and impossible.
    """
    weight = decoder.head.weight_UD if isinstance(decoder.head, VocabularyParallelHead) else None
    obstacle = ""
    if device.type != "cpu" or config.tensor_parallel_size > 1:
        obstacle = "it is for one rank on a CPU"
    elif find_compiler() is None:
        obstacle = "no C++ compiler was found; install g++"
    if config.cpu_compile == "true" and obstacle:
        raise ConfigurationError(f"cpu_compile is true, but {obstacle}; set cpu_compile to auto or false")
    if config.cpu_compile == "auto":
        return not obstacle and weight is not None and can_pack(weight)
    return config.cpu_compile == "true"


def compile_decoder(decoder: Decoder, caches: Sequence[LayerCache]) -> Decoder:
    """`decoder`, which gives up its weights, compiled: a minute the first time on a machine, then under two seconds."""
    started = time.monotonic()
    kernels: dict[object, DecoderKernels] = {}
    layers = []
    for layer, cache in zip(decoder.layers, caches, strict=True):
        assert isinstance(layer, DecoderLayer)
        shape = layer_shape(layer)
        if shape not in kernels:
            if not kernels:
                logger.info("loading the layers' programs for this CPU; the first time compiles them, about a minute")
            kernels[shape] = load_kernels(layer, cache)
        layers.append(compile_layer(layer, kernels[shape]))
    head = decoder.head
    assert isinstance(head, VocabularyParallelHead)
    packed_head = PackedHead(packed_VD=pack_weight(head.weight_UD[: head.vocab_size]))
    logger.info("compiled layers are ready after %.1f s", time.monotonic() - started)
    return replace(decoder, layers=layers, head=packed_head)
