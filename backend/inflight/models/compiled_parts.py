"""Which networks the C++ layers compute: those made of parts, and of attributes of parts, that are listed here.

`compiled.py` copies what it knows out of each part. What it did not copy would be left out of the computation without
a word, so a part of another type (a subclass too), an attribute that is not listed, and layers that differ where C++
has one value for all of them stand against it. The embedding runs in torch and may be anything.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from inflight.layers.attention import Attention, AttentionMetadata, LayerCache
from inflight.layers.decoder_layer import DecoderLayer
from inflight.layers.linear import ColumnParallelLinear, RowParallelLinear
from inflight.layers.mlp import GatedMLP
from inflight.layers.rms_norm import RMSNorm
from inflight.layers.vocabulary import VocabularyParallelHead
from inflight.layers.weight import DenseWeight
from inflight.models.decoder import Decoder

KNOWN_ATTRIBUTES: dict[type, frozenset[str]] = {
    Decoder: frozenset({"embedding", "layers", "norm", "head"}),
    DecoderLayer: frozenset({"input_norm", "qkv", "attention", "output", "post_attention_norm", "mlp"}),
    Attention: frozenset(
        {"num_heads", "num_kv_heads", "head_dim", "scale", "sliding_window", "cos_sin", "dtype"}
        | {"q_norm_E", "k_norm_E", "norm_eps"}
    ),
    GatedMLP: frozenset({"gate_up", "down"}),
    RMSNorm: frozenset({"weight_D", "eps"}),
    ColumnParallelLinear: frozenset({"weight", "bias_O"}),
    RowParallelLinear: frozenset({"weight", "bias_O", "group"}),
    DenseWeight: frozenset({"values_OI"}),
    VocabularyParallelHead: frozenset({"weight_UD", "vocab_size", "group"}),
    LayerCache: frozenset({"keys", "values"}),
    AttentionMetadata: frozenset(
        {"positions_T", "slot_mapping_T"}
        | {"num_decodes", "decode_block_table", "decode_seq_lens_N"}
        | {"num_prefills", "prefill_block_table", "prefill_seq_lens_P", "prefill_start_loc", "max_prefill_len"}
    ),
}

DTYPES = {"cos_sin": torch.float32}
"""Of tensors that are not bfloat16."""


def find_unknown(decoder: Decoder) -> str:
    """What of the network C++ has no code for, as half a sentence; empty if there is nothing."""
    for name, part, expected in _parts(decoder):
        if type(part) is not expected:
            return f"C++ has no code for {name}, a {type(part).__name__} instead of a {expected.__name__}"
        for attribute in sorted(KNOWN_ATTRIBUTES[expected]):
            value, dtype = getattr(part, attribute), DTYPES.get(attribute, torch.bfloat16)
            if isinstance(value, Tensor) and value.dtype != dtype:
                return f"{name}.{attribute} is {value.dtype} and not {dtype}"
    for part_type, known in KNOWN_ATTRIBUTES.items():
        unknown = sorted(_attributes(part_type) - known)
        if unknown:
            return f"C++ has no code for {part_type.__name__}.{unknown[0]}"
    return _find_difference(decoder)


def _parts(decoder: Decoder) -> Iterator[tuple[str, object, type]]:
    """Each part's name, itself, and the type that is known for it."""
    yield "the network", decoder, Decoder
    for number, layer in enumerate(decoder.layers):
        name = f"layers[{number}]"
        yield name, layer, DecoderLayer
        yield f"{name}.input_norm", layer.input_norm, RMSNorm
        yield from _linear(f"{name}.qkv", layer.qkv, ColumnParallelLinear)
        yield f"{name}.attention", layer.attention, Attention
        yield from _linear(f"{name}.output", layer.output, RowParallelLinear)
        yield f"{name}.post_attention_norm", layer.post_attention_norm, RMSNorm
        yield f"{name}.mlp", layer.mlp, GatedMLP
        assert isinstance(layer.mlp, GatedMLP)
        yield from _linear(f"{name}.mlp.gate_up", layer.mlp.gate_up, ColumnParallelLinear)
        yield from _linear(f"{name}.mlp.down", layer.mlp.down, RowParallelLinear)
    yield "norm", decoder.norm, RMSNorm
    yield "head", decoder.head, VocabularyParallelHead


def _linear(name: str, linear: Any, expected: type) -> Iterator[tuple[str, object, type]]:
    yield name, linear, expected
    yield f"{name}.weight", linear.weight, DenseWeight


def _attributes(part_type: type) -> frozenset[str]:
    """Of its instances: all have slots, and no others can be added."""
    slots = [vars(ancestor).get("__slots__", ("__dict__",)) for ancestor in part_type.__mro__[:-1]]
    return frozenset(name for names in slots for name in names)


def _find_difference(decoder: Decoder) -> str:
    """Where layers are to be unlike each other, though C++ takes one value for all."""
    first = decoder.layers[0]
    for number, layer in enumerate(decoder.layers):
        for name in ("num_heads", "num_kv_heads", "head_dim", "scale", "norm_eps"):
            if getattr(layer.attention, name) != getattr(first.attention, name):
                return f"layers[{number}].attention.{name} is not that of the first layer"
        if layer.attention.cos_sin is not first.attention.cos_sin:
            return f"layers[{number}].attention.cos_sin is not that of the first layer"
        for name in ("input_norm", "post_attention_norm"):
            if getattr(layer, name).eps != first.input_norm.eps:
                return f"layers[{number}].{name}.eps is not that of the first norm"
        if _down_shape(layer) != _down_shape(first):
            return f"layers[{number}].mlp is not of the first layer's size"
    return "" if decoder.norm.eps == first.input_norm.eps else "norm.eps is not that of the first norm"


def _down_shape(layer: Any) -> torch.Size:
    shape: torch.Size = layer.mlp.down.weight.values_OI.shape
    return shape
