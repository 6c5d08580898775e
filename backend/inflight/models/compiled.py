"""A decoder whose layers and head run in C++ compiled for this CPU. For one rank only: it does not sum over ranks."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from inflight.config import EngineConfig
from inflight.errors import ConfigurationError
from inflight.layers.attention import AttentionMetadata, CacheSpec, LayerCache
from inflight.layers.decoder_layer import DecoderLayer
from inflight.layers.part import Part
from inflight.models.compiled_parts import find_unknown
from inflight.models.decoder import Decoder
from inflight.models.network import Network
from inflight_kernels import cpu
from inflight_kernels.cpu import Batch, DecoderStack, HugePageArena, LayerTensors, NativeLibrary, PackedWeight

logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class CompiledDecoder:
    """Called like a Decoder."""

    cache_specs: tuple[CacheSpec, ...]
    embedding: Part
    stack: DecoderStack
    head: PackedWeight

    def forward(self, token_ids_T: Tensor, caches: Sequence[LayerCache], metadata: AttentionMetadata) -> Tensor:
        """See Decoder; `caches` are those that it was compiled for."""
        batch = Batch(
            positions_T=metadata.positions_T,
            slots_T=metadata.slot_mapping_T,
            decode_table=metadata.decode_block_table,
            decode_lens_N=metadata.decode_seq_lens_N,
            prefill_table=metadata.prefill_block_table,
            prefill_lens_P=metadata.prefill_seq_lens_P,
            prefill_starts=metadata.prefill_start_loc,
        )
        return self.stack(self.embedding(token_ids_T, metadata), batch)

    def logits(self, hidden_BD: Tensor) -> Tensor:
        """See Decoder."""
        return self.head.linear(hidden_BD)


def should_compile(config: EngineConfig, decoder: Network, device: torch.device) -> bool:
    """Whether to use it: `cpu_compile` is true, or auto and it is supported.

    Raises ConfigurationError if it is asked for and impossible.
    """
    reason = _unsupported_reason(config, decoder, device)
    if config.cpu_compile == "true" and reason:
        raise ConfigurationError(f"cpu_compile is true, but {reason}; set cpu_compile to auto or false")
    if config.cpu_compile == "auto" and reason and device.type == "cpu" and _is_bfloat16(decoder):
        logger.info("the layers run in torch, several times slower: %s", reason)
    return config.cpu_compile != "false" and not reason


def _is_bfloat16(decoder: Network) -> bool:
    return all(spec.dtype == torch.bfloat16 for spec in decoder.cache_specs)


def _unsupported_reason(config: EngineConfig, decoder: Network, device: torch.device) -> str:
    if not isinstance(decoder, Decoder):
        return "it is for the engine's own layers, not for transformers' modelling code (key model_impl)"
    if device.type != "cpu" or config.tensor_parallel_size > 1:
        return "it is for one rank on a CPU"
    if not _is_bfloat16(decoder):
        return "it is for bfloat16 (key dtype)"
    return find_unknown(decoder) or _shape(decoder.layers[0]).unsupported_reason() or cpu.unsupported_reason()


def compile_decoder(config: EngineConfig, decoder: Decoder, caches: Sequence[LayerCache]) -> Decoder | CompiledDecoder:
    """Compile `decoder`, whose weights are moved out of it; takes a few seconds the first time on a machine.

    Where that fails, `decoder` as it is, or a ConfigurationError if `cpu_compile` asks for more.
    """
    started = time.monotonic()
    cache_specs = decoder.cache_specs
    try:
        library = cpu.load_library()
    except cpu.LibraryUnavailable as error:
        if config.cpu_compile == "true":
            raise ConfigurationError(f"cpu_compile is true, but {error}; set cpu_compile to auto or false") from error
        logger.warning("the layers run in torch, several times slower: %s", error)
        return decoder
    shape, arena = _shape(decoder.layers[0]), HugePageArena()
    layers = [_take_layer(library, layer, cache, arena) for layer, cache in zip(decoder.layers, caches, strict=True)]
    cos_sin = decoder.layers[0].attention.cos_sin
    stack = DecoderStack(library, shape, layers, norm_D=decoder.norm.weight_D, cos_sin=cos_sin)
    plain_head: Any = decoder.head
    head = PackedWeight.pack(library, plain_head.weight_UD[: plain_head.vocab_size], arena)
    plain_head.weight_UD = plain_head.weight_UD.new_empty(0)
    seconds = time.monotonic() - started
    logger.info("the layers are compiled and packed after %.1f s; products of %s", seconds, library.instructions)
    return CompiledDecoder(cache_specs=cache_specs, embedding=decoder.embedding, stack=stack, head=head)


def _shape(layer: DecoderLayer) -> cpu.StackShape:
    attention = layer.attention
    mlp: Any = layer.mlp
    return cpu.StackShape(
        hidden=layer.input_norm.weight_D.shape[0],
        num_heads=attention.num_heads,
        num_kv_heads=attention.num_kv_heads,
        head_dim=attention.head_dim,
        intermediate=_padded(mlp.down.weight.values_OI.shape[1]),
        scale=attention.scale,
        norm_eps=layer.input_norm.eps,
        head_norm_eps=attention.norm_eps,
    )


def _padded(intermediate: int) -> int:
    return -(-intermediate // cpu.STEP) * cpu.STEP


def _pad_mlp(mlp: Any) -> None:
    """Pad its intermediate size to a multiple that can be packed; the added features are 0, as silu(0) * 0 = 0."""
    size = mlp.down.weight.values_OI.shape[1]
    more = _padded(size) - size
    if not more:
        return
    gate_up = mlp.gate_up.weight
    gate_up.values_OI = F.pad(gate_up.values_OI.view(2, size, -1), (0, 0, 0, more)).flatten(0, 1)
    if mlp.gate_up.bias_O is not None:
        mlp.gate_up.bias_O = F.pad(mlp.gate_up.bias_O.view(2, size), (0, more)).flatten()
    mlp.down.weight.values_OI = F.pad(mlp.down.weight.values_OI, (0, more))


def _take_layer(library: NativeLibrary, layer: DecoderLayer, cache: LayerCache, arena: HugePageArena) -> LayerTensors:
    attention = layer.attention
    mlp: Any = layer.mlp
    qkv: Any = layer.qkv
    output: Any = layer.output
    _pad_mlp(mlp)
    linears = (qkv, output, mlp.gate_up, mlp.down)
    packed = [
        PackedWeight.pack(library, linear.weight.values_OI, arena, gated=linear is mlp.gate_up) for linear in linears
    ]
    for linear in linears:
        # Memory is to hold it once.
        linear.weight.values_OI = linear.weight.values_OI.new_empty(0)
    return LayerTensors(
        input_norm_D=layer.input_norm.weight_D,
        qkv=packed[0],
        qkv_bias=qkv.bias_O,
        q_norm_E=attention.q_norm_E,
        k_norm_E=attention.k_norm_E,
        output=packed[1],
        output_bias=output.bias_O,
        post_norm_D=layer.post_attention_norm.weight_D,
        gate_up=packed[2],
        gate_up_bias=mlp.gate_up.bias_O,
        down=packed[3],
        down_bias=mlp.down.bias_O,
        keys=cache.keys,
        values=cache.values,
        sliding_window=attention.sliding_window,
    )
