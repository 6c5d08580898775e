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
from inflight.layers.compiled_layer import LayerPrograms, compile_layer, layer_shape, load_programs
from inflight.layers.decoder_layer import DecoderLayer
from inflight.layers.vocabulary import VocabularyParallelEmbedding, VocabularyParallelHead
from inflight.models.decoder import Decoder
from inflight_kernels.cpu import HugePageArena, TokenProduct, can_pack, find_compiler, pack_weight, packed_linear

logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class PackedHead:
    """Logits (B, V)."""

    packed_VD: Tensor
    plain_VD: Tensor
    """Empty if only the packed weight is kept."""
    one_token: TokenProduct | None

    def __call__(self, hidden_BD: Tensor) -> Tensor:
        if self.one_token is not None and hidden_BD.shape[0] == 1:
            return self.one_token(hidden_BD, self.plain_VD)
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


def plain_bytes(decoder: Decoder) -> int:
    """Bytes of the weights that compiled layers lay out anew."""
    layers = [layer for layer in decoder.layers if isinstance(layer, DecoderLayer)]
    return sum(linear.weight_OI.nbytes for layer in layers for linear in layer.linears)


def compile_decoder(decoder: Decoder, caches: Sequence[LayerCache], *, keep_plain: bool) -> Decoder:
    """`decoder`, which gives up its weights, compiled: a minute the first time on a machine, then under two seconds.

    With `keep_plain` it holds them a second time, as they were: steps of one token read those faster.
    """
    started = time.monotonic()
    programs: dict[object, LayerPrograms] = {}
    layers, arena = [], HugePageArena()
    for layer, cache in zip(decoder.layers, caches, strict=True):
        assert isinstance(layer, DecoderLayer)
        shape = layer_shape(layer)
        if shape not in programs:
            if not programs:
                logger.info("loading the layers' programs for this CPU; the first time compiles them, about a minute")
            programs[shape] = load_programs(layer, cache, keep_plain=keep_plain)
        layers.append(compile_layer(layer, programs[shape], arena))
    head, embedding = _compile_head(decoder, arena if keep_plain else None)
    logger.info("compiled layers are ready after %.1f s", time.monotonic() - started)
    return replace(decoder, layers=layers, head=head, embedding=embedding)


def _compile_head(decoder: Decoder, arena: HugePageArena | None) -> tuple[PackedHead, VocabularyParallelEmbedding]:
    head, embedding = decoder.head, decoder.embedding
    assert isinstance(head, VocabularyParallelHead)
    weight_VD = head.weight_UD[: head.vocab_size]
    packed_VD = pack_weight(weight_VD)
    if arena is None:
        return PackedHead(packed_VD=packed_VD, plain_VD=weight_VD.new_empty(0), one_token=None), embedding
    plain_VD = arena.copy(weight_VD)
    if embedding.weight_UD is head.weight_UD:
        embedding = replace(embedding, weight_UD=plain_VD)
    return PackedHead(packed_VD=packed_VD, plain_VD=plain_VD, one_token=TokenProduct(plain_VD)), embedding
